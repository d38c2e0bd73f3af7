"""Bugs that users of attention engines met: windows, soft caps, custom and tree masks, rotary positions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close
from batches import (
    Way,
    engine_for_all,
    every_paged_way,
    every_way,
    expect_visible,
    random_requests,
    run,
    store,
    zero_queries,
)

import jaxinfer
from jaxinfer import Variant
from jaxinfer.rope import apply_rope, rope_cos_sin, rope_frequencies

CAUSAL = Variant(causal=True)
PARENTS = (-1, 0, 0, 1)
TREE_V = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0)
TREE_O = (1 / 3, 0.75, 1.25, 2.2)
TREE_COUNT = (3, 4, 4, 5)


def tree_mask(prefix: int, parents: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """bool [nodes, prefix + nodes]: the prefix, the node's ancestors and itself."""
    mask = np.zeros((len(parents), prefix + len(parents)), bool)
    mask[:, :prefix] = True
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
        mask[i, prefix + i] = True
    return mask


def tree_requests() -> tuple[list[Any], list[Any], list[Any]]:
    q, k, _ = zero_queries([4], [6])
    v = [np.broadcast_to(np.array(TREE_V, np.float32)[:, None, None], (6, 1, 16))]
    return q, k, v


def masked(
    layout: jaxinfer.BlockSparse, masks: list[Any], capacity: int | None = None, **rules: Any
) -> Variant:
    bits, indptr = jaxinfer.pack_masks(masks, layout, capacity)
    used = int(indptr[-1])
    bits[used:] = 255  # behind the used bytes nothing may be read as "visible"
    return Variant(mask_bits=bits, mask_indptr=indptr, **rules)


# ---- sliding windows off by one (vllm#3385, transformers#39408)


@engine_for_all("causal", [False, True])
def test_a_left_window_is_an_inclusive_distance(way: Way, causal: bool) -> None:
    stored = store(way, *zero_queries([1], [8]))
    state = run(way, stored, variant=Variant(causal=causal, window_left=3))
    assert_close(state.o[0, 0, 0], 5.5, rtol=1e-6)
    assert_close(state.lse[0, 0], math.log(4), rtol=1e-6)
    expect_visible(run(way, stored, variant=Variant(causal=causal, window_left=0)), [[7]])
    expect_visible(run(way, stored, variant=Variant(causal=causal)), [range(8)])


@every_way
def test_a_window_of_2048_on_4096_tokens(way: Way) -> None:
    state = run(way, store(way, *zero_queries([1], [4096]), page_size=64), variant=Variant(window_left=2048))
    expect_visible(state, [range(4096 - 2049, 4096)])


# ---- a left window without causal that sees all the future (jax#39576)


@every_way
def test_both_windows_bound_without_causal(way: Way) -> None:
    state = run(way, store(way, *zero_queries([6], [6])), variant=Variant(window_left=3, window_right=0))
    assert_close(np.exp(state.lse[:, 0]), [1, 2, 3, 4, 4, 4], rtol=1e-5)
    expect_visible(state, [range(max(0, i - 3), i + 1) for i in range(6)])


@every_way
def test_a_right_window_alone(way: Way) -> None:
    state = run(way, store(way, *zero_queries([6], [9])), variant=Variant(window_right=2))
    expect_visible(state, [range(min(9, 3 + i + 3)) for i in range(6)])


# ---- windows of chunked prefill (tpu-inference#1169)


@every_way
def test_a_window_in_chunked_prefill(way: Way) -> None:
    state = run(way, store(way, *zero_queries([5], [12])), variant=Variant(causal=True, window_left=2))
    assert_close(np.exp(state.lse[:, 0]), [3] * 5, rtol=1e-5)
    expect_visible(state, [range(p - 2, p + 1) for p in range(7, 12)])


# ---- the soft cap before the scale, without its factor, or dropped (unsloth-zoo#593, trl#5691)


def capped() -> tuple[list[Any], list[Any], list[Any]]:
    q = np.zeros((2, 1, 16), np.float32)
    q[:, 0, :2] = 2.0
    k = np.zeros((2, 1, 16), np.float32)
    k[0, 0, :2] = 2.0
    v = np.zeros((2, 1, 16), np.float32)
    v[0] = 1.0
    return [q], [k], [v]


@every_way
def test_the_soft_cap_comes_after_the_scale(way: Way) -> None:
    q, k, v = capped()
    stored = store(way, [q[0][1:]], k, v)
    state = run(way, stored, sm_scale=0.5, variant=Variant(logits_soft_cap=2.0))
    assert_close(state.o[0, 0], 0.873034, atol=1e-6)
    assert_close(state.lse[0, 0], 2.063836, atol=1e-6)
    state = run(way, stored, sm_scale=0.5)
    assert_close(state.o[0, 0], 0.982014, atol=1e-6)


@every_way
def test_masked_logits_stay_minus_infinity_under_a_soft_cap(way: Way) -> None:
    """exp(-cap) would leave a visible weight; query 0 sees key 0 alone."""
    state = run(way, store(way, *capped()), sm_scale=0.5, variant=Variant(causal=True, logits_soft_cap=2.0))
    np.testing.assert_array_equal(state.o[0, 0], 1.0)
    assert_close(state.lse[:, 0], [2 * math.tanh(2), 2.063836], atol=1e-6)
    assert_close(state.o[1, 0], 0.873034, atol=1e-6)


# ---- custom masks: read beyond the packed bits, wrong shape accepted (flashinfer#1005, flashinfer#3176)


@engine_for_all("capacity", [None, 64])
def test_a_custom_mask_of_any_shape_reads_its_own_bits(way: Way, capacity: int | None) -> None:
    mask = np.random.default_rng(2).random((10, 20)) < 0.4
    mask[3] = False
    q, k, v = zero_queries([10], [20], 8, 4, 128)
    stored = store(way, q, k, v)
    state = run(way, stored, variant=masked(stored.layout, [mask], capacity))
    expect_visible(state, [np.flatnonzero(row).tolist() for row in mask], 4)


def test_a_mask_of_another_shape_is_refused_with_both_shapes() -> None:
    layout = jaxinfer.ragged([0, 10], [0, 20])
    with pytest.raises(ValueError, match=r"masks\[0\].*\(10, 15\).*\(10, 20\)"):
        jaxinfer.pack_masks([np.ones((10, 15), bool)], layout)


# ---- bit order


def test_mask_bits_are_packed_from_the_least_significant_bit() -> None:
    bits, indptr = jaxinfer.pack_masks([tree_mask(2, PARENTS)], jaxinfer.ragged([0, 4], [0, 6]))
    assert bits.tobytes().hex() == "c773bd"
    assert indptr.tolist() == [0, 3]


# ---- siblings of a draft tree see each other (vllm#17560)


@engine_for_all("causal", [False, True])
def test_tree_attention(way: Way, causal: bool) -> None:
    stored = store(way, *tree_requests())
    state = run(way, stored, variant=masked(stored.layout, [tree_mask(2, PARENTS)], causal=causal))
    assert_close(state.o[:, 0, 0], TREE_O, rtol=1e-6)
    assert_close(state.lse[:, 0], np.log(TREE_COUNT), rtol=1e-6)


# ---- the mask of one call is used by the next (flashinfer#1028)


@every_way
def test_calls_with_and_without_a_mask_alternate(way: Way) -> None:
    stored = store(way, *tree_requests())
    tree = masked(stored.layout, [tree_mask(2, PARENTS)])
    causal_o = [np.mean(TREE_V[: 3 + i]) for i in range(4)]
    for _ in range(3):
        assert_close(run(way, stored, variant=tree).o[:, 0, 0], TREE_O, rtol=1e-6)
        state = run(way, stored, variant=CAUSAL)
        assert_close(state.o[:, 0, 0], causal_o, rtol=1e-6)
        assert_close(state.lse[:, 0], np.log([3, 4, 5, 6]), rtol=1e-6)


# ---- rejected drafts are attended to in the next round, masks of other requests are read (sglang-jax#1569)


@every_way
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 5.0])
def test_rejected_drafts_left_in_the_cache_are_not_seen(way: Way, garbage: float) -> None:
    """After accepting 0 -> 1 -> 3 the cache holds prefix 2 and three drafts; the next token is the sixth."""
    q, k, v = zero_queries([1], [6])
    stored = store(way, q, k, v, page_size=8, poison_k=garbage, poison_v=garbage)
    state = run(way, stored, variant=CAUSAL)
    expect_visible(state, [range(6)])
    assert_close(state.lse, math.log(6), rtol=1e-6)


@every_way
def test_masks_of_different_requests_do_not_mix(way: Way) -> None:
    small, large = tree_mask(2, PARENTS), tree_mask(4, (-1, 0, 1, 0, 3))
    q, k, v = zero_queries([4, 5], [6, 9], 4, 2)
    stored = store(way, q, k, v)
    for first, second in ((small, large), (~small, large), (small, ~large)):
        state = run(way, stored, variant=masked(stored.layout, [first, second], 32))
        visible = [np.flatnonzero(row).tolist() for mask in (first, second) for row in mask]
        expect_visible(state, visible, 2)


@every_way
def test_mask_rows_of_requests_without_tokens_take_no_bits(way: Way) -> None:
    mask = tree_mask(2, PARENTS)
    q, k, v = zero_queries([0, 4, 2, 0], [3, 6, 0, 0])
    stored = store(way, q, k, v)
    masks = [np.ones((0, 3), bool), mask, np.ones((2, 0), bool), np.ones((0, 0), bool)]
    state = run(way, stored, variant=masked(stored.layout, masks))
    expect_visible(state, [*(np.flatnonzero(row).tolist() for row in mask), [], []])


# ---- rotary positions: offset ignored, slots taken for positions (flashinfer#194, mlx-vlm#1983)


def test_the_angle_of_position_5() -> None:
    cos, sin = rope_cos_sin(np.array([5], np.int32), rope_frequencies(2, 10000.0))
    assert_close(cos, [[0.283662]], atol=1e-6)
    assert_close(sin, [[-0.958924]], atol=1e-6)


@every_paged_way
def test_prefill_of_six_equals_prefill_of_five_and_decode_of_one(way: Way) -> None:
    q, k, v = (x[0] for x in random_requests([6], [6], 4, 2, 16))
    shape = (5, 4, 2, 16) if way.storage == "NHD" else (5, 2, 4, 16)

    @jax.jit
    def step(q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, layout: Any, plan: Any) -> Any:
        angles = rope_cos_sin(layout.q_pos, rope_frequencies(16, 10000.0))
        q, k = (apply_rope(x, *angles, interleaved=False) for x in (q, k))
        pools = jaxinfer.append_kv(k_pages, v_pages, k, v, layout.slots(), kv_layout=way.kv_layout)
        options: dict[str, Any] = {"variant": CAUSAL, "kv_layout": way.kv_layout}
        return jaxinfer.attention(
            q, *pools, layout, plan, implementation=way.implementation, **options
        ), pools

    def steps(*lengths: int) -> np.ndarray[Any, Any]:
        pools = (jnp.full(shape, jnp.nan, jnp.float32),) * 2
        done, out = 0, []
        for n in lengths:
            layout = jaxinfer.paged([0, n], [0, 2], [3, 1], [done + n], 4, num_tokens=6)
            plan = jaxinfer.plan(
                layout, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=np.float32, variant=CAUSAL
            )
            new = [np.full((6, *x.shape[1:]), np.nan, np.float32) for x in (q, k, v)]
            for padded, x in zip(new, (q, k, v), strict=True):
                padded[:n] = x[done : done + n]
            o, pools = step(*new, *pools, layout, plan)
            out.append(np.asarray(o)[:n])
            done += n
        return np.concatenate(out)

    whole = steps(6)
    assert np.isfinite(whole).all()
    assert_close(steps(5, 1), whole, rtol=1e-5, atol=1e-6)
    assert_close(steps(1, 1, 3, 1), whole, rtol=1e-5, atol=1e-6)


def test_requests_behind_a_shared_prefix_have_positions_of_their_own() -> None:
    prefix = jaxinfer.paged([0, 4], [0, 2], [0, 1], [8], 4)
    suffixes = jaxinfer.paged([0, 1, 4], [0, 1, 3], [2, 3, 4], [3, 6], 4)
    assert jaxinfer.compose(prefix, suffixes).q_pos.tolist() == [10, 11, 12, 13]
