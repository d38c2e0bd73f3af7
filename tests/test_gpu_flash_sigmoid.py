"""FlashSigmoid as rules of the user: weights sigmoid(sm_scale * q . k + bias) instead of a softmax.

On a GPU the CUDA text runs; without one it is compiled, and its twin in Python runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from backend import has_nvrtc
from gpu_cases import TOLERANCE, long_case, request_kv, run

import jaxinfer
from jaxinfer import Variant
from jaxinfer.jit import registry
from jaxinfer.jit.spec import FunctorSource, KernelSpec

SOURCE = """
__device__ float logits(float s, const Row& row, const Col& col) const {
  return 1.0f / (1.0f + expf(-(s + params.bias)));
}
"""


class Twin:
    @staticmethod
    def logits(s: Any, row: Any, col: Any, params: Any) -> Any:
        return jax.nn.sigmoid(s + params.bias)


def flash_sigmoid(bias: float) -> Variant:
    return Variant.from_cuda(SOURCE, {"bias": bias}, twin=Twin, softmax=False, causal=True)


def expected(q: Any, k: Any, v: Any, sm_scale: float, bias: float) -> np.ndarray:
    """[tokens, num_qo_heads, head_dim] of one request in float64; q are its last tokens."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = np.einsum("thd,nhd->thn", q, np.repeat(k, group, 1)) * sm_scale + bias
    see = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None, None]
    return np.einsum("thn,nhd->thd", np.where(see, 1 / (1 + np.exp(-s)), 0.0), np.repeat(v, group, 1))


def test_in_plain_jax() -> None:
    rng = np.random.default_rng(4)
    layout = jaxinfer.ragged([0, 5], [0, 11])
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 4, 16), (11, 2, 16), (11, 2, 16)))
    variant = flash_sigmoid(-1.5)
    plan = jaxinfer.plan(
        layout, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", variant=variant
    )
    o = jaxinfer.attention(q, k, v, layout, plan, variant=variant, sm_scale=0.3, implementation="reference")
    np.testing.assert_allclose(np.asarray(o), expected(q, k, v, 0.3, -1.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "dtype", "tile"), [("attention_mma", "bfloat16", 16), ("attention_simt", "float32", 1)]
)
def test_compiles(kernel: str, dtype: str, tile: int) -> None:
    if not has_nvrtc():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    functor = FunctorSource(SOURCE, (), (("bias", "float"),))
    spec = KernelSpec(kernel, dtype, 128, 128, tile, packed=True, rules=1, functor=functor)
    assert registry.compile_spec(spec, "sm_90a")[1].startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype: str) -> None:
    case = dataclasses.replace(long_case([300, 40], [3, 1], dtype), variant=flash_sigmoid(-3.0))
    results = [run(case)[0], run(case, implementation="reference")[0]]
    for kv_len, begin, end, r in ((300, 0, 3, 0), (40, 3, 4, 1)):
        want = expected(case.q[begin:end], *request_kv(case, r, kv_len), case.sm_scale, -3.0)
        for o in results:
            error = np.linalg.norm(o[begin:end].astype(np.float64) - want)
            assert error < TOLERANCE[dtype] * np.linalg.norm(want)
