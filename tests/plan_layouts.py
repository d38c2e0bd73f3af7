"""Random layouts and planner settings for the planner's property tests: every constructor, hostile lengths.

Padding tokens, empty rows, queries longer than their keys, absurd ids behind the used range, composed levels.
What is asserted about them lives in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from plan_executor import PlanView, unpack

from jaxinfer import BlockSparse, Variant, _native, compose, from_block_mask, paged, ragged
from jaxinfer.plan import host_arrays

GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 127, 128)
NUM_PAGES = 64


@dataclass(frozen=True)
class Setting:
    """Everything about a plan but the layout; classes as (tile, packed, num_queues, num_ctas)."""

    group_size: int
    num_kv_heads: int
    classes: tuple[tuple[int, bool, int, int], ...]
    variant: Variant = field(default_factory=Variant)
    costs: tuple[int, int, int, int, int] | None = (0, 0, 1, 32, 1)  # fixed, alpha, beta, floor, weight
    runs: bool = False
    side_by_side: bool = False
    batch_invariant: bool = False
    split_tokens: int = 32

    def tokens_per_tile(self, c: int) -> int:
        tile, packed = self.classes[c][:2]
        return 1 if tile == 1 else tile // self.group_size if packed else tile

    def planner(self, layout: BlockSparse) -> Any:
        return _native.Planner(
            classes=list(self.classes),
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            num_layouts=layout.num_layouts,
            kv_capacity=layout.kv_capacity,
            page_size=layout.page_size,
            contiguous=layout.contiguous,
            num_qo_heads=self.group_size * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=16,
            head_dim_vo=16,
            element_size=4,
            causal=self.variant.causal,
            window_left=self.variant.window_left,
            window_right=self.variant.window_right,
            runs=self.runs,
            side_by_side=self.side_by_side,
            batch_invariant=self.batch_invariant,
            split_tokens=self.split_tokens,
            costs=None if self.costs is None else [self.costs] * len(self.classes),
        )

    def pack(self, layout: BlockSparse, num_pages: int | None = None) -> np.ndarray[Any, Any]:
        planner = self.planner(layout)
        # Garbage in the memory that the planner gets must not survive.
        data = np.full(planner.num_words, 0x5A5A5A5A, np.int32)
        run_planner(planner, layout, num_pages, data)
        return data

    def view(self, layout: BlockSparse) -> PlanView:
        planner = self.planner(layout)
        classes = [
            (self.tokens_per_tile(c), self.classes[c][2], planner.item_capacity[c])
            for c in range(len(self.classes))
        ]
        return unpack(self.pack(layout), classes, planner.merge_capacity, planner.slot_capacity)


def run_planner(
    planner: _native.Planner, layout: BlockSparse, num_pages: int | None, out: np.ndarray[Any, Any]
) -> None:
    planner(*host_arrays(layout), num_pages=num_pages, out=out)


def paged_layout(
    rng: np.random.Generator,
    qo_indptr: Any,
    kv_len: Any,
    page_size: int,
    num_tokens: int,
) -> BlockSparse:
    """Random pages for given lengths, some rows with pages to spare, absurd ids outside the used range."""
    kv_len = np.asarray(kv_len, np.int64)
    used = -(-kv_len // page_size)
    indptr = np.concatenate([[0], np.cumsum(used + rng.integers(0, 3, len(kv_len)))]).astype(np.int32)
    ids = rng.choice([-7, 10**9, 2**31 - 1], int(indptr[-1]) + int(rng.integers(0, 9)))
    for r, count in enumerate(used):
        ids[indptr[r] : indptr[r] + count] = rng.integers(0, NUM_PAGES, count)
    return paged(qo_indptr, indptr, ids.astype(np.int32), kv_len, page_size, num_tokens=num_tokens)


def random_layout(rng: np.random.Generator, group_size: int = 1, composed: bool = True) -> BlockSparse:
    """A layout of any kind with up to 7 requests and 90 KV tokens each."""
    kinds = ["paged", "ragged", "block_mask"] + (["two", "three"] if composed else [])
    kind = rng.choice(kinds)
    page_size = int(rng.integers(1, 18))
    batch = int(rng.integers(0, 7))
    longest = 3 if group_size > 16 else 12
    style = rng.choice(["decode", "mixed", "random"])
    q_len = np.ones(batch, int) if style == "decode" else rng.integers(0, longest, batch)
    if style == "mixed" and batch:
        q_len[:] = rng.integers(0, 2, batch)
        q_len[rng.integers(batch)] = rng.integers(1, 3 * longest)
    kv_len = rng.integers(0, 90, batch) * (rng.random(batch) > 0.2)
    qo = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    num_tokens = int(qo[-1]) + int(rng.choice([0, 0, 1, 5, 20]))
    if kind == "paged":
        return paged_layout(rng, qo, kv_len, page_size, num_tokens)
    if kind == "ragged":
        indptr = np.concatenate([[0], np.cumsum(kv_len)]).astype(np.int32)
        return ragged(
            qo, indptr, num_kv_tokens=int(indptr[-1]) + int(rng.integers(0, 9)), num_tokens=num_tokens
        )
    if kind == "block_mask":
        mask = rng.random((int(rng.integers(0, 6)), int(rng.integers(1, 9)))) < 0.5
        return from_block_mask(mask, int(rng.integers(1, 7)), page_size)
    levels = [paged_layout(rng, qo, kv_len, page_size, num_tokens)]
    cuts = np.unique(np.concatenate([[0], rng.integers(0, batch + 1, 2), [batch]]))
    if len(cuts) < 2:
        cuts = np.array([0, batch])
    levels.insert(0, paged_layout(rng, qo[cuts], rng.integers(0, 70, len(cuts) - 1), page_size, num_tokens))
    if kind == "three":
        levels.insert(0, paged_layout(rng, [0, qo[-1]], rng.integers(0, 70, 1), page_size, num_tokens))
    return compose(*levels)


def random_variant(rng: np.random.Generator) -> Variant:
    """Causal and windows on or off."""
    return Variant(
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice([0, 1, 5, 17, 40, 1000, 2**31 - 1])) if rng.random() < 0.4 else None,
        window_right=int(rng.choice([0, 1, 9, 2**31 - 1])) if rng.random() < 0.2 else None,
    )


def random_setting(rng: np.random.Generator, group_size: int, num_layouts: int) -> Setting:
    """Legal classes for the group size, small floors so that short rows are cut."""
    legal = [t for t in (1, 16, 32, 64, 128, 192) if t == 1 or t >= group_size]
    choice = (
        sorted(int(t) for t in rng.choice(legal, 2, replace=False))
        if rng.random() < 0.5
        else [int(rng.choice(legal))]
    )
    packed = [True] * len(choice)
    if rng.random() < 0.2:
        choice[-1], packed[-1] = int(rng.choice([16, 32, 128])), False
    num_ctas = int(rng.choice([1, 3, 7, 13, 40]))
    num_kv_heads = int(rng.integers(1, 4))
    classes = tuple(
        (t, p, _native.choose_num_queues(num_ctas, num_kv_heads * (1 if p else group_size)), num_ctas)
        for t, p in zip(choice, packed, strict=True)
    )
    setting = Setting(
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        classes=classes,
        variant=random_variant(rng),
        costs=(
            int(rng.choice([0, 20])),
            int(rng.integers(0, 4)),
            int(rng.choice([1, 1, 3])),
            int(rng.choice([32, 64])),
            int(rng.choice([1, 3])),
        ),
        runs=bool(rng.random() < 0.3),
        side_by_side=bool(rng.random() < 0.5),
        batch_invariant=bool(num_layouts == 1 and rng.random() < 0.3),
        split_tokens=int(rng.choice([16, 32, 64])),
    )
    if len(classes) == 2 and setting.tokens_per_tile(0) >= setting.tokens_per_tile(1):
        return Setting(**{**setting.__dict__, "classes": classes[1:]})
    return setting
