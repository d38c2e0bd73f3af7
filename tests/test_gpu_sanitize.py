"""A few calls through JAX for compute-sanitizer: every handler and kernel family, small shapes, results checked.

`tests/gpu.sh sanitize` runs this file as a program; the kernels alone, in many more variants, are sanitized in
tests/cuda.
"""

from __future__ import annotations

import time

import test_gpu
from gpu_cases import check, draw_cases, long_case

from jaxinfer import Variant


def test_every_handler() -> None:
    begin = time.monotonic()

    def covered(what: str) -> None:
        print(f"{what}: right, at {time.monotonic() - begin:.0f} s", flush=True)

    case = long_case([600, 33], [1, 4], "bfloat16")
    check(case, num_ctas=3)
    covered("attention and merge, tiles of tensor cores, pages")
    check(long_case([300, 17], [1, 2], "float32"), num_ctas=5)
    covered("attention and merge, tile 1, pages")
    for kind in ("ragged", "compose2"):
        for sample in draw_cases(
            1, 1, kind=kind, dtype="bfloat16", variant=Variant(causal=True), custom_mask=False,
            group_size=4, num_kv_heads=2, page_size=5, head_dim=64, kv_layout="HND",
        ):  # fmt: skip
            check(sample)
        covered(f"attention, {kind}, HND")
    test_gpu.test_append("HND", "bfloat16", 1)
    test_gpu.test_append("NHD", "float32", None)
    covered("append with slots outside the pool")
    test_gpu.test_empty_batches()
    covered("empty batches")


if __name__ == "__main__":
    test_every_handler()
