"""User rules that change rows of q, K, V and the output: in the tiles of both kernels, and where rows are merged.

Logits and masks of users are tested in test_gpu.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from backend import has_nvrtc
from gpu_cases import TOLERANCE, long_case, plan_of, request_kv, run
from plan_executor import unpack_plan

from jaxinfer import Variant
from jaxinfer.jit import registry
from jaxinfer.jit.spec import FunctorSource, KernelSpec

#: Factors are powers of two, so that rounding to the element type changes nothing.
SOURCE = """
template <int kCount> __device__ void query(float (&x)[kCount], int dim, const Row& row) const {
  for (int i = 0; i < kCount; ++i) x[i] *= params.scales[dim + i];
}
template <int kCount> __device__ void key(float (&x)[kCount], int dim, const Row& row, const Col& col) const {
  for (int i = 0; i < kCount; ++i) x[i] *= col.kv_index % 3 == 0 ? 0.5f : 1.0f;
}
template <int kCount> __device__ void value(float (&x)[kCount], int dim, const Row& row, const Col& col) const {
  for (int i = 0; i < kCount; ++i) x[i] *= row.kv_head == 0 ? 2.0f : dim + i < 64 ? 0.5f : -1.0f;
}
template <int kCount> __device__ void output(float (&x)[kCount], int dim, const Row& row) const {
  for (int i = 0; i < kCount; ++i) x[i] = fmaxf(x[i], params.floors[row.qo_head]) + params.scales[dim + i];
}
"""
SCALES = np.exp2(np.arange(128) % 3 - 1).astype(np.float32)
FLOORS = np.linspace(-0.05, 0.02, 8).astype(np.float32)
HEADS, KV_HEADS, DIM, PAGE_SIZE = 8, 2, 128, 16


def expected(q: Any, k: Any, v: Any, sm_scale: float) -> np.ndarray:
    """[tokens, HEADS, DIM] of one request in float64; q are its last tokens."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q = q * SCALES
    k = k * np.where(np.arange(len(k)) % 3 == 0, 0.5, 1.0)[:, None, None]
    v = v * np.stack([np.full(DIM, 2.0), np.where(np.arange(DIM) < 64, 0.5, -1.0)])
    group = HEADS // KV_HEADS
    s = np.einsum("thd,nhd->thn", q, np.repeat(k, group, 1)) * sm_scale
    see = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None, None]
    w = np.where(see, np.exp(s - s.max(-1, keepdims=True)), 0.0)
    o = np.einsum("thn,nhd->thd", w / w.sum(-1, keepdims=True), np.repeat(v, group, 1))
    return np.maximum(o, FLOORS[:, None]) + SCALES


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tile"),
    [("attention_mma", "bfloat16", 16), ("attention_simt", "float32", 1), ("merge", "bfloat16", None)],
)
def test_compiles(kernel: str, dtype: str, tile: int | None, softmax: bool) -> None:
    if not has_nvrtc():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    functor = FunctorSource(SOURCE, (("scales", "float"), ("floors", "float")), ())
    rules = 32 * softmax
    if tile is None:
        spec = KernelSpec(kernel, dtype, head_dim_vo=DIM, rules=rules, functor=functor)
    else:
        spec = KernelSpec(kernel, dtype, DIM, DIM, tile, packed=True, rules=rules + 1, functor=functor)
    assert registry.compile_spec(spec, "sm_90a")[1].startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [("float32", (1,)), ("bfloat16", (1,)), ("bfloat16", (16,)), ("bfloat16", (32,)), ("float16", (64,))],
)
@pytest.mark.parametrize("num_ctas", [1, 40])
def test_on_a_gpu(dtype: str, tiles: tuple[int, ...], num_ctas: int) -> None:
    """One worker merges nothing; with forty the long row is cut, and `output` belongs to the merged row."""
    q_len, kv_len = (1, 3, 20), (2900, 40, 130)
    case = long_case(list(kv_len), list(q_len), dtype, PAGE_SIZE, heads=(HEADS, KV_HEADS), head_dim=DIM)
    variant = Variant.from_cuda(SOURCE, {"scales": SCALES, "floors": FLOORS}, causal=True)
    case = dataclasses.replace(case, variant=variant)
    options = {"tiles": tiles, "num_ctas": num_ctas}
    assert (unpack_plan(plan_of(case, **options)).num_merge > 0) == (num_ctas > 1)
    o, _ = run(case, **options)
    begin = 0
    for r, (rows, length) in enumerate(zip(q_len, kv_len, strict=True)):
        want = expected(case.q[begin : begin + rows], *request_kv(case, r, length), case.sm_scale)
        error = np.linalg.norm(o[begin : begin + rows].astype(np.float64) - want)
        assert error < TOLERANCE[dtype] * np.linalg.norm(want), f"request {r}"
        begin += rows


MASK = """
__device__ bool mask(const Row& row, const Col& col) const { return row.token % 3 != 1; }
"""
OUTPUT = """
template <int kCount> __device__ void output(float (&x)[kCount], int dim, const Row& row) const {
  for (int i = 0; i < kCount; ++i) x[i] += 3.0f;
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tile"),
    [("float32", 1), ("bfloat16", 1), ("bfloat16", 16), ("bfloat16", 32), ("float16", 64), ("bfloat16", 128)],
)
@pytest.mark.parametrize("num_ctas", [1, 40])
def test_output_leaves_empty_rows_alone(dtype: str, tile: int, num_ctas: int, softmax: bool) -> None:
    """Rows of a request without KV, and rows that the mask leaves nothing to see: final, cut and merged."""
    q_len = [3, 2, 4, 20]
    case = long_case([2900, 0, 40, 130], q_len, dtype, PAGE_SIZE, heads=(HEADS, KV_HEADS), head_dim=DIM)
    results = {}
    for name, source in (("plain", MASK), ("changed", MASK + OUTPUT)):
        variant = Variant.from_cuda(source, causal=True, softmax=softmax)
        results[name] = run(dataclasses.replace(case, variant=variant), tiles=(tile,), num_ctas=num_ctas)
    tokens = np.arange(sum(q_len))
    empty = (tokens % 3 == 1) | (tokens == 3) | (tokens == 4)
    for o, lse in results.values():
        assert not o[empty].any()
        assert lse is None or (np.isneginf(lse) == empty[:, None]).all()
    (plain, _), (changed, _) = results["plain"], results["changed"]
    np.testing.assert_allclose(
        changed[~empty].astype(np.float64), plain[~empty].astype(np.float64) + 3, rtol=0.01, atol=0.03
    )
