"""A short speed check on a GPU: decode bandwidth, prefill rate, cost of a call. Numbers to watch, not a
benchmark.

Run as a script; needs random data (zeros draw less power and run faster) and no other load on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer


def seconds(make: Callable[[int], Callable[..., Any]], *args: Any) -> float:
    """Seconds per repetition inside one program: the slope between a short and a long loop, best of five."""
    best = {}
    for n in (4, 24):
        program = make(n)
        jax.block_until_ready(program(*args))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(program(*args))
            times.append(time.perf_counter() - begin)
        best[n] = min(times)
    return (best[24] - best[4]) / 20


def measure(
    q_len: list[int], kv_len: list[int], page_size: int | None, tiles: tuple[int, ...] | None = None
) -> float:
    rng = np.random.default_rng(0)
    heads, kv_heads, dim = 32, 8, 128
    qo_indptr = np.cumsum([0, *q_len])
    if page_size is None:
        layout = jaxinfer.ragged(qo_indptr, np.cumsum([0, *kv_len]))
        shape: tuple[int, ...] = (sum(kv_len), kv_heads, dim)
    else:
        need = [-(-n // page_size) for n in kv_len]
        layout = jaxinfer.paged(
            qo_indptr, np.cumsum([0, *need]), rng.permutation(sum(need)), np.array(kv_len), page_size
        )
        shape = (sum(need), page_size, kv_heads, dim)
    variant = jaxinfer.Variant(causal=True)
    plan = jaxinfer.plan(
        layout, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, variant=variant, tiles=tiles
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (sum(q_len), heads, dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])

    def make(n: int) -> Callable[..., Any]:
        def step(_: int, q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
            return jaxinfer.attention(q, k, v, layout, plan, variant=variant)

        return jax.jit(lambda q, *rest: jax.lax.fori_loop(0, n, lambda i, x: step(i, x, *rest), q))

    return seconds(make, q, k, v, layout, plan)


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bf16, 32/8 heads, head_dim 128")
    for batch, length, page in ((1, 8192, 16), (16, 2048, 16), (64, 2048, 16), (64, 8192, 16), (64, 8192, 1)):
        t = measure([1] * batch, [length] * batch, page)
        size = batch * length * 8 * 128 * 2 * 2
        print(
            f"decode  {batch:3d} x {length:6d} page {page:2d}: {t * 1e6:9.1f} us {size / t / 1e12:6.2f} TB/s"
        )
    skewed = [65536] + [512] * 63
    t = measure([1] * 64, skewed, 16)
    print(f"decode  1 x 65536 + 63 x 512:  {t * 1e6:9.1f} us {sum(skewed) * 4096 / t / 1e12:6.2f} TB/s")
    for batch, length, page in ((4, 4096, None), (4, 4096, 16), (1, 16384, 16)):
        t = measure([length] * batch, [length] * batch, page)
        flops = batch * 32 * length**2 / 2 * 128 * 4
        name = "contiguous" if page is None else f"page {page}"
        print(
            f"prefill {batch:3d} x {length:6d} {name:10s}: {t * 1e6:9.1f} us {flops / t / 1e12:6.1f} TFLOP/s"
        )


if __name__ == "__main__":
    main()
