"""Reads a packed plan by the format's description and executes it in plain numpy, float64.

Independent of csrc/: offsets are derived here from the static facts, and the executor reads the plan,
kv_indices, kv_offset, q_pos and block_pos only. It also asserts what every executor relies on: each token
written exactly once, each slot written and read exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer import BlockSparse, Variant

IntArray = np.ndarray[Any, np.dtype[np.int32]]

HEADER_WORDS = 16
ITEM_FIELDS = ("token_begin", "kv_begin", "kv_end", "table_begin", "bsr_row", "out", "merge", "flags")
ITEM_DTYPE = np.dtype([(name, np.int32) for name in ITEM_FIELDS])


@dataclass(frozen=True)
class ClassView:
    """One class of a packed plan."""

    tokens_per_tile: int
    queue_indptr: IntArray  # [num_queues + 1]
    items: np.ndarray[Any, Any]  # [item_capacity] of ITEM_DTYPE

    @property
    def used(self) -> np.ndarray[Any, Any]:
        return self.items[: self.queue_indptr[-1]]

    def queue(self, q: int) -> np.ndarray[Any, Any]:
        return self.items[self.queue_indptr[q] : self.queue_indptr[q + 1]]


@dataclass(frozen=True)
class PlanView:
    """The parts of a packed plan."""

    version: int
    num_tokens: int
    num_slots: int
    num_merge: int
    num_items: tuple[int, ...]
    classes: tuple[ClassView, ...]
    merge_token: IntArray
    merge_indptr: IntArray
    merge_slots: IntArray

    def items(self) -> list[Any]:
        """Used items of all classes."""
        return [item for cls in self.classes for item in cls.used]


def unpack(
    data: IntArray, classes: list[tuple[int, int, int]], merge_capacity: int, slot_capacity: int
) -> PlanView:
    """Parts of `data`; classes as (tokens per tile, num_queues, item_capacity)."""
    assert data.dtype == np.int32 and data.ndim == 1
    word = HEADER_WORDS
    views = []
    for tokens, num_queues, item_capacity in classes:
        indptr = data[word : word + num_queues + 1]
        padded = -(-(num_queues + 1) // 4) * 4
        assert not data[word + num_queues + 1 : word + padded].any()
        word += padded
        first = data[word : word + 8 * num_queues].view(ITEM_DTYPE)
        word += 8 * num_queues
        items = data[word : word + 8 * item_capacity].view(ITEM_DTYPE)
        word += 8 * item_capacity
        views.append(ClassView(tokens, indptr, items))
        for q in range(num_queues):
            assert first[q] == (
                views[-1].queue(q)[0] if len(views[-1].queue(q)) else np.zeros(1, ITEM_DTYPE)[0]
            )
    token = data[word : word + merge_capacity]
    word += merge_capacity
    indptr = data[word : word + merge_capacity + 1]
    word += merge_capacity + 1
    slots = data[word : word + slot_capacity]
    assert word + slot_capacity == data.size
    version, num_tokens, num_classes, num_slots, num_merge = (int(x) for x in data[:5])
    assert num_classes == len(classes)
    num_items = tuple(int(x) for x in data[5 : 5 + num_classes])
    assert not data[5 + num_classes : HEADER_WORDS].any()
    return PlanView(version, num_tokens, num_slots, num_merge, num_items, tuple(views), token, indptr, slots)


def unpack_plan(plan: Any) -> PlanView:
    """Parts of a `jaxinfer.Plan`."""
    spec = plan.spec
    tokens = [1 if c.tile == 1 else c.tile // spec.group_size if c.packed else c.tile for c in spec.classes]
    classes = [(t, c.num_queues, c.item_capacity) for t, c in zip(tokens, spec.classes, strict=True)]
    return unpack(plan.data, classes, spec.merge_capacity, spec.slot_capacity)


def positions(layout: BlockSparse, row: int, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions of KV tokens of a row, given by their index in its list."""
    if layout.block_pos is None:
        return np.asarray(int(layout.kv_offset[row]) + index.astype(np.int64))
    block = layout.kv_start[row] + index // layout.page_size
    return np.asarray(layout.block_pos[block].astype(np.int64) + index % layout.page_size)


def visible(
    variant: Variant, q_pos: np.ndarray[Any, Any], kv_pos: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Whether causal and windows let q_pos see kv_pos; broadcasts."""
    seen = np.ones(np.broadcast_shapes(q_pos.shape, kv_pos.shape), bool)
    if variant.causal:
        seen &= kv_pos <= q_pos
    if variant.window_left is not None:
        seen &= kv_pos >= q_pos - variant.window_left
    if variant.window_right is not None:
        seen &= kv_pos <= q_pos + variant.window_right
    return seen


def execute(
    view: PlanView,
    layout: BlockSparse,
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    variant: Variant,
    sm_scale: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """o [num_tokens, num_qo_heads, head_dim_vo] and lse [num_tokens, num_qo_heads] of the plan.

    q [num_tokens, num_qo_heads, head_dim]; k and v [num_pages, page_size, num_kv_heads, head_dim], contiguous
    without the page axis. Softmax, causal and windows only: the rules that a plan depends on.
    """
    num_tokens, num_qo_heads, _ = q.shape
    group = num_qo_heads // k.shape[-2]
    o = np.full((num_tokens, num_qo_heads, v.shape[-1]), np.nan)
    lse = np.full((num_tokens, num_qo_heads), np.nan)
    writes = np.zeros(num_tokens, int)
    slots = max(view.merge_slots.size, 1)
    partial_o = np.full((slots, *o.shape[1:]), np.nan)
    partial_lse = np.full((slots, num_qo_heads), np.nan)
    slot_writes = np.zeros(slots, int)

    def piece(item: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        row = int(item["bsr_row"])
        tokens = np.arange(item["token_begin"], item["token_begin"] + (item["flags"] & 0xFFFF))
        if row < 0:
            return np.zeros((len(tokens), *o.shape[1:])), np.full((len(tokens), num_qo_heads), -np.inf)
        index = np.arange(item["kv_begin"], item["kv_end"])
        if layout.contiguous:
            at: Any = item["table_begin"] + index
        else:
            at = (
                layout.kv_indices[item["table_begin"] + index // layout.page_size],
                index % layout.page_size,
            )
        keys = np.repeat(k[at].astype(np.float64), group, axis=1)
        values = np.repeat(v[at].astype(np.float64), group, axis=1)
        s = np.einsum("thd,jhd->thj", q[tokens].astype(np.float64), keys) * sm_scale
        q_pos = layout.q_pos[tokens].astype(np.int64)
        s = np.where(visible(variant, q_pos[:, None, None], positions(layout, row, index)), s, -np.inf)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(m), 0.0, m))
        total = p.sum(axis=-1)
        with np.errstate(divide="ignore"):
            log_sum = np.where(total > 0, np.log(total) + m[..., 0], -np.inf)
        return np.einsum("thj,jhd->thd", p, values) / np.where(total > 0, total, 1.0)[..., None], log_sum

    for item in view.items():
        begin, count = int(item["token_begin"]), int(item["flags"]) & 0xFFFF
        piece_o, piece_lse = piece(item)
        if item["out"] < 0:
            to = slice(begin, begin + count)
            o[to], lse[to] = piece_o, piece_lse
            writes[to] += 1
        else:
            to = slice(int(item["out"]), int(item["out"]) + count)
            partial_o[to], partial_lse[to] = piece_o, piece_lse
            slot_writes[to] += 1
    reads = np.zeros(slots, int)
    for entry in range(view.num_merge):
        token = view.merge_token[entry]
        used = view.merge_slots[view.merge_indptr[entry] : view.merge_indptr[entry + 1]]
        reads[used] += 1
        weights = partial_lse[used]
        total_lse = np.logaddexp.reduce(weights, axis=0)
        scale = np.exp(weights - np.where(np.isneginf(total_lse), 0.0, total_lse))
        o[token] = (partial_o[used] * scale[..., None]).sum(axis=0)
        lse[token] = total_lse
        writes[token] += 1
    assert (writes == 1).all(), "a token is not written exactly once"
    assert (slot_writes[: view.num_slots] == 1).all() and not slot_writes[view.num_slots :].any()
    assert (reads == slot_writes).all(), "slots are not read as often as they are written"
    return o, lse
