"""What every plan must be: complete, disjoint, in order, deterministic, and right when executed in numpy.

Balance and schedules are in test_plan_schedule.py, capacities in test_plan_capacity.py, refusals in
test_plan_errors.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import attention_oracle
from plan_executor import execute, positions, unpack_plan, visible
from plan_layouts import (
    GROUP_SIZES,
    NUM_PAGES,
    Setting,
    paged_layout,
    random_layout,
    random_setting,
)

import jaxinfer
from jaxinfer import BlockSparse, Variant

SEEDS = range(400)


def random_case(seed: int) -> tuple[np.random.Generator, BlockSparse, Setting]:
    rng = np.random.default_rng(seed)
    group_size = int(rng.choice(GROUP_SIZES))
    layout = random_layout(rng, group_size)
    return rng, layout, random_setting(rng, group_size, layout.num_layouts)


def check_range(layout: BlockSparse, variant: Variant, item: Any) -> None:
    """An uncut item reaches from the first position its tokens can see, rounded down to 16, to the last."""
    tokens = slice(int(item["token_begin"]), int(item["token_begin"] + item["flags"]))
    q_pos = [int(p) for p in layout.q_pos[tokens]]
    row = int(item["bsr_row"])
    kv_pos = positions(layout, row, np.arange(layout.kv_len[row]))
    reached = np.ones(len(kv_pos), bool)
    if variant.causal:
        reached &= kv_pos <= max(q_pos)
    if variant.window_right is not None:
        reached &= kv_pos <= max(q_pos) + variant.window_right
    if variant.window_left is not None:
        reached &= kv_pos >= min(q_pos) - variant.window_left
    index = np.flatnonzero(reached)
    assert (item["kv_begin"], item["kv_end"]) == (index[0] // 16 * 16, index[-1] + 1)


def check_pairs(layout: BlockSparse, setting: Setting) -> None:
    """Visible (token, KV token) pairs of each row are in one item, other pairs in at most one."""
    count = [np.zeros((int(q), int(n)), int) for q, n in zip(layout.q_len, layout.kv_len, strict=True)]
    view = setting.view(layout)
    for c, cls in enumerate(view.classes):
        for item in cls.used:
            row, tokens = int(item["bsr_row"]), int(item["flags"])
            if row < 0:
                assert item["kv_begin"] == item["kv_end"] == 0
                continue
            assert 1 <= tokens <= setting.tokens_per_tile(c)
            assert item["table_begin"] == layout.kv_start[row]
            assert 0 <= item["kv_begin"] < item["kv_end"] <= layout.kv_len[row]
            assert item["kv_begin"] % 16 == 0
            begin = int(item["token_begin"] - layout.q_start[row])
            assert begin >= 0 and begin + tokens <= layout.q_len[row]
            count[row][begin : begin + tokens, item["kv_begin"] : item["kv_end"]] += 1
            if item["out"] < 0:
                check_range(layout, setting.variant, item)
    for row, pairs in enumerate(count):
        tokens = np.arange(layout.q_start[row], layout.q_start[row] + layout.q_len[row])
        kv_pos = positions(layout, row, np.arange(layout.kv_len[row]))
        seen = visible(setting.variant, layout.q_pos[tokens].astype(np.int64)[:, None], kv_pos[None])
        assert (pairs <= 1).all()
        assert (pairs[seen] == 1).all()


def check_merge_list(layout: BlockSparse, setting: Setting) -> None:
    """Entries ascend by token, an item's tokens have consecutive entries, slots ascend in KV position."""
    view = setting.view(layout)
    assert view.version == 2 and view.num_tokens == layout.num_tokens
    assert view.num_items == tuple(int(c.queue_indptr[-1]) for c in view.classes)
    token, indptr, slots = view.merge_token, view.merge_indptr, view.merge_slots
    assert (np.diff(token[: view.num_merge]) > 0).all() and (token[view.num_merge :] == -1).all()
    assert indptr[0] == 0 and (np.diff(indptr[: view.num_merge + 1]) >= 1).all()
    assert (indptr[view.num_merge :] == view.num_slots).all()
    assert (
        sorted(slots[: view.num_slots]) == list(range(view.num_slots))
        and (slots[view.num_slots :] == -1).all()
    )
    position = {}
    for item in view.items():
        begin, count, out, merge = (int(item[f]) for f in ("token_begin", "flags", "out", "merge"))
        assert 1 <= count <= 65535
        if out < 0:
            assert merge == -1
            continue
        assert (token[merge : merge + count] == np.arange(begin, begin + count)).all()
        row = int(item["bsr_row"])
        for i in range(count):
            key = (int(layout.kv_offset[row]) + int(item["kv_begin"]), row)
            assert out + i in slots[indptr[merge + i] : indptr[merge + i + 1]]
            position[out + i] = key
    for entry in range(view.num_merge):
        order = [position[s] for s in slots[indptr[entry] : indptr[entry + 1]]]
        assert order == sorted(order)
    for cls in view.classes:
        assert (np.diff(cls.queue_indptr) >= 0).all() and cls.queue_indptr[0] == 0
        unused = cls.items[cls.queue_indptr[-1] :]
        assert not unused.view(np.int32).any()


def test_every_visible_pair_is_in_one_item() -> None:
    for seed in SEEDS:
        _, layout, setting = random_case(seed)
        check_pairs(layout, setting)


def test_merge_list_is_complete_and_in_order() -> None:
    for seed in SEEDS:
        _, layout, setting = random_case(seed)
        check_merge_list(layout, setting)


def test_executed_plan_equals_the_oracle() -> None:
    """Also asserts, inside the executor, that every token and every slot is written exactly once."""
    cut = merged = 0
    for seed in range(160):
        rng, layout, setting = random_case(seed)
        heads = setting.num_kv_heads
        q = rng.normal(size=(layout.num_tokens, heads * setting.group_size, 4))
        shape = (layout.kv_capacity,) if layout.contiguous else (NUM_PAGES, layout.page_size)
        k, v = rng.normal(size=(*shape, heads, 4)), rng.normal(size=(*shape, heads, 4))
        view = setting.view(layout)
        o, lse = execute(view, layout, q, k, v, setting.variant, 0.5)
        want_o, want_lse = attention_oracle(q, k, v, layout, setting.variant, 0.5)
        assert (np.isneginf(lse) == np.isneginf(want_lse)).all()
        seen = np.isfinite(want_lse)
        np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=1e-9)
        np.testing.assert_allclose(o, want_o, rtol=0, atol=1e-9)
        assert not o[~seen].any()
        cut += view.num_slots > 0 and layout.num_layouts == 1
        merged += view.num_merge > 0
    assert cut > 10 and merged > 25  # the cases do reach what they are for


def test_equal_lengths_give_equal_bytes_whatever_the_page_ids() -> None:
    for seed in range(60):
        rng, layout, setting = random_case(seed)
        data = setting.pack(layout)
        assert data.tobytes() == setting.pack(layout).tobytes()
        other = dataclasses.replace(
            layout, kv_indices=rng.integers(-(2**31), 2**31, layout.kv_indices.shape).astype(np.int32)
        )
        assert data.tobytes() == setting.pack(other).tobytes()


def test_batch_invariant_cuts_depend_on_the_row_alone() -> None:
    setting = Setting(4, 2, ((16, True, 5, 13), (128, True, 3, 9)), batch_invariant=True, split_tokens=32)
    rng = np.random.default_rng(7)

    def cuts(layout: BlockSparse, row: int) -> set[tuple[int, ...]]:
        start = int(layout.q_start[row])
        return {
            (c, int(i["token_begin"]) - start, int(i["flags"]), int(i["kv_begin"]), int(i["kv_end"]))
            for c, cls in enumerate(setting.view(layout).classes)
            for i in cls.used
            if i["bsr_row"] == row
        }

    for _ in range(40):
        q_len, kv_len = int(rng.integers(1, 70)), int(rng.integers(1, 3000))
        alone = cuts(paged_layout(rng, [0, q_len], [kv_len], 16, q_len), 0)
        others = int(rng.integers(1, 9))
        at = int(rng.integers(0, others + 1))
        q_lens, kv_lens = rng.integers(0, 40, others), rng.integers(0, 5000, others)
        qo = np.concatenate([[0], np.cumsum(np.insert(q_lens, at, q_len))])
        batch = paged_layout(rng, qo, np.insert(kv_lens, at, kv_len), 16, int(qo[-1]) + 3)
        assert cuts(batch, at) == alone


@pytest.mark.parametrize("chunk", [16, 512])
def test_number_of_pieces_is_the_quotient_rounded_up(chunk: int) -> None:
    """flashinfer PR 135: kv_len 1 to 2 * chunk gives ceil(kv_len / chunk) pieces, merged in order."""
    setting = Setting(4, 2, ((16, True, 4, 8),), batch_invariant=True, split_tokens=chunk)
    rng = np.random.default_rng(0)
    lengths = range(1, 2 * chunk + 1) if chunk == 16 else (1, 511, 512, 513, 1023, 1024)
    for kv_len in lengths:
        view = setting.view(paged_layout(rng, [0, 1], [kv_len], 16, 1))
        pieces = sorted((int(i["kv_begin"]), int(i["kv_end"])) for i in view.items())
        assert pieces == [(b, min(b + chunk, kv_len)) for b in range(0, kv_len, chunk)]
        assert view.num_slots == (len(pieces) if len(pieces) > 1 else 0)
        assert view.num_merge == (len(pieces) > 1)


def test_a_tile_has_at_most_34_pieces() -> None:
    setting = Setting(
        4, 2, ((16, True, 4, 8),), Variant(window_left=90_001), batch_invariant=True, split_tokens=16
    )
    rng = np.random.default_rng(0)
    for kv_len in (16_384, 16_385, 100_000, 131_071):
        view = setting.view(paged_layout(rng, [0, 1], [kv_len], 16, 1))
        assert 16 < view.num_items[0] <= 34


@pytest.mark.parametrize("batch", [0, 2])
def test_no_queries_is_a_valid_plan_without_work(batch: int) -> None:
    """flash-attention 2503, 1159: all q_len 0, or no requests."""
    layout = jaxinfer.from_block_table(
        np.zeros((batch, 256), np.int32), np.full(batch, 4096, np.int32), np.zeros(batch + 1, np.int32), 16
    )
    for invariant in (False, True):
        plan = jaxinfer.plan(layout, num_qo_heads=8, num_kv_heads=2, head_dim=64, batch_invariant=invariant)
        view = unpack_plan(plan)
        assert view.items() == [] and view.num_slots == view.num_merge == 0


@pytest.mark.parametrize("num_ctas", [1, 3, 7])
def test_few_ctas(num_ctas: int) -> None:
    """flashinfer 1027: more tiles than CTAs."""
    layout = paged_layout(np.random.default_rng(0), np.arange(10), np.full(9, 4096), 16, 9)
    for heads in (1, 32):
        plan = jaxinfer.plan(layout, num_qo_heads=32, num_kv_heads=heads, head_dim=128, num_ctas=num_ctas)
        view = unpack_plan(plan)
        tokens = [t for i in view.items() for t in range(i["token_begin"], i["token_begin"] + i["flags"])]
        assert sorted(set(tokens)) == list(range(9))
        assert sum(int(i["kv_end"] - i["kv_begin"]) for i in view.items()) == 9 * 4096


def test_padding_is_written_in_items_that_count_in_16_bits() -> None:
    num_tokens = 200_000
    layout = paged_layout(np.random.default_rng(0), [0, 1], [100], 16, num_tokens)
    plan = jaxinfer.plan(layout, num_qo_heads=4, num_kv_heads=1, head_dim=64, num_ctas=1, tiles=(16,))
    empty = [i for i in unpack_plan(plan).items() if i["bsr_row"] == -1]
    assert all(1 <= i["flags"] <= 65535 and i["out"] == i["merge"] == -1 for i in empty)
    written = np.zeros(num_tokens, int)
    for i in empty:
        written[i["token_begin"] : i["token_begin"] + i["flags"]] += 1
    assert written[0] == 0 and (written[1:] == 1).all()


def test_extreme_positions_do_not_wrap() -> None:
    big = 2**31 - 1
    base = paged_layout(np.random.default_rng(0), [0, 2], [40], 16, 2)
    setting = Setting(1, 1, ((16, True, 1, 1),), Variant(window_left=big, window_right=big))
    for q_pos in ([big, -big - 1], [big, big], [-big - 1, -big - 1]):
        layout = dataclasses.replace(base, q_pos=np.array(q_pos, np.int32))
        check_pairs(layout, setting)
    shifted = dataclasses.replace(
        base, kv_offset=np.array([big - 39], np.int32), q_pos=np.array([big, big], np.int32)
    )
    check_pairs(shifted, dataclasses.replace(setting, variant=Variant(causal=True, window_left=3)))


def test_plan_is_a_pytree_of_one_array() -> None:
    layout = paged_layout(np.random.default_rng(0), [0, 1, 2], [10, 20], 16, 4)
    plan = jaxinfer.plan(layout, num_qo_heads=4, num_kv_heads=2, head_dim=(64, 32), dtype=jnp.bfloat16)
    assert isinstance(plan.data, np.ndarray) and plan.data.shape == (plan.spec.num_words,)
    spec = plan.spec
    assert (spec.head_dim_qk, spec.head_dim_vo, spec.dtype) == (64, 32, "bfloat16")
    assert hash(spec) == hash(dataclasses.replace(spec)) and spec == dataclasses.replace(spec)
    leaves, tree = jax.tree.flatten(plan)
    assert len(leaves) == 1 and jax.tree.unflatten(tree, leaves).spec is spec
