"""Logits too large for float32 to resolve what exp needs are still exact softmax, on every tile, with partial states
and without, against float64. Logits of ordinary size are for test_accuracy.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import bounds, need_tile
from oracle import attention_oracle

import jaxinfer
from jaxinfer import AttentionState, Variant

KV_LEN, QO_HEADS, HEAD_DIM = 320, 4, 64
#: Query tokens, by tile: some tiles are filled, some are not.
QUERIES = {1: 2, 16: 5, 64: 20, 128: 40, 192: 60}
KERNELS = [("float32", 1), *((dtype, tile) for dtype in ("bfloat16", "float16") for tile in QUERIES)]
#: Of `jaxinfer.plan`: cuts inside the row, or none.
SPLIT_TOKENS = (64, 1024)
#: A query's first number and a key's, whose product is huge.
LARGE = {"float32": (1.0, 1e30), "bfloat16": (1.0, 1e30), "float16": (60000.0, 60000.0)}
INDEX = np.arange(KV_LEN)


@functools.cache
def program(sm_scale: float, cap: float | None) -> Callable[..., Any]:
    variant = Variant(logits_soft_cap=cap)

    def call(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        return jaxinfer.attention(q, k, v, layout, plan, variant=variant, sm_scale=sm_scale, return_lse=True)

    return jax.jit(call)


def expect_softmax(
    query: Any, keys: Any, dtype: str, tile: int, sm_scale: float = 1.0, cap: float | None = None
) -> None:
    """o and lse where all queries are [query, 0, ...] and the keys [keys[j], 0, ...]."""
    need_tile(tile)
    tokens = QUERIES[tile]
    query, keys = np.asarray(query), np.asarray(keys)
    q, k = np.zeros((tokens, QO_HEADS, HEAD_DIM)), np.zeros((KV_LEN, 1, HEAD_DIM))
    q[..., : query.size] = query
    k[..., : keys.shape[1]] = keys[:, None]
    v = np.random.default_rng(0).integers(-8, 9, size=k.shape)
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
    layout = jaxinfer.ragged(np.array([0, tokens]), np.array([0, KV_LEN]))
    want_o, want_lse = attention_oracle(q, k, v, layout, Variant(logits_soft_cap=cap), sm_scale)
    for split_tokens in SPLIT_TOKENS:
        plan = make_plan(layout, dtype, tile, split_tokens)
        state = program(sm_scale, cap)(q, k, v, layout, plan)
        assert isinstance(state, AttentionState)
        error = np.linalg.norm(np.asarray(state.o).astype(np.float64) - want_o)
        assert error <= bounds()[dtype] * np.linalg.norm(want_o), f"cut every {split_tokens}: error {error}"
        lse = np.asarray(state.lse).astype(np.float64)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=2e-3)


def make_plan(layout: Any, dtype: str, tile: int, split_tokens: int) -> Any:
    return jaxinfer.plan(
        layout,
        num_qo_heads=QO_HEADS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        dtype=jnp.dtype(dtype),
        tiles=(tile,),
        batch_invariant=True,
        split_tokens=split_tokens,
    )


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize(
    "signs",
    [
        pytest.param(np.full(KV_LEN, 1.0), id="all large"),
        pytest.param(np.full(KV_LEN, -1.0), id="all very negative"),
        pytest.param(np.where(INDEX == 77, 1.0, -1.0), id="one large"),
        pytest.param(np.where((INDEX == 3) | (INDEX == 190), 1.0, -1.0), id="two large, far apart"),
        pytest.param(np.where(INDEX == 250, 0.0, -1.0), id="one of ordinary size"),
        pytest.param(np.sign(INDEX // 64 - 2), id="ascending"),
        pytest.param(-np.sign(INDEX // 64 - 2), id="descending"),
    ],
)
def test_a_logit_counts_or_vanishes(signs: np.ndarray[Any, Any], dtype: str, tile: int) -> None:
    query, key = LARGE[dtype]
    expect_softmax([query], key * signs[:, None], dtype, tile)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
def test_largest_half_precision_numbers(dtype: str, tile: int) -> None:
    expect_softmax(np.full(HEAD_DIM, 65504.0), np.full((KV_LEN, HEAD_DIM), 65504.0), dtype, tile)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize("sm_scale", [1e30, 3e38, -3e38])
def test_huge_scale(sm_scale: float, dtype: str, tile: int) -> None:
    expect_softmax([1.0], np.ones((KV_LEN, 1)), dtype, tile, sm_scale)
    expect_softmax([1.0], np.where(INDEX < 160, 0.5, 1.0)[:, None], dtype, tile, sm_scale)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize("common", [2048.0, 2840.0, 4096.0, 2.0**20, -(2.0**20)])
def test_small_differences_of_large_logits(common: float, dtype: str, tile: int) -> None:
    """Exact in float32, and no weight vanishes: neither with a common part in all keys nor in those of one half."""
    common = float(np.asarray(common / 64).astype(jnp.dtype(dtype)))
    for share in (np.ones(KV_LEN), INDEX < 160, INDEX >= 160):
        keys = np.stack([common * share, INDEX * 5 % 7 * 0.5], axis=1)
        expect_softmax([64.0, 1.0], keys, dtype, tile)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
def test_logits_that_ascend_across_sizes(dtype: str, tile: int) -> None:
    """Every few tokens a logit that is larger by less than exp needs to vanish, up to 12000."""
    steps = INDEX // 4
    keys = np.stack([steps * 2.0, INDEX % 4 + steps % 5 * 2.0], axis=1)
    expect_softmax([64.0, 1.0], keys - [80.0, 0.0], dtype, tile)


@pytest.mark.parametrize(("dtype", "tile"), [(dtype, tile) for dtype, tile in KERNELS if dtype != "float16"])
@pytest.mark.parametrize("cap", [0.5, 50.0])
@pytest.mark.parametrize(
    "signs",
    [
        pytest.param(np.full(KV_LEN, 1.0), id="all above"),
        pytest.param(np.full(KV_LEN, -1.0), id="all below"),
        pytest.param(np.where(INDEX % 3 == 0, 1.0, -1.0), id="both"),
        pytest.param(np.where(INDEX < 160, -1.0, 0.0), id="below, then of ordinary size"),
        pytest.param(np.where(INDEX < 160, 0.0, -1.0), id="of ordinary size, then below"),
    ],
)
def test_infinite_products_have_capped_logits(
    signs: np.ndarray[Any, Any], cap: float, dtype: str, tile: int
) -> None:
    """Products beyond float32 are infinite, and cap * tanh of that is the cap: seen, where -inf is not."""
    expect_softmax([1e30], 1e30 * signs[:, None], dtype, tile, cap=cap)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize("cap", [None, 50.0])
def test_a_nan_that_is_seen_is_no_empty_state(cap: float | None, dtype: str, tile: int) -> None:
    need_tile(tile)
    tokens = QUERIES[tile]
    q, k = np.ones((tokens, QO_HEADS, HEAD_DIM)), np.ones((KV_LEN, 1, HEAD_DIM))
    k[130, 0, 3] = np.nan
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, np.ones_like(k)))
    layout = jaxinfer.ragged(np.array([0, tokens]), np.array([0, KV_LEN]))
    for split_tokens in SPLIT_TOKENS:
        state = program(1.0, cap)(q, k, v, layout, make_plan(layout, dtype, tile, split_tokens))
        assert np.isnan(np.asarray(state.o).astype(np.float64)).all()
        assert np.isnan(np.asarray(state.lse)).all()
