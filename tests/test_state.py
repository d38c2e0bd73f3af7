"""Merging of attention states against float64 and in closed form. Merging inside one call: not here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close

from jaxinfer import AttentionState, lse_from_log2, lse_to_log2, merge, merge_many

INF = np.inf


def state(o: Any, lse: Any, dtype: Any = np.float32) -> AttentionState:
    return AttentionState(jnp.asarray(o, dtype), jnp.asarray(lse, jnp.float32))


def bits(x: Any) -> Any:
    return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def assert_same_bits(a: AttentionState, b: AttentionState) -> None:
    assert a.o.dtype == b.o.dtype
    np.testing.assert_array_equal(bits(a.o), bits(b.o))
    np.testing.assert_array_equal(bits(a.lse), bits(b.lse))


def random_state(rng: np.random.Generator, dtype: Any = np.float32) -> AttentionState:
    return state(rng.normal(size=(6, 3, 16)), rng.normal(size=(6, 3)) * 5, dtype)


def merged_in_float64(states: list[AttentionState]) -> tuple[Any, Any]:
    lse = np.stack([np.asarray(s.lse, np.float64) for s in states])
    o = np.stack([np.asarray(s.o).astype(np.float64) for s in states])
    total = np.logaddexp.reduce(lse)
    return (o * np.exp(lse - total)[..., None]).sum(axis=0), total


def test_unequal_chunks_weigh_by_their_keys() -> None:
    # 4096 and 4 keys with equal logits: base-2 and natural logs mixed up would give the small one 4.5e-5.
    big, small = state([[[0.0]]], [[math.log(4096)]]), state([[[1.0]]], [[math.log(4)]])
    got = merge(big, small)
    assert_close(got.o, [[[4 / 4100]]], rtol=1e-5)
    assert_close(got.lse, [[math.log(4100)]], rtol=1e-6)


@pytest.mark.parametrize("garbage", [0.0, np.nan, INF, 7.0])
def test_two_empty_states(garbage: float) -> None:
    empty = state(np.full((2, 3, 64), garbage), np.full((2, 3), -INF))
    for got in (merge(empty, empty), merge_many([empty]), merge_many([empty] * 3)):
        assert_same_bits(got, state(np.zeros((2, 3, 64)), np.full((2, 3), -INF)))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("garbage", [np.nan, -INF, 3.0])
def test_empty_is_neutral_bit_for_bit(dtype: Any, garbage: float) -> None:
    x = random_state(np.random.default_rng(0), dtype)
    x = AttentionState(x.o.at[0, 0, 0].set(-0.0), x.lse.at[1].set(-3e5).at[2].set(3e5))
    empty = state(np.full(x.o.shape, garbage), np.full(x.lse.shape, -INF), dtype)
    for got in (merge(x, empty), merge(empty, x), merge_many([empty, x, empty]), jax.jit(merge)(empty, x)):
        assert_same_bits(got, x)


def test_empty_heads_and_tokens_are_told_apart() -> None:
    a = state([[[1.0], [np.nan]]], [[0.0, -INF]])
    b = state([[[np.nan], [2.0]]], [[-INF, 1.0]])
    assert_same_bits(merge(a, b), state([[[1.0], [2.0]]], [[0.0, 1.0]]))


def test_merge_against_float64() -> None:
    rng = np.random.default_rng(1)
    states = [random_state(rng) for _ in range(5)]
    for some in (states[:1], states[:2], states):
        got = merge_many(some)
        o, lse = merged_in_float64(some)
        assert_close(got.o, o, rtol=1e-5, atol=1e-6)
        assert_close(got.lse, lse, rtol=1e-6, atol=1e-6)
    assert_same_bits(merge(states[0], states[1]), merge_many(states[:2]))


def test_order_does_not_matter_to_rounding() -> None:
    rng = np.random.default_rng(2)
    a, b, c = (random_state(rng) for _ in range(3))
    left, right = merge(merge(a, b), c), merge(a, merge(c, b))
    assert_close(left.o, right.o, rtol=1e-5, atol=1e-6)
    assert_close(left.lse, right.lse, rtol=1e-6)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_huge_logits_do_not_over_or_underflow(shift: float) -> None:
    got = merge(state([[[1.0]]], [[shift]]), state([[[3.0]]], [[shift]]))
    assert_close(got.o, [[[2.0]]], rtol=1e-6)
    assert_close(got.lse, [[shift + math.log(2)]], rtol=1e-6)


def test_many_low_precision_states_are_rounded_once() -> None:
    rng = np.random.default_rng(3)
    states = [random_state(rng, jnp.bfloat16) for _ in range(40)]
    o, _ = merged_in_float64(states)
    # Half an ulp of bfloat16 each, plus what float32 loses; rounding 40 times would lose several times that.
    assert_close(np.asarray(merge_many(states).o, np.float64), o, rtol=2**-8, atol=1e-4)


def test_log2_converters() -> None:
    lse = jnp.array([0.0, math.log(8), -INF])
    assert_close(lse_to_log2(lse), [0, 3, -INF], rtol=1e-6)
    assert_close(lse_from_log2(lse_to_log2(lse)), lse, rtol=1e-6)


def test_is_a_pytree() -> None:
    x = random_state(np.random.default_rng(0))
    assert_same_bits(jax.jit(lambda s: jax.tree.map(lambda y: y, s))(x), x)


@pytest.mark.parametrize(
    "states, message",
    [
        ([], r"merge_many needs at least one state"),
        (
            [((1, 2, 8), np.float32, (1, 2)), ((1, 2, 4), np.float32, (1, 2))],
            r"state 1 has o float32\[1, 2, 4\]",
        ),
        (
            [((1, 2, 8), np.float32, (1, 2)), ((1, 2, 8), np.float16, (1, 2))],
            r"state 1 has o float16\[1, 2, 8\], state 0 has float32",
        ),
        ([((1, 2, 8), np.float32, (2, 1))], r"state 0 has lse float32\[2, 1\], expected float32\[1, 2\]"),
    ],
)
def test_refusals(states: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_many([state(np.zeros(o), np.zeros(lse), dtype) for o, dtype, lse in states])


def test_low_precision_lse_is_refused() -> None:
    x = AttentionState(jnp.zeros((1, 2, 8)), jnp.zeros((1, 2), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"state 0 has lse bfloat16\[1, 2\], expected float32"):
        merge(x, x)


@pytest.mark.parametrize("garbage", [0.0, np.inf])
def test_no_nan_is_computed_on_the_way(garbage: float) -> None:
    """Outside jit jax_debug_nans looks at every intermediate result; gradients are NaN where one of them is."""
    lse = np.array([[-np.inf, 1.0, -np.inf, 2.0]], np.float32)
    a = state(np.where(np.isneginf(lse)[..., None], garbage, 3.0) * np.ones((1, 4, 8)), lse)
    b = state(np.ones((1, 4, 8)), np.array([[-np.inf, -np.inf, 0.5, 0.25]]))

    def total(a: AttentionState) -> jax.Array:
        m = merge_many([a, b, a, b])
        return m.o.sum() + jnp.where(jnp.isneginf(m.lse), 0.0, m.lse).sum()

    before = jax.config.jax_debug_nans
    try:
        jax.config.update("jax_debug_nans", True)
        got = merge(a, b)
        assert np.isneginf(got.lse[0, 0]) and not got.o[0, 0].any()
        slopes = jax.grad(total)(a)
    finally:
        jax.config.update("jax_debug_nans", before)
    assert np.isfinite(slopes.o).all() and np.isfinite(slopes.lse).all()
    assert (slopes.o[0, 1] == 1).all() and not slopes.o[0, 0].any()
