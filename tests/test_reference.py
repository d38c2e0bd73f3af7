"""The oracle in closed form, and the reference against it on poisoned batches. No compiled kernels here."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close, bounds
from cases import KINDS, Case, make_case
from oracle import append_oracle, attention_oracle

from jaxinfer import AttentionState, BlockSparse, Variant, compose, pack_masks, paged, ragged, reference

INF, LN = np.inf, np.log
TOLERANCE = bounds()
RULES = {
    "plain": Variant(),
    "causal": Variant(causal=True),
    "windows": Variant(window_left=5, window_right=1),
    "causal_cap": Variant(causal=True, window_left=17, logits_soft_cap=2.0),
    "no_softmax": Variant(causal=True, softmax=False),
}


@functools.partial(jax.jit, static_argnames=("kv_layout", "return_lse"))
def jitted(
    q: Any, k: Any, v: Any, layout: BlockSparse, variant: Variant, sm_scale: Any, layer: Any, **options: Any
) -> Any:
    return reference.attention(q, k, v, layout, variant=variant, sm_scale=sm_scale, layer=layer, **options)


def run(case: Case) -> tuple[Any, Any]:
    """o and lse (None without softmax), in the dtypes they come in."""
    out = jitted(
        *case.args,
        case.variant,
        case.sm_scale,
        case.layer,
        kv_layout=case.kv_layout,
        return_lse=case.variant.softmax,
    )
    if isinstance(out, AttentionState):
        return np.asarray(out.o), np.asarray(out.lse)
    return np.asarray(out), None


def assert_matches_oracle(case: Case) -> None:
    want_o, want_lse = attention_oracle(*case.args, **case.oracle_kwargs)
    o, lse = run(case)
    assert o.dtype == case.q.dtype and np.isfinite(want_o).all()
    error = np.linalg.norm(o.astype(np.float64) - want_o)
    assert error <= TOLERANCE[str(case.q.dtype)] * np.linalg.norm(want_o)
    if lse is None:
        return
    assert lse.dtype == np.float32
    empty = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert (o[empty] == 0).all()
    assert_close(lse[~empty], want_lse[~empty], rtol=1e-6, atol=1e-4)


def mean_case(
    q_lens: Any,
    kv_lens: Any,
    variant: Variant,
    *,
    heads: tuple[int, int] = (1, 1),
    capacity: int | None = None,
) -> tuple[Any, ...]:
    """q = 0, v[j, h] = j + 1000 h: o is the mean of the visible indices, lse the log of their number."""
    layout = ragged(
        np.concatenate([[0], np.cumsum(q_lens)]),
        np.concatenate([[0], np.cumsum(kv_lens)]),
        num_tokens=capacity,
    )
    total = int(np.sum(kv_lens))
    q = np.zeros((layout.num_tokens, heads[0], 16), np.float32)
    k = np.ones((total, heads[1], 16), np.float32)
    index = np.concatenate([np.arange(n) for n in kv_lens]).astype(np.float32)
    v = np.broadcast_to((index[:, None] + 1000 * np.arange(heads[1]))[..., None], (total, heads[1], 16))
    return q, k, v.astype(np.float32), layout, variant


def both(
    q: Any, k: Any, v: Any, layout: Any, variant: Variant, sm_scale: float | None = None
) -> list[tuple[Any, Any]]:
    """(o, lse) of the oracle and of the reference."""
    state = reference.attention(q, k, v, layout, variant=variant, sm_scale=sm_scale, return_lse=True)
    return [
        attention_oracle(q, k, v, layout, variant, sm_scale),
        (np.asarray(state.o), np.asarray(state.lse)),
    ]


def closed_form(case: Any, o: Any, lse: Any, sm_scale: float | None = None) -> None:
    """Checks the first component of o and lse, both [num_tokens, num_qo_heads] or [num_tokens]."""
    for got_o, got_lse in both(*case, sm_scale):
        want_o, want_lse = np.asarray(o, float), np.asarray(lse, float)
        shape = got_lse.shape
        assert_close(got_o[..., 0], np.broadcast_to(want_o.reshape(len(want_o), -1), shape), rtol=1e-5)
        assert_close(got_lse, np.broadcast_to(want_lse.reshape(len(want_lse), -1), shape), rtol=1e-5)


def test_more_queries_than_keys() -> None:
    closed_form(mean_case([5], [3], Variant(causal=True)), [0, 0, 0, 0.5, 1], [-INF, -INF, 0, LN(2), LN(3)])


def test_empty_requests_and_padding() -> None:
    case = mean_case([0, 1, 0, 1, 1], [0, 3, 4, 5, 0], Variant(), heads=(9, 3), capacity=5)
    head = 1000 * (np.arange(9) // 3)
    rows = [1 + head, 2 + head, 0 * head, 0 * head, 0 * head]
    closed_form(case, np.stack(rows), [LN(3), LN(5), -INF, -INF, -INF])


def test_second_request_reads_its_own_keys() -> None:
    closed_form(mean_case([1, 2], [4, 3], Variant()), [1.5, 1, 1], [LN(4), LN(3), LN(3)])
    closed_form(mean_case([1, 2], [4, 3], Variant(causal=True)), [1.5, 0.5, 1], [LN(4), LN(2), LN(3)])


def test_right_window_without_causal() -> None:
    # The left window alone would let every token see all the future.
    case = mean_case([6], [6], Variant(window_left=3, window_right=0))
    closed_form(case, [0, 0.5, 1, 1.5, 2.5, 3.5], LN([1, 2, 3, 4, 4, 4]))


def test_left_window_is_an_inclusive_distance() -> None:
    closed_form(mean_case([1], [8], Variant(window_left=3)), [5.5], [LN(4)])
    closed_form(mean_case([1], [8], Variant(window_left=0)), [7], [0])
    closed_form(mean_case([1], [8], Variant(window_left=2**31 - 1)), [3.5], [LN(8)])
    closed_form(mean_case([3], [8], Variant(window_right=2**31 - 1)), [3.5] * 3, [LN(8)] * 3)
    closed_form(
        mean_case([12], [5], Variant(window_left=2**31 - 1, causal=True)),
        [0] * 8 + [0.5, 1, 1.5, 2],
        [-INF] * 7 + [0, *LN([2, 3, 4, 5])],
    )


def test_soft_cap_comes_after_the_scale() -> None:
    q, k, v = (np.zeros((n, 1, 16), np.float32) for n in (1, 2, 2))
    q[0, 0, :2] = k[0, 0, :2] = 2
    v[0] = 1
    case = (q, k, v, ragged([0, 1], [0, 2]), Variant(logits_soft_cap=2.0))
    closed_form(case, [0.873034], [2.063836], sm_scale=0.5)
    closed_form((*case[:4], Variant()), [0.982014], [4 + math.log1p(math.exp(-4))], sm_scale=0.5)


def test_draft_tree() -> None:
    parents = [-1, 0, 0, 1]
    mask = np.zeros((4, 6), bool)
    mask[:, :2] = True
    for i in range(4):
        j = i
        while j >= 0:
            mask[i, 2 + j], j = True, parents[j]
    layout = ragged([0, 4], [0, 6])
    bits, indptr = pack_masks([mask], layout)
    q, k = np.zeros((4, 1, 16), np.float32), np.ones((6, 1, 16), np.float32)
    v = np.broadcast_to(np.array([0, 0, 1, 2, 4, 8], np.float32)[:, None, None], (6, 1, 16))
    variant = Variant(mask_bits=bits, mask_indptr=indptr)
    closed_form((q, k, v, layout, variant), [1 / 3, 0.75, 1.25, 2.2], LN([3, 4, 4, 5]))
    # The mask leaves no trace in the next call.
    closed_form((q, k, v, layout, Variant(causal=True)), [1 / 3, 0.75, 1.4, 2.5], LN([3, 4, 5, 6]))


def shared_prefix() -> tuple[Any, ...]:
    """Scores 1, 2 in a shared page, then suffixes of scores 3, 4 / none / 3; v is ten times the score."""
    pages = np.full((4, 2, 1, 16), np.nan, np.float32)
    for page, scores in enumerate([[1, 2], [3, 4], [3]]):
        for offset, score in enumerate(scores):
            pages[page, offset] = 0
            pages[page, offset, :, 0] = score
    q = np.zeros((3, 1, 16), np.float32)
    q[..., 0] = 1
    return q, pages, 10 * pages


O_SHARED, LSE_SHARED = [34.926527, 17.310586, 25.752104], [4.440190, 2.313262, 3.407606]


@pytest.mark.parametrize("variant", [Variant(), Variant(causal=True)], ids=["full", "causal"])
def test_shared_prefix_with_an_empty_suffix(variant: Variant) -> None:
    q, k, v = shared_prefix()
    prefix = paged([0, 3], [0, 1], [0], [2], 2)
    suffix = paged([0, 1, 2, 3], [0, 1, 1, 2], [1, 2, 99], [2, 0, 1], 2)
    flat = paged([0, 1, 2, 3], [0, 2, 3, 5], [0, 1, 0, 0, 2], [4, 2, 3], 2)
    for layout in (flat, compose(prefix, suffix)):
        closed_form((q, k, v, layout, variant), O_SHARED, LSE_SHARED, sm_scale=1.0)


def test_append_over_a_page_edge_then_attend() -> None:
    layout = paged([0, 3], [0, 2], [6, 1], [6], 4)
    k = np.full((8, 4, 1, 16), np.nan, np.float32)
    v = k.copy()
    k[6, :3], v[6, :3] = 1, np.arange(3)[:, None, None]
    new = np.broadcast_to(np.array([3, 4, 5], np.float32)[:, None, None], (3, 1, 16))
    k, v = reference.append_kv(k, v, np.ones_like(new), new, layout.slots())
    np.testing.assert_array_equal(np.asarray(v)[[6, 1, 1], [3, 0, 1], 0, 0], [3, 4, 5])
    assert np.isnan(np.asarray(v)).sum() == (8 * 4 - 6) * 16
    closed_form(
        (np.zeros((3, 1, 16), np.float32), k, v, layout, Variant(causal=True)), [1.5, 2, 2.5], LN([4, 5, 6])
    )


def test_bfloat16_sums_do_not_stall() -> None:
    q, k, v = (np.ones((n, 1, 16), jnp.bfloat16) for n in (1, 1000, 1000))
    state = reference.attention(q * 0, k, v, ragged([0, 1], [0, 1000]), return_lse=True)
    assert (np.asarray(state.o) == 1).all()
    assert_close(state.lse, LN([[1000]]), rtol=1e-6)


def test_huge_logits_are_still_a_softmax() -> None:
    q, k = np.full((1, 1, 16), 1, np.float32), np.zeros((2, 1, 16), np.float32)
    for shift in (-1e4, 1e4):
        k[:, 0, 0] = [shift, shift + 1]
        v = np.broadcast_to(np.array([0, 1], np.float32)[:, None, None], (2, 1, 16))
        o = math.e / (1 + math.e)
        closed_form((q, k, v, ragged([0, 1], [0, 2]), Variant()), [o], [shift + LN(1 + math.e)], sm_scale=1.0)


def test_nan_that_is_seen_is_no_empty_state() -> None:
    k, layout = np.full((2, 1, 16), np.nan, np.float32), ragged([0, 1, 2], [0, 1, 2])
    k[1] = 0
    state = reference.attention(np.zeros((2, 1, 16), np.float32), k, k, layout, return_lse=True)
    np.testing.assert_array_equal(np.isnan(state.o).all(axis=(1, 2)), [True, False])
    np.testing.assert_array_equal(np.isnan(state.lse)[:, 0], [True, False])


def test_page_ids_outside_the_pool_count_as_masked() -> None:
    pages = np.zeros((3, 2, 1, 16), np.float32) + np.arange(3, dtype=np.float32)[:, None, None, None]
    layout = paged([0, 1, 2], [0, 3, 4], [1, 99, 2, -1], [6, 2], 2)
    case = (np.zeros((2, 1, 16), np.float32), pages, pages, layout, Variant())
    closed_form(case, [1.5, 0], [LN(4), -INF])


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
def test_layer_out_of_range_is_the_empty_state(layer: int) -> None:
    case = make_case(np.random.default_rng(0), "paged", num_layers=3, variant=Variant(), custom_mask=False)
    state = reference.attention(*case.args, **{**case.kwargs, "layer": layer}, return_lse=True)
    assert (np.asarray(state.o) == 0).all() and np.isneginf(state.lse).all()
    o, lse = attention_oracle(*case.args, **{**case.oracle_kwargs, "layer": layer})
    assert (o == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("tokens, rows", [(0, 0), (0, 2), (3, 0), (3, 2)])
def test_nothing_to_see(tokens: int, rows: int) -> None:
    zero = np.zeros(rows + 1, np.int32)
    q = np.full((tokens, 2, 16), np.nan, np.float32)
    for k, layout in (
        (np.zeros((0, 4, 1, 16), np.float32), paged(zero, zero, [], zero[1:], 4, num_tokens=tokens)),
        (np.full((2, 4, 1, 16), np.nan, np.float32), paged(zero, zero, [-9], zero[1:], 4, num_tokens=tokens)),
        (np.zeros((0, 1, 16), np.float32), ragged(zero, zero, num_tokens=tokens)),
    ):
        state = reference.attention(q, k, k, layout, return_lse=True)
        assert state.o.shape == (tokens, 2, 16) and state.lse.shape == (tokens, 2)
        assert (np.asarray(state.o) == 0).all() and np.isneginf(state.lse).all()


# Every second pair: each kind meets at least two rules and each rule three kinds, at one compilation a pair.
@pytest.mark.parametrize(
    "kind, rules", [(k, r) for i, k in enumerate(KINDS) for j, r in enumerate(RULES) if (i + j) % 2 == 0]
)
def test_against_the_oracle(kind: str, rules: str) -> None:
    """Fixed shapes: one compilation, many poisoned batches."""
    index = KINDS.index(kind) + len(KINDS) * list(RULES).index(rules)
    options = {
        "dtype": tuple(TOLERANCE)[index % 3],
        "group_size": (3, 5, 1, 17)[index % 4],
        "num_kv_heads": (2, 1)[index % 4 == 3],
        "page_size": (4, 7, 1, 16, 5)[index % 5],
        "head_dim_vo": (16, 24)[index % 2],
        "kv_layout": ("NHD", "HND")[index % 2],
        "num_layers": (None, 3)[index % 2] if kind != "ragged" else None,
        "custom_mask": index % 3 == 1,
    }
    for seed in range(20):
        rng = np.random.default_rng(1000 * index + seed)
        assert_matches_oracle(make_case(rng, kind, variant=RULES[rules], fixed=True, **options))


@pytest.mark.parametrize("group_size", [65, 128])
def test_large_groups(group_size: int) -> None:
    rng = np.random.default_rng(group_size)
    assert_matches_oracle(make_case(rng, "paged", group_size=group_size, variant=Variant(causal=True)))


def test_contexts_of_several_chunks() -> None:
    rng = np.random.default_rng(0)
    for max_kv_len in (700, 1500):
        assert_matches_oracle(
            make_case(rng, "compose2", group_size=3, max_kv_len=max_kv_len, variant=Variant(window_left=300))
        )


def test_what_must_not_be_read_changes_no_bit() -> None:
    case = make_case(
        np.random.default_rng(5), "compose2", group_size=3, fixed=True, variant=Variant(causal=True)
    )

    def clean(x: Any) -> Any:
        return np.where(np.isfinite(x), x, 0.25).astype(x.dtype)

    tame = Case(**{**vars(case), "q": clean(case.q), "k": clean(case.k), "v": clean(case.v)})
    assert not np.isfinite(case.k).all()
    for a, b in zip(run(case), run(tame), strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer", [None, 0, 2, -1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_append(kv_layout: str, layer: int | None, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shape = (5, 4, 2, 16) if kv_layout == "NHD" else (5, 2, 4, 16)
    pools = [
        rng.normal(size=(*(() if layer is None else (3,)), *shape[:-1], d)).astype(dtype) for d in (16, 8)
    ]
    rows = [rng.normal(size=(7, 2, d)).astype(dtype) for d in (16, 8)]
    slots = np.array([-1, 3, 19, 20, 0, -(2**31), 2**31 - 1], np.int32)
    got = jax.jit(reference.append_kv, static_argnames="kv_layout")(
        *pools, *rows, slots, layer=layer, kv_layout=kv_layout
    )
    for a, b in zip(got, append_oracle(*pools, *rows, slots, layer, kv_layout), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))


def test_append_of_nothing() -> None:
    pool, rows = np.ones((1, 4, 1, 16), np.float32), np.ones((0, 1, 16), np.float32)
    k, v = reference.append_kv(pool, pool, rows, rows, np.zeros(0, np.int32))
    assert (np.asarray(k) == 1).all() and (np.asarray(v) == 1).all()


Q, K, PAGES = np.zeros((1, 4, 16)), np.zeros((3, 2, 16)), np.zeros((3, 4, 2, 16))
ONE, PAGED = ragged([0, 1], [0, 3]), paged([0, 1], [0, 1], [0], [1], 4)


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((Q[:0], K, K, ONE), {}, r"q has 0 tokens, the layout has 1"),
        ((Q[:, :3], K, K, ONE), {}, r"q has 3 heads of 16, k has 2 of 16"),
        ((Q, K[..., :8], K, ONE), {}, r"q has 4 heads of 16, k has 2 of 8"),
        ((Q, PAGES, PAGES, ONE), {}, r"k \[3, 4, 2, 16\] and v .* need 3 axes"),
        ((Q, PAGES, PAGES, PAGED), {"layer": 0}, r"k \[3, 4, 2, 16\] and v .* need 5 axes"),
        ((Q, PAGES, PAGES[:2], PAGED), {}, r"k .* and v \[2, 4, 2, 16\] need 4 axes, equal up to the last"),
        ((Q, PAGES, PAGES, PAGED), {"kv_layout": "HND"}, r"k has 2 tokens per page, the layout has 4"),
        ((Q, PAGES, PAGES, PAGED), {"kv_layout": "NDH"}, r"kv_layout must be one of .*NHD.*, got 'NDH'"),
        ((Q, K, K, ONE), {"variant": Variant(softmax=False), "return_lse": True}, r"the LSE is not defined"),
    ],
)
def test_refusals(args: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.attention(*(x.astype(np.float32) for x in args[:3]), args[3], **options)
