"""Bugs that users of attention engines met: pages, slots, indices, and sizes that some kernel did not have.

The other half of a report is often the refusal it should have been: those are in test_errors.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close, bounds
from batches import (
    ABSURD,
    ENGINE,
    Way,
    attend,
    engine_for_all,
    every_paged_way,
    every_way,
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
NHD = Way("NHD", None)


def attention64(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any], causal: bool
) -> Any:
    """One request in float64: o [q_len, heads, dim] and lse [q_len, heads], scale 1 / sqrt(dim)."""
    group = q.shape[1] // k.shape[1]
    k64, v64 = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q.astype(np.float64), k64) / math.sqrt(q.shape[2])
    if causal:
        i, j = np.arange(q.shape[0])[:, None], np.arange(k.shape[0])[None]
        s = np.where(j <= k.shape[0] - q.shape[0] + i, s, -np.inf)
    top = s.max(-1, keepdims=True)
    w = np.exp(s - top)
    lse = (top + np.log(w.sum(-1, keepdims=True)))[..., 0]
    return np.einsum("hij,jhd->ihd", w / w.sum(-1, keepdims=True), v64), lse.T


def expect_float64(state: jaxinfer.AttentionState, requests: Any, causal: bool) -> None:
    """Relative error below the float32 bound for every request on its own."""
    q, k, v = requests
    begin = 0
    for a, b, c in zip(q, k, v, strict=True):
        o, lse = attention64(a, b, c, causal)
        got = state.o[begin : begin + a.shape[0]].astype(np.float64)
        assert np.linalg.norm(got - o) <= bounds()["float32"] * np.linalg.norm(o)
        assert_close(state.lse[begin : begin + a.shape[0]], lse, atol=1e-4, rtol=1e-6)
        begin += a.shape[0]


# ---- 0 * NaN: what lies behind kv_len changes bits (flash-attention#1745, flash-attention#2374, vllm#641)


@engine_for_all(
    "causal,q_len,kv_len,heads,page_size",
    [
        (causal, *shape)
        for causal in (False, True)
        for shape in (([1, 1], [1, 3], 1, 3), ([1, 2, 3, 4], [32, 64, 96, 48], 8, 128))
    ],
)
def test_slots_behind_the_last_token_change_no_bit(
    way: Way, causal: bool, q_len: list[int], kv_len: list[int], heads: int, page_size: int
) -> None:
    _, k, v = random_requests(q_len, kv_len, heads, heads, 64)
    q = [np.full((n, heads, 64), 0.5, np.float32) for n in q_len]

    def with_tail(tail_k: float, tail_v: float) -> jaxinfer.AttentionState:
        stored = store(way, q, k, v, page_size=page_size, poison_k=tail_k, poison_v=tail_v)
        return run(way, stored, variant=Variant(causal=causal))

    zero = with_tail(0.0, 0.0)
    assert np.isfinite(zero.o).all()
    nan, inf = math.nan, math.inf
    for tails in [(nan, 0.0), (0.0, nan), (inf, 0.0), (0.0, -inf), (-inf, inf), (3e38, -3e38), (7.0, 1e4)]:
        assert same_bits(with_tail(*tails), zero), f"K, V tails {tails}"


# ---- lanes behind kv_len enter the denominator (flashinfer#3716), reads behind it (flash-attention#1076)


@engine_for_all("kv_len,head_dim,heads", [(257, 128, 8), (300, 128, 8), (257, 32, 1)])
def test_a_length_that_is_no_multiple_of_any_tile(way: Way, kv_len: int, head_dim: int, heads: int) -> None:
    stored = store(way, *zero_queries([1], [kv_len], heads, heads, head_dim), page_size=16)
    state = run(way, stored)
    expect_visible(state, [range(kv_len)], heads)
    assert_close(state.lse, math.log(kv_len), rtol=1e-6)


# ---- page sizes (flashinfer#320, flashinfer#333)


@engine_for_all("page_size", [5, 1, 2, 3, 16, 64, 256, 512], storages=ENGINE[:2])
def test_every_page_size_equals_contiguous(way: Way, page_size: int) -> None:
    requests = random_requests([3, 1], [37, 600], 4, 2, 16)
    flat = ENGINE[2]
    want = run(flat, store(flat, *requests), variant=CAUSAL)
    state = run(way, store(way, *requests, page_size=page_size), variant=CAUSAL)
    assert_close(state.o, want.o, rtol=1e-5, atol=1e-6)
    assert_close(state.lse, want.lse, rtol=1e-6, atol=1e-5)
    expect_float64(state, requests, causal=True)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 64, 256, 512])
def test_more_tokens_than_the_pages_hold_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"kv_len\[1\] = {2 * page_size + 1}.*row 1.*page_size {page_size}"):
        jaxinfer.paged([0, 1, 2], [0, 1, 3], [0, 1, 2], [page_size, 2 * page_size + 1], page_size)


# ---- the second request starts in the wrong place (sglang-jax#20)


@engine_for_all("batch_invariant", [False, True], storages=ENGINE[:2])
def test_requests_that_end_inside_a_page_equal_their_single_runs(way: Way, batch_invariant: bool) -> None:
    q, k, v = random_requests([1, 2], [5, 6], 4, 2, 16)
    pools = []
    for rows in (k, v):
        pool = np.full((10, 4, 2, 16), np.nan, np.float32)
        for ids, x in (((7, 2), rows[0]), ((3, 9), rows[1])):
            for j in range(x.shape[0]):
                pool[ids[j // 4], j % 4] = x[j]
        pools.append(jnp.asarray(pool if way.storage == "NHD" else pool.swapaxes(1, 2)))

    def attention(
        q: np.ndarray[Any, Any], qo: list[int], kv: list[int], ids: list[int], kv_len: list[int]
    ) -> Any:
        layout = jaxinfer.paged(qo, kv, ([*ids, *ABSURD, *ABSURD])[:8], kv_len, 4, num_tokens=3)
        plan = jaxinfer.plan(
            layout,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=np.float32,
            variant=CAUSAL,
            num_pages=10,
            batch_invariant=batch_invariant,
        )
        return attend(
            q, *pools, layout, plan, CAUSAL, kv_layout=way.kv_layout, implementation=way.implementation
        )

    padding = np.full((2, 4, 16), np.nan, np.float32)
    both = attention(np.concatenate(q), [0, 1, 3], [0, 2, 4], [7, 2, 3, 9], [5, 6])
    first = attention(np.concatenate([q[0], padding]), [0, 1, 1], [0, 2, 2], [7, 2], [5, 0])
    second = attention(np.concatenate([q[1], padding[:1]]), [0, 2, 2], [0, 2, 2], [3, 9], [6, 0])
    for got, want in ((both.o, (first.o[:1], second.o[:2])), (both.lse, (first.lse[:1], second.lse[:2]))):
        assert_close(got, np.concatenate(want), rtol=1e-5, atol=1e-6)
        if batch_invariant and way.implementation is None:
            assert same_bits(got, np.concatenate(want))


# ---- bad page ids: attending to page 0 in their place is foreign data (onnxruntime#32391)


@every_paged_way
@pytest.mark.parametrize("bad", [99, -1, 3, 2147483647, -2147483648])
def test_a_bad_page_id_counts_as_masked_and_reads_nothing(way: Way, bad: int) -> None:
    """Request 0 lists [1, bad, 2]; page 0 is foreign and holds NaN, so following `bad` to it would show."""
    layout = jaxinfer.paged([0, 1, 2], [0, 3, 4], [1, bad, 2, 2, *ABSURD], [11, 4], 4)
    with pytest.raises(ValueError, match=rf"{bad}.*3"):
        jaxinfer.plan(layout, num_qo_heads=2, num_kv_heads=1, head_dim=16, dtype=np.float32, num_pages=3)
    plan = jaxinfer.plan(layout, num_qo_heads=2, num_kv_heads=1, head_dim=16, dtype=np.float32)
    k = np.full((3, 4, 1, 16), np.nan, np.float32)
    v = np.full((3, 4, 1, 16), np.nan, np.float32)
    k[1:] = 1.0
    v[1], v[2] = np.arange(4)[:, None, None], np.arange(8, 12)[:, None, None]
    if way.storage == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    state = attend(
        np.zeros((2, 2, 16), np.float32),
        k,
        v,
        layout,
        plan,
        Variant(),
        kv_layout=way.kv_layout,
        implementation=way.implementation,
    )
    expect_visible(
        jaxinfer.AttentionState(np.asarray(state.o), np.asarray(state.lse)),
        [[0, 1, 2, 3, 8, 9, 10], [8, 9, 10, 11]],
    )
    assert int(jax.jit(jaxinfer.check, static_argnums=1)(layout, 3)) == 1


@every_paged_way
def test_a_request_whose_pages_are_all_bad_gets_the_empty_state(way: Way) -> None:
    layout = jaxinfer.paged([0, 1, 2], [0, 2, 3], [-1, 99, 1], [8, 4], 4)
    plan = jaxinfer.plan(layout, num_qo_heads=2, num_kv_heads=1, head_dim=16, dtype=np.float32)
    pool = np.full((2, 1, 4, 16) if way.storage == "HND" else (2, 4, 1, 16), np.nan, np.float32)
    pool[1] = 0.0
    q = np.ones((2, 2, 16), np.float32)
    state = attend(
        q, pool, pool, layout, plan, Variant(), kv_layout=way.kv_layout, implementation=way.implementation
    )
    assert_close(state.lse, [[-np.inf] * 2, [math.log(4)] * 2], rtol=1e-6)
    assert not np.asarray(state.o).any()


# ---- ragged K and V sliced with the query offset (flashinfer#4018)


@every_way
def test_each_request_sees_its_own_keys(way: Way) -> None:
    q, k, v = zero_queries([1, 2], [4, 3])
    v[1] = v[1] + 5000
    stored = store(way, q, k, v)
    full, causal = run(way, stored), run(way, stored, variant=CAUSAL)
    assert_close(full.lse[:, 0], np.log([4, 3, 3]), rtol=1e-6)
    assert_close(full.o[:, 0, 0], [1.5, 5001, 5001], rtol=1e-6)
    assert_close(causal.lse[:, 0], np.log([4, 2, 3]), rtol=1e-6)
    assert_close(causal.o[:, 0, 0], [1.5, 5000.5, 5001], rtol=1e-6)


# ---- group sizes: wrong (not refused), or read out of bounds (flashinfer#996, mlc-llm#2543, jax#24602)

HEADS = [(24, 4), (28, 4), (56, 8), (40, 8), (64, 4), (14, 2), (64, 1), (128, 1)] + [
    (2 * group, 2) for group in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 64)
]


@engine_for_all("num_qo_heads,num_kv_heads", HEADS)
def test_every_group_size_equals_repeated_heads(way: Way, num_qo_heads: int, num_kv_heads: int) -> None:
    q, k, v = random_requests([1, 3], [9, 6], num_qo_heads, num_kv_heads, 16)
    v = [x / 8 + np.arange(num_kv_heads)[None, :, None] for x in v]
    state = run(way, store(way, q, k, v), variant=CAUSAL)
    expect_float64(state, (q, k, v), causal=True)
    state = run(way, store(way, *zero_queries([1, 3], [9, 6], num_qo_heads, num_kv_heads)), variant=CAUSAL)
    expect_visible(state, [range(9), range(4), range(5), range(6)], num_kv_heads)


# ---- head dims that are silently wrong or fault (flashinfer#4299)


@engine_for_all("head_dim", [72, 80, 96, 112, 136, 144, 160, 176])
def test_head_dims_between_the_usual_ones(way: Way, head_dim: int) -> None:
    q, k, v = random_requests([5], [11], 4, 2, head_dim)
    for x in (q, k, v):  # the next head holds NaN: reading past the end of a head would show
        x[0][:, x[0].shape[1] // 2 :] = np.nan
    state = run(way, store(way, q, k, v), variant=CAUSAL)
    half = jaxinfer.AttentionState(state.o[:, :2], state.lse[:, :2])
    assert np.isfinite(half.o).all()
    expect_float64(half, ([q[0][:, :2]], [k[0][:, :1]], [v[0][:, :1]]), causal=True)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_a_head_dim_of_512_is_refused_when_planning(num_kv_heads: int) -> None:
    """Not at launch (flashinfer#3297, flashinfer#3576)."""
    layout = jaxinfer.paged([0, 1], [0, 1], [0], [4], 4)
    with pytest.raises(NotImplementedError, match=r"head_dim.*512.*256"):
        jaxinfer.plan(
            layout, num_qo_heads=16 if num_kv_heads == 1 else 32, num_kv_heads=num_kv_heads, head_dim=512
        )


# ---- prompts of one or two tokens (vllm#6395)


@engine_for_all("q_len", [1, 2])
def test_short_prompts_with_wide_heads(way: Way, q_len: int) -> None:
    requests = random_requests([q_len], [q_len], 4, 2, 256)
    expect_float64(run(way, store(way, *requests), variant=CAUSAL), requests, causal=True)


# ---- a device with few processors: the number of chunks becomes 0 (flashinfer#1027)


@pytest.mark.parametrize("num_ctas", [1, 3, 7])
@pytest.mark.parametrize("schedule", ["lpt", "runs"])
def test_any_number_of_ctas_gives_a_plan(num_ctas: int, schedule: str) -> None:
    stored = store(NHD, *zero_queries([1, 40, 3], [4096, 300, 9], 4, 4), page_size=16)
    state = run(NHD, stored, variant=CAUSAL, num_ctas=num_ctas, schedule=schedule)
    expect_visible(
        state, [range(4096), *(range(261 + i) for i in range(40)), range(7), range(8), range(9)], 4
    )
    # At the reported head count one KV head alone has more workers than there are CTAs.
    layout = jaxinfer.paged([0, 1], [0, 256], np.arange(256), [4096], 16)
    plan = jaxinfer.plan(
        layout, num_qo_heads=32, num_kv_heads=32, head_dim=128, num_ctas=num_ctas, schedule=schedule
    )
    assert all(c.num_queues >= 1 for c in plan.spec.classes)


# ---- an index buffer of batch x length (flashinfer#1419)


@pytest.mark.parametrize("total", [16384, 16385])
def test_many_tokens_in_many_requests(total: int) -> None:
    q_len = [128] * 127 + [total - 127 * 128]
    way = Way("contiguous", None)
    stored = store(way, *zero_queries(q_len, q_len, 8, 1))
    plan = make_plan(way, stored, CAUSAL)
    assert plan.data.shape == (plan.spec.num_words,)
    state = run(way, stored, variant=CAUSAL)
    at = np.concatenate([np.arange(n) for n in q_len])
    assert_close(state.o[:, :, 3], np.repeat(at[:, None] / 2, 8, 1), rtol=2e-6, atol=1e-6)
    assert_close(state.lse, np.repeat(np.log(at + 1)[:, None], 8, 1), rtol=1e-6, atol=1e-6)
