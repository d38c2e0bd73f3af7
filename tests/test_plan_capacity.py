"""Capacities: static, sufficient for every batch of that capacity, and never overrun.

The planner refuses to write beyond a capacity (RuntimeError), so a batch that plans without one has fitted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_layouts import GROUP_SIZES, Setting, random_layout, random_setting, run_planner

import jaxinfer
from jaxinfer import BlockSparse, Variant


def layout_of(
    q_start: Any, q_len: Any, kv_len: Any, num_tokens: int, num_layouts: int, kv_capacity: int
) -> BlockSparse:
    """Contiguous rows written out, as no constructor would: any overlap that num_layouts allows."""
    rows = len(q_len)
    return BlockSparse(
        q_start=np.asarray(q_start, np.int32),
        q_len=np.asarray(q_len, np.int32),
        kv_start=np.zeros(rows, np.int32),
        kv_indices=np.zeros(0, np.int32),
        kv_len=np.asarray(kv_len, np.int32),
        kv_offset=np.arange(rows, dtype=np.int32) * 5000,
        q_pos=np.full(num_tokens, 10**6, np.int32),
        block_pos=None,
        page_size=1,
        contiguous=True,
        num_layouts=num_layouts,
        kv_capacity=kv_capacity,
    )


def hostile_rows(
    rng: np.random.Generator, num_tokens: int, rows: int, num_layouts: int
) -> tuple[Any, Any, Any]:
    """Rows of every shape, disjoint within a layout: gaps, empty rows, rows without keys, long ones."""
    q_start, q_len = np.zeros(rows, int), np.zeros(rows, int)
    for level in range(num_layouts):
        mine = np.arange(level, rows, num_layouts)
        if not len(mine):
            continue
        style = rng.choice(["ones", "one big", "random", "pairs"])
        if style == "ones":
            ends = np.arange(2 * len(mine)) * int(rng.integers(1, 3))
        elif style == "one big":
            ends = np.concatenate([np.zeros(2 * len(mine) - 1, int), [num_tokens]])
        elif style == "pairs":
            ends = np.repeat(np.arange(len(mine)) * 4, 2) + np.tile([0, 3], len(mine))
        else:
            ends = np.sort(rng.integers(0, num_tokens + 1, 2 * len(mine)))
        ends = np.minimum(ends, num_tokens)
        q_start[mine], q_len[mine] = ends[::2], ends[1::2] - ends[::2]
    kv_len = rng.integers(0, 3, rows) * rng.choice([1, 16, 100, 5000], rows)
    return q_start, q_len, kv_len


@pytest.mark.parametrize("num_layouts", [1, 2, 3])
def test_hostile_batches_fit_one_static_capacity(num_layouts: int) -> None:
    for seed in range(150):
        rng = np.random.default_rng(10_000 * num_layouts + seed)
        group_size = int(rng.choice(GROUP_SIZES))
        setting = random_setting(rng, group_size, num_layouts)
        if setting.batch_invariant:
            setting = dataclasses.replace(setting, split_tokens=16)
        num_tokens, rows = int(rng.integers(0, 50)), int(rng.integers(0, 20))
        words = set()
        for _ in range(4):
            q_start, q_len, kv_len = hostile_rows(rng, num_tokens, rows, num_layouts)
            layout = layout_of(q_start, q_len, kv_len, num_tokens, num_layouts, 10_000 * max(rows, 1))
            words.add(setting.pack(layout).size)
        assert len(words) == 1


def test_batch_invariant_fits_when_the_cache_is_full() -> None:
    """One long row that lists all of kv_capacity, with a clipped begin off the cutting grid."""
    for group_size in (1, 4, 128):
        tile = 128 if group_size > 16 else 16
        for kv_len in (1, 15, 16, 17, 1000, 16 * 33, 60_000):
            for q_len in (1, 5, 40):
                for window in (None, 7, 700):
                    layout = layout_of([0], [q_len], [kv_len], q_len, 1, kv_len)
                    layout = dataclasses.replace(
                        layout, q_pos=np.arange(kv_len - q_len, kv_len, dtype=np.int32)
                    )
                    Setting(
                        group_size,
                        1,
                        ((tile, True, 1, 1),),
                        Variant(causal=True, window_left=window),
                        batch_invariant=True,
                        split_tokens=16,
                    ).pack(layout)


def test_nothing_is_written_behind_the_array() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        group_size = int(rng.choice(GROUP_SIZES))
        layout = random_layout(rng, group_size)
        planner = random_setting(rng, group_size, layout.num_layouts).planner(layout)
        buffer = np.full(planner.num_words + 64, 0x7EADBEEF, np.int32)
        run_planner(planner, layout, None, buffer[32:-32])
        assert (buffer[:32] == 0x7EADBEEF).all() and (buffer[-32:] == 0x7EADBEEF).all()


def test_capacities_follow_the_documented_bounds() -> None:
    """One decode class: 8 rows of one token, group size 4, 33 queues of 4 tokens per tile."""
    layout = jaxinfer.ragged(np.arange(9), np.zeros(9, np.int32), num_kv_tokens=4096)
    spec = jaxinfer.plan(
        layout, num_qo_heads=32, num_kv_heads=8, head_dim=128, num_ctas=264, tiles=(16,)
    ).spec
    (cls,) = spec.classes
    assert cls.num_queues == 33
    assert cls.item_capacity == (8 + 33) + (8 + 33 + 1)  # tiles + cuts, runs of unseen tokens + their pieces
    assert spec.slot_capacity == 8 + 33 * 4  # less than 2 * 33 * 4
    assert spec.merge_capacity == 8
    invariant = jaxinfer.plan(
        layout, num_qo_heads=32, num_kv_heads=8, head_dim=128, num_ctas=264, tiles=(16,), batch_invariant=True
    ).spec
    assert invariant.classes[0].item_capacity == 2 * 8 + 4096 // 512 + (8 + 33 + 1)
    assert invariant.slot_capacity <= 34 * 8


def test_capacity_does_not_depend_on_lengths() -> None:
    def words(kv_len: list[int]) -> jaxinfer.Plan:
        table = np.zeros((3, 64), np.int32)
        layout = jaxinfer.from_block_table(table, kv_len, [0, 1, 2, 3], 16, num_tokens=8)
        return jaxinfer.plan(layout, num_qo_heads=8, num_kv_heads=2, head_dim=64, num_pages=1)

    specs = {words(kv_len).spec for kv_len in ([0, 0, 0], [1, 1024, 3], [1024, 1024, 1024])}
    assert len(specs) == 1


def test_a_plan_too_large_for_int32_is_refused() -> None:
    layout = jaxinfer.ragged([0, 1], [0, 1], num_tokens=1)
    with pytest.raises(ValueError, match=r"would be \d+, expected less than 2147483648"):
        Setting(1, 1, ((16, True, 1, 1),)).planner(dataclasses.replace(layout, num_layouts=2**31 - 1))
