"""BlockSparse and its constructors: fields by hand, host against jit, refusals. Attention is not here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import BlockSparse, check, compose, from_block_mask, from_block_table, paged, ragged

FIELDS = ("q_start", "q_len", "kv_start", "kv_indices", "kv_len", "kv_offset", "q_pos", "block_pos")
STATIC = ("page_size", "contiguous", "num_layouts", "kv_capacity")


def assert_same(a: BlockSparse, b: BlockSparse) -> None:
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype == np.int32, name
            np.testing.assert_array_equal(x, y, err_msg=name)
    for name in STATIC:
        assert getattr(a, name) == getattr(b, name), name


def test_paged_fields() -> None:
    a = paged([0, 2, 2, 5], [0, 2, 3, 5], [7, 4, 9, 1, 2, -5], [6, 1, 5], page_size=4, num_tokens=7)
    np.testing.assert_array_equal(a.q_start, [0, 2, 2])
    np.testing.assert_array_equal(a.q_len, [2, 0, 3])
    np.testing.assert_array_equal(a.kv_start, [0, 2, 3])
    np.testing.assert_array_equal(a.kv_offset, [0, 0, 0])
    np.testing.assert_array_equal(a.q_pos, [4, 5, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(a.slots(), [16, 17, 6, 7, 8, -1, -1])
    assert (a.num_tokens, a.num_rows, a.page_size, a.contiguous) == (7, 3, 4, False)
    assert (a.num_layouts, a.kv_capacity, a.block_pos) == (1, 24, None)


def test_more_queries_than_keys_have_negative_positions_and_no_slot() -> None:
    a = paged([0, 5], [0, 1], [6], [3], page_size=4)
    np.testing.assert_array_equal(a.q_pos, [-2, -1, 0, 1, 2])
    np.testing.assert_array_equal(a.slots(), [-1, -1, 24, 25, 26])


def test_slots_over_a_page_edge() -> None:
    a = paged([0, 3], [0, 2], [6, 1], [6], page_size=4)
    np.testing.assert_array_equal(a.slots(), [27, 4, 5])


def test_slots_of_a_garbage_page_id_do_not_wrap_around() -> None:
    # 2**30 * 4 is 0 in int32, which would be a slot of somebody else's page.
    a = paged([0, 1, 2, 3], [0, 1, 2, 3], [2**30, -1, 2**29 - 1], [1, 1, 4], page_size=4)
    np.testing.assert_array_equal(a.slots(), [-1, -1, 2**31 - 1])
    np.testing.assert_array_equal(jax.jit(BlockSparse.slots)(a), [-1, -1, 2**31 - 1])


def test_block_table_equals_paged() -> None:
    table = np.array([[3, 1, 99], [2, -1, -1]])
    a = from_block_table(table, [7, 2], [0, 1, 3], page_size=4, num_tokens=4)
    assert_same(a, paged([0, 1, 3], [0, 3, 6], table.reshape(-1), [7, 2], 4, num_tokens=4))


def test_ragged_fields() -> None:
    a = ragged([0, 1, 3], [0, 4, 7], num_kv_tokens=9, num_tokens=4)
    np.testing.assert_array_equal(a.kv_start, [0, 4])
    np.testing.assert_array_equal(a.kv_len, [4, 3])
    np.testing.assert_array_equal(a.q_pos, [3, 1, 2, 0])
    np.testing.assert_array_equal(a.slots(), [3, 5, 6, -1])
    assert a.contiguous and a.kv_indices.shape == (0,) and a.kv_capacity == 9 and a.page_size == 1
    assert check(a, 0) == 0


def test_block_mask_fields() -> None:
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    a = from_block_mask(mask, block_rows=2, block_cols=4, num_tokens=7, num_kv_tokens=10)
    np.testing.assert_array_equal(a.q_start, [0, 2, 4])
    np.testing.assert_array_equal(a.q_len, [2, 2, 2])
    np.testing.assert_array_equal(a.kv_start, [0, 2, 2])
    np.testing.assert_array_equal(a.kv_indices[:5], [0, 2, 0, 1, 2])
    np.testing.assert_array_equal(a.block_pos[:5], [0, 8, 0, 4, 8])
    np.testing.assert_array_equal(a.kv_len, [6, 0, 10])
    np.testing.assert_array_equal(a.q_pos, [0, 1, 2, 3, 4, 5, 0])
    assert a.kv_indices.shape == (9,) and a.kv_capacity == 36 and a.page_size == 4
    cut = from_block_mask(mask, 2, 4, num_tokens=5)
    np.testing.assert_array_equal(cut.q_len, [2, 2, 1])
    np.testing.assert_array_equal(cut.kv_len, [8, 0, 12])


def test_compose_fields() -> None:
    prefix = paged([0, 3], [0, 1], [0], [2], page_size=2, num_tokens=4)
    suffix = paged([0, 1, 2, 3], [0, 1, 1, 2], [1, 2, 99], [2, 0, 1], page_size=2, num_tokens=4)
    a = compose(prefix, suffix)
    np.testing.assert_array_equal(a.q_start, [0, 0, 1, 2])
    np.testing.assert_array_equal(a.kv_start, [0, 1, 2, 2])
    np.testing.assert_array_equal(a.kv_indices, [0, 1, 2, 99])
    np.testing.assert_array_equal(a.kv_len, [2, 2, 0, 1])
    np.testing.assert_array_equal(a.kv_offset, [0, 2, 2, 2])
    np.testing.assert_array_equal(a.q_pos, [3, 1, 2, 0])  # summed lengths 4, 2, 3; the last token's position
    np.testing.assert_array_equal(a.slots(), [3, -1, 4, -1])
    assert a.num_layouts == 2 and a.kv_capacity == 8


def test_compose_is_associative() -> None:
    rng = np.random.default_rng(0)
    qo = np.array([0, 2, 5, 5, 6])
    levels = [
        paged(qo[b], np.arange(len(b)) * 3, rng.integers(0, 9, 3 * len(b)), rng.integers(0, 7, len(b) - 1), 2)
        for b in (np.array([0, 4]), np.array([0, 2, 4]), np.arange(5))
    ]
    assert_same(compose(compose(*levels[:2]), levels[2]), compose(*levels))
    assert_same(compose(levels[0], compose(*levels[1:])), compose(*levels))
    assert_same(compose(levels[2]), levels[2])


def test_compose_takes_the_position_from_the_last_covering_layout() -> None:
    a = paged([0, 2], [0, 2], [0, 1], [3], page_size=2, num_tokens=3)
    only_second = paged([0, 0, 1], [0, 0, 1], [2], [0, 1], page_size=2, num_tokens=3)
    c = compose(a, only_second)
    # Token 0: 3 + 1 tokens, the last; token 1: layout 0 alone.
    np.testing.assert_array_equal(c.q_pos, [3, 2, 0])
    np.testing.assert_array_equal(c.kv_offset, [0, 0, 3])


def test_compose_of_contiguous_layouts_shares_k_and_v() -> None:
    a, b = ragged([0, 2], [0, 3], num_kv_tokens=8), ragged([0, 1, 2], [0, 1, 4], num_kv_tokens=8)
    c = compose(a, b)
    np.testing.assert_array_equal(c.kv_start, [0, 0, 1])
    assert c.kv_capacity == 16 and c.kv_indices.shape == (0,)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_do_is_legal(rows: int) -> None:
    zero = np.zeros(rows + 1, np.int32)
    for a in (paged(zero, zero, [], zero[1:], 4), ragged(zero, zero), paged(zero, zero, [], zero[1:], 4, 5)):
        assert a.num_rows == rows and (a.q_pos == 0).all() and (a.slots() == -1).all() and check(a, 1) == 0
        assert (jax.jit(BlockSparse.slots)(a) == -1).all()
    assert from_block_mask(np.zeros((0, 0), bool), 4, 4).num_tokens == 0
    assert from_block_table(np.zeros((rows, 0), int), zero[1:], zero, 4).kv_capacity == 0


ROWS, CAPACITY, TOKENS, PAGE_SIZE = 5, 40, 24, 3


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    """Arguments of `paged` at fixed shapes, and a shared level over groups of its rows."""
    ints = lambda low, high, n: np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))  # noqa: E731
    q_len, kv_len, slack = ints(0, 4, ROWS), ints(0, 15, ROWS), ints(0, 2, ROWS)
    qo = np.concatenate([[0], np.cumsum(q_len)])
    cut = draw(st.integers(0, ROWS))
    shared = ints(0, 15, 2)
    return {
        "qo": qo,
        "kv_indptr": np.concatenate([[0], np.cumsum(-(-kv_len // PAGE_SIZE) + slack)]),
        "indices": ints(-2, 12, CAPACITY),
        "kv_len": kv_len,
        "qo_shared": qo[[0, cut, ROWS]],
        "kv_indptr_shared": np.concatenate([[0], np.cumsum(-(-shared // PAGE_SIZE))]),
        "kv_len_shared": shared,
    }


def build(b: dict[str, Any]) -> dict[str, BlockSparse]:
    flat = paged(b["qo"], b["kv_indptr"], b["indices"], b["kv_len"], PAGE_SIZE, num_tokens=TOKENS)
    shared = paged(
        b["qo_shared"], b["kv_indptr_shared"], b["indices"], b["kv_len_shared"], PAGE_SIZE, num_tokens=TOKENS
    )
    return {
        "paged": flat,
        "table": from_block_table(
            b["indices"].reshape(5, 8), b["kv_len"], b["qo"], PAGE_SIZE, num_tokens=TOKENS
        ),
        "ragged": ragged(b["qo"], b["qo"], num_kv_tokens=30, num_tokens=TOKENS),
        "compose2": compose(shared, flat),
        "compose3": compose(shared, shared, flat),
    }


@jax.jit
def traced(b: dict[str, Any]) -> dict[str, tuple[BlockSparse, Any, Any]]:
    return {name: (a, a.slots(), check(a, 9)) for name, a in build(b).items()}


@settings(max_examples=40)
@given(batches())
def test_host_and_jit_agree(b: dict[str, Any]) -> None:
    for name, (layout, slots, bad) in traced(b).items():
        host = build(b)[name]
        assert all(isinstance(getattr(host, f), np.ndarray) for f in FIELDS[:-1])
        assert_same(host, layout)
        assert isinstance(host.slots(), np.ndarray)
        np.testing.assert_array_equal(host.slots(), slots)
        assert check(host, 9) == bad
        assert_slots_and_check_by_hand(host, 9)


def assert_slots_and_check_by_hand(a: BlockSparse, num_pages: int) -> None:
    slots, bad = np.full(a.num_tokens, -1), 0
    for r in range(a.num_rows):
        for i in range(a.q_len[r]):
            j = a.kv_len[r] - a.q_len[r] + i
            slot = -1
            if j >= 0 and a.contiguous:
                slot = a.kv_start[r] + j
            elif j >= 0 and (page := a.kv_indices[a.kv_start[r] + j // a.page_size]) >= 0:
                slot = page * a.page_size + j % a.page_size
            slots[a.q_start[r] + i] = slot
        if not a.contiguous:
            for b in range(-(-a.kv_len[r] // a.page_size)):
                bad += not 0 <= a.kv_indices[a.kv_start[r] + b] < num_pages
    np.testing.assert_array_equal(a.slots(), slots)
    assert check(a, num_pages) == bad


def test_check_counts_used_blocks_only() -> None:
    a = paged([0, 1, 2], [0, 2, 4], [0, 5, -1, 99, 99], [5, 1], page_size=4)
    assert check(a, 6) == 1 and check(a, 5) == 2 and check(a, 100) == 1
    assert jax.jit(check, static_argnums=1)(a, 5) == 2
    beyond = BlockSparse(**{**vars(a), "kv_len": np.array([5, 17], np.int32)})
    assert check(beyond, 100) == 1 + 2  # page -1, and two blocks behind the five entries


@pytest.mark.parametrize(
    "absurd, expected",
    [
        ({"kv_len": np.array([5, -9], np.int32)}, 0),  # no tokens, not the block before the row
        ({"kv_len": np.array([-9, 1], np.int32)}, 1),
        ({"kv_start": np.array([-3, 0], np.int32)}, 2),  # blocks before kv_indices
        ({"kv_start": np.full(2, 2**31 - 1, np.int32)}, 3),
        ({"kv_len": np.full(2, 2**31 - 1, np.int32), "kv_start": np.full(2, 2**31 - 1, np.int32)}, 2**30),
    ],
)
def test_check_of_absurd_rows(absurd: dict[str, Any], expected: int) -> None:
    a = paged([0, 1, 2], [0, 2, 4], [0, 5, -1, 99, 99], [5, 1], page_size=4)
    layout = BlockSparse(**{**vars(a), **absurd})
    for got in (check(layout, 100), jax.jit(check, static_argnums=1)(layout, 100)):
        assert min(int(got), 2**30) == expected


def test_mixture_of_host_and_traced_values() -> None:
    qo, indptr, kv_len = np.array([0, 1, 3]), np.array([0, 2, 4]), np.array([5, 2])
    make = jax.jit(lambda ids, lens: paged(qo, indptr, ids, lens, 4))  # qo on the host says num_tokens
    assert_same(make(np.arange(4), kv_len), paged(qo, indptr, np.arange(4), kv_len, 4))


def test_the_callers_buffers_are_copied() -> None:
    qo, ids = np.array([0, 2], np.int32), np.array([3], np.int32)
    a = paged(qo, np.array([0, 1], np.int32), ids, np.array([2], np.int32), 4)
    qo[:], ids[:] = 9, 9
    assert a.q_start[0] == 0 and a.q_len[0] == 2 and a.kv_indices[0] == 3


def test_is_a_pytree() -> None:
    a = paged([0, 1], [0, 1], [0], [1], 4)
    leaves, tree = jax.tree.flatten(a)
    assert len(leaves) == 7 and tree == jax.tree.structure(paged([0, 1], [0, 1], [3], [2], 4))
    assert tree != jax.tree.structure(paged([0, 1], [0, 1], [0], [1], 8))
    assert_same(jax.jit(lambda x: x)(a), a)


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: paged([1, 2], [0, 1], [0], [1], 4), ValueError, r"qo_indptr must start at 0, got 1"),
    (
        lambda: paged([0, 3, 2], [0, 1, 2], [0, 1], [1, 1], 4),
        ValueError,
        r"qo_indptr decreases at row 1: 3 then 2",
    ),
    (lambda: paged([0, 1], [1, 1], [0], [1], 4), ValueError, r"kv_indptr must start at 0, got 1"),
    (
        lambda: paged([0, 1, 2], [0, 2, 1], [0, 1], [1, 1], 4),
        ValueError,
        r"kv_indptr decreases at row 1: 2 then 1",
    ),
    (lambda: paged([0, 1], [0, 1], [0], [-3], 4), ValueError, r"kv_len\[0\] = -3 is negative"),
    (
        lambda: paged([0, 1, 2], [0, 1, 3], [0, 1, 2], [4, 9], 4),
        ValueError,
        r"kv_len\[1\] = 9 exceeds the 2 pages of row 1 with page_size 4",
    ),
    (
        lambda: from_block_table([[0, 1]], [9], [0, 1], 4),
        ValueError,
        r"kv_len\[0\] = 9 exceeds the 2 pages of row 0 with page_size 4",
    ),
    (lambda: paged([0, 1], [0, 3], [0], [1], 4), ValueError, r"kv_indptr\[-1\] = 3 exceeds the 1 entries"),
    (lambda: paged([0, 1], [0, 1], [0], [1], 0), ValueError, r"page_size must be at least 1, got 0"),
    (lambda: paged([0, 1], [0, 1], [0], [1], True), ValueError, r"page_size must be an int, got True"),
    (lambda: paged([0, 1], [0, 1], [0], [1], 4.0), ValueError, r"page_size must be an int, got 4.0"),
    (lambda: paged([0, 1], [0, 1], [0], [1], jnp.int32(4)), TypeError, r"page_size is static"),
    (
        lambda: paged([0, 2], [0, 1], [0], [1], 4, 1),
        ValueError,
        r"num_tokens 1 is smaller than qo_indptr\[-1\] = 2",
    ),
    (
        lambda: paged([0, 2], [0, 1], [0], [1], 4, -1),
        ValueError,
        r"num_tokens must be at least 0, got -1",
    ),
    (
        lambda: paged([0.0, 1.0], [0, 1], [0], [1], 4),
        ValueError,
        r"qo_indptr must be an integer array, got float64",
    ),
    (lambda: paged([0, 1], [0, 1], np.zeros(0), [1], 4), ValueError, r"kv_indices must be an integer array"),
    (
        lambda: paged([0, 1], [0, 1], [[0]], [1], 4),
        ValueError,
        r"kv_indices must have 1 dimension\(s\), got shape",
    ),
    (lambda: paged([], [0], [], [], 4), ValueError, r"qo_indptr must have rows \+ 1 entries, got none"),
    (
        lambda: paged([0, 1], [0, 1, 1], [0], [1], 4),
        ValueError,
        r"kv_indptr must have rows \+ 1 = 2 entries, got 3",
    ),
    (
        lambda: paged([0, 1, 2], [0, 1], [0], [1], 4),
        ValueError,
        r"qo_indptr must have rows \+ 1 = 2 entries, got 3",
    ),
    (
        lambda: paged([0, 1], [0, 1], [2**31], [1], 4),
        ValueError,
        r"kv_indices must be int32, got 2147483648, which int32 cannot hold",
    ),
    (
        lambda: paged([0, 1], [0, 1], [-(2**31) - 1], [1], 4),
        ValueError,
        r"kv_indices must be int32, got -2147483649, which int32 cannot hold",
    ),
    (
        lambda: from_block_table([[0], [0, 1]], [1, 1], [0, 1, 2], 4),
        ValueError,
        r"block_table must be an array: .*inhomogeneous",
    ),
    (
        lambda: paged([0, 1, 2], [0, 1, 3], [0, 1, 7], [4, 5], 4, num_pages=7),
        ValueError,
        r"row 1 lists page 7, outside \[0, num_pages = 7\)",
    ),
    (
        lambda: from_block_table([[0, -1], [-1, 0]], [5, 0], [0, 1, 2], 4, num_pages=7),
        ValueError,
        r"row 0 lists page -1, outside \[0, num_pages = 7\)",
    ),
    (lambda: from_block_table([[0]], [1, 1], [0, 1], 4), ValueError, r"kv_len has 2 rows, block_table has 1"),
    (lambda: ragged([0, 1], [0, 2, 3]), ValueError, r"kv_indptr must have rows \+ 1 = 2 entries, got 3"),
    (lambda: ragged([0, 1], [0, 5], 4), ValueError, r"num_kv_tokens 4 is smaller than kv_indptr\[-1\] = 5"),
    (
        lambda: from_block_mask(np.ones((2, 2)), 4, 4),
        ValueError,
        r"mask must be bool .* got float64 of shape \(2, 2\)",
    ),
    (lambda: from_block_mask(jnp.ones((2, 2), bool), 4, 4), TypeError, r"from_block_mask needs a host array"),
    (lambda: from_block_mask(np.ones((2, 2), bool), 4, 4, 4), ValueError, r"num_tokens 4 leaves whole rows"),
    (
        lambda: from_block_mask(np.ones((2, 2), bool), 4, 4, 8, 9),
        ValueError,
        r"num_kv_tokens 9 does not end in",
    ),
    (lambda: compose(), ValueError, r"at least one layout"),
    (lambda: compose([]), TypeError, r"layout 0 must be a BlockSparse, got list"),
    (
        lambda: compose(paged([0, 1], [0, 1], [0], [1], 4), paged([0, 1], [0, 1], [0], [1], 8)),
        ValueError,
        r"layout 1 has page_size 8, layout 0 has 4",
    ),
    (
        lambda: compose(paged([0, 1], [0, 1], [0], [1], 1), ragged([0, 1], [0, 1])),
        ValueError,
        r"layout 1 has contiguous True, layout 0 has False",
    ),
    (
        lambda: compose(ragged([0, 1], [0, 1]), ragged([0, 1], [0, 1], num_tokens=2)),
        ValueError,
        r"layout 1 has num_tokens 2, layout 0 has 1",
    ),
    (lambda: compose(from_block_mask(np.ones((1, 1), bool), 1, 1)), ValueError, r"layout 0 has block_pos"),
    (
        lambda: compose(ragged([0, 1, 2], [0, 3, 4]), ragged([0, 2], [0, 4])),
        ValueError,
        r"row 0 of layout 1 covers tokens with 1 to 3 KV tokens in earlier layouts",
    ),
    (lambda: check(ragged([0, 1], [0, 1]), -1), ValueError, r"num_pages must be at least 0"),
]


@pytest.mark.parametrize("call, error, message", BAD)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_capacities_cannot_be_read_from_traced_values() -> None:
    with pytest.raises(TypeError, match=r"num_tokens=None needs qo_indptr on the host; .*give num_tokens"):
        jax.jit(lambda qo: paged(qo, [0, 1], [0], [1], 4))(np.array([0, 1]))
    with pytest.raises(TypeError, match=r"num_kv_tokens=None needs kv_indptr on the host"):
        jax.jit(lambda p: ragged([0, 1], p))(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"kv_len must be an integer array, got float32"):
        jax.jit(lambda n: paged([0, 1], [0, 1], [0], n, 4))(np.ones(1, np.float32))
