"""Bugs that users of attention engines met, as tests with exact values: lengths zero, one and unequal.

Each test names the class of bug it guards against; public reports are cited where there is one. Pages and
sizes, masks, and plans and merging have files of their own beside this one.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close
from batches import (
    Way,
    engine_for_all,
    every_way,
    every_way_and_storage,
    expect_visible,
    make_plan,
    random_requests,
    run,
    same_bits,
    store,
    zero_queries,
)

import jaxinfer
from jaxinfer import Variant

CAUSAL = Variant(causal=True)
LN = math.log


def spoil_freed_memory(shape: tuple[int, ...]) -> None:
    """Leaves NaN in memory that the next outputs of this shape may get."""
    (jnp.full(shape, jnp.nan) + 1).block_until_ready()


# ---- finite LSE for empty rows (flashinfer#4452, flashinfer#4401)


@every_way_and_storage
def test_queries_before_the_first_key_get_the_empty_state(way: Way) -> None:
    state = run(way, store(way, *zero_queries([5], [3])), variant=CAUSAL, sm_scale=1.0)
    assert_close(state.o[:, 0, 0], [0, 0, 0, 0.5, 1], atol=1e-6)
    assert_close(state.lse[:, 0], [-np.inf, -np.inf, 0, LN(2), LN(3)], atol=1e-6)
    assert not state.o[:2].any()


@every_way
def test_one_key_under_many_queries_is_seen_by_the_last_alone(way: Way) -> None:
    state = run(way, store(way, *random_requests([34], [1], 32, 32, 16)), variant=CAUSAL)
    assert np.isneginf(state.lse).sum() == 33 * 32 == 1056
    assert not state.o[:33].any()
    assert np.isfinite(state.lse[33]).all()


# ---- NaN where there are more queries than keys (flash-attention#443, flash-attention#1778)


@every_way
def test_more_queries_than_keys_in_every_request(way: Way) -> None:
    q, k, v = random_requests([76, 34, 146], [1, 1, 1], 1, 1, 32)
    state = run(way, store(way, q, k, v), variant=CAUSAL)
    last = [75, 109, 255]
    for r, t in enumerate(last):
        assert_close(state.o[t], v[r][0], rtol=1e-6)
        want = float(q[r][-1, 0].astype(np.float64) @ k[r][0, 0].astype(np.float64)) / math.sqrt(32)
        assert_close(state.lse[t, 0], want, rtol=1e-5, atol=1e-6)
    rest = np.delete(np.arange(256), last)
    assert rest.size == 253
    assert not state.o[rest].any()
    assert np.isneginf(state.lse[rest]).all()


# ---- a "decode" shortcut that takes the batch for the number of tokens (flash-attention#1537)


@engine_for_all("causal", [False, True])
def test_requests_without_queries_between_single_tokens(way: Way, causal: bool) -> None:
    q, k, v = zero_queries([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, 64)
    state = run(way, store(way, q, k, v), variant=Variant(causal=causal))
    assert state.o.shape == (2, 9, 64)
    expect_visible(state, [range(3), range(5)], 3)
    assert_close(state.lse, [[LN(3)] * 9, [LN(5)] * 9], rtol=1e-6)


# ---- zero-length queries in the middle and at the end (flash-attention#2562)


@engine_for_all("batch_invariant", [False, True])
def test_requests_without_queries_leave_the_others_alone(way: Way, batch_invariant: bool) -> None:
    q, k, v = random_requests([0, 6, 4, 0], [9, 7, 5, 11], 4, 1, 256)
    options = {"variant": CAUSAL, "batch_invariant": batch_invariant}
    state = run(way, store(way, q, k, v), **options)
    alone = run(way, store(way, q[1:3], k[1:3], v[1:3], seed=5), **options)
    assert np.isfinite(state.o).all()
    assert np.isfinite(state.lse).all()
    if batch_invariant and way.implementation is None:
        assert same_bits(state, alone)
    assert_close(state.o, alone.o, rtol=1e-5, atol=1e-6)
    assert_close(state.lse, alone.lse, rtol=1e-5, atol=1e-6)


def test_requests_without_queries_at_the_reported_size() -> None:
    q_len, kv_len = np.diff([0, 0, 1208, 2048, 2048]), np.diff([0, 2538, 4280, 5120, 8192])
    q, k, v = zero_queries(q_len.tolist(), kv_len.tolist(), 4, 1, 256)
    way = Way("contiguous", None)
    state = run(way, store(way, q, k, v), variant=CAUSAL)
    # The last i of n queries see the first kv_len - n + i + 1 keys.
    count = np.concatenate([m - n + 1 + np.arange(n) for n, m in zip(q_len, kv_len, strict=True)])
    assert_close(state.o[:, :, 0], np.repeat((count[:, None] - 1) / 2, 4, 1), rtol=1e-5)
    assert_close(state.lse, np.repeat(np.log(count)[:, None], 4, 1), rtol=1e-6)


# ---- division by the batch size or by the number of queries (flash-attention#2503, flash-attention#1159)


@every_way
def test_a_batch_in_which_no_request_has_queries(way: Way) -> None:
    stored = store(way, *zero_queries([0, 0], [4096, 4096], 8, 2), page_size=64)
    plan = make_plan(way, stored, CAUSAL)
    assert plan.spec.num_tokens == 0
    state = run(way, stored, variant=CAUSAL)
    assert state.o.shape == (0, 8, 16)
    assert state.o.dtype == np.float32
    assert state.lse.shape == (0, 8)
    assert state.lse.dtype == np.float32


@every_way_and_storage
@pytest.mark.parametrize("num_tokens", [0, 64])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_batch_without_requests(way: Way, num_tokens: int, batch_invariant: bool) -> None:
    if way.storage == "contiguous":
        layout = jaxinfer.ragged([0], [0], num_kv_tokens=8, num_tokens=num_tokens)
        cache = np.full((8, 2, 16), np.nan, np.float32)
    else:
        layout = jaxinfer.paged([0], [0], [2147480000, -1], [], 4, num_tokens=num_tokens)
        cache = np.full((2, 4, 2, 16) if way.storage == "NHD" else (2, 2, 4, 16), np.nan, np.float32)
    plan = jaxinfer.plan(
        layout, num_qo_heads=8, num_kv_heads=2, head_dim=16, dtype=np.float32, batch_invariant=batch_invariant
    )
    state = jaxinfer.attention(
        jnp.full((num_tokens, 8, 16), jnp.nan),
        jnp.asarray(cache),
        jnp.asarray(cache),
        layout,
        plan,
        kv_layout=way.kv_layout,
        return_lse=True,
        implementation=way.implementation,
    )
    assert state.o.shape == (num_tokens, 8, 16)
    assert state.lse.shape == (num_tokens, 8)
    assert not np.asarray(state.o).any()
    assert np.isneginf(state.lse).all()


# ---- padded requests of a fixed-capacity batch write NaN or nothing (sglang#1779, vllm#37442)


@every_way
@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_keys_are_written_and_disturb_nobody(way: Way, causal: bool) -> None:
    q, k, v = zero_queries([1, 1, 1, 1], [3, 2, 1, 0], 4, 2)
    spoil_freed_memory((4, 4, 16))
    state = run(way, store(way, q, k, v), variant=Variant(causal=causal))
    expect_visible(state, [range(3), range(2), range(1), []], 2)
    fewer = run(way, store(way, q[:3], k[:3], v[:3]), variant=Variant(causal=causal))
    assert same_bits(state.o[:3], fewer.o)
    assert same_bits(state.lse[:3], fewer.lse)


@every_way
def test_padding_requests_and_padding_tokens_of_a_fixed_capacity(way: Way) -> None:
    q, k, v = zero_queries([1] * 5 + [0] * 3, [9, 4, 1, 2, 17, 0, 0, 0], 4, 2)
    spoil_freed_memory((8, 4, 16))
    state = run(way, store(way, q, k, v, num_tokens=8), variant=CAUSAL)
    expect_visible(state, [range(9), range(4), range(1), range(2), range(17)], 2)


# ---- requests shorter than one page (flashinfer#725)


@engine_for_all("causal", [False, True])
def test_two_equal_requests_shorter_than_a_page(way: Way, causal: bool) -> None:
    q, k, v = random_requests([1], [1], 32, 8, 64)
    state = run(way, store(way, q * 2, k * 2, v * 2, page_size=2), variant=Variant(causal=causal))
    assert same_bits(state.o[0], state.o[1])
    assert same_bits(state.lse[0], state.lse[1])
    assert_close(state.o[0], np.repeat(v[0][0], 4, axis=0), rtol=1e-6)


# ---- wrong alignment where q_len != kv_len (jax#24491)


@every_way_and_storage
def test_causal_aligns_the_last_query_with_the_last_key(way: Way) -> None:
    stored = store(way, *zero_queries([3], [7]))
    full = run(way, stored)
    expect_visible(full, [range(7)] * 3)
    assert_close(full.lse[:, 0], [LN(7)] * 3, rtol=1e-6)
    causal = run(way, stored, variant=CAUSAL)
    expect_visible(causal, [range(5), range(6), range(7)])
    assert_close(causal.lse[:, 0], [LN(5), LN(6), LN(7)], rtol=1e-6)


# ---- fully masked tiles skipped, so that outputs stay uninitialised (flashinfer#1533)


@every_way
def test_outputs_of_fully_masked_tiles_are_written(way: Way) -> None:
    q, k, v = zero_queries([200], [3], 2, 1)
    for _ in range(3):
        spoil_freed_memory((200, 2, 16))
        spoil_freed_memory((200, 2))
        state = run(way, store(way, q, k, v), variant=CAUSAL)
        expect_visible(state, [[]] * 197 + [range(1), range(2), range(3)])


# ---- single values: every way agrees on one query and one key


@every_way
def test_one_query_and_one_key(way: Way) -> None:
    q, k, v = random_requests([1], [1], 1, 1, 16)
    state = run(way, store(way, q, k, v), variant=CAUSAL, sm_scale=0.25)
    assert same_bits(state.o[0], v[0][0])
    want = 0.25 * float(q[0][0, 0].astype(np.float64) @ k[0][0, 0].astype(np.float64))
    assert_close(state.lse[0, 0], want, rtol=1e-5)
