"""Random poisoned batches for every layout kind: `make_case(rng, kind) -> Case`. Inputs only.

    rng = np.random.default_rng(seed)
    case = make_case(rng, kind="compose2", dtype="bfloat16", fixed=True)
    o, lse = attention_oracle(*case.args, **case.oracle_kwargs)
    state = reference.attention(*case.args, **case.kwargs, return_lse=True)

`case.args` is (q, k, v, layout) in numpy; `case.kwargs` the keyword arguments of `attention` (variant,
sm_scale, layer, kv_layout); `case.oracle_kwargs` the same plus num_pages. Poison: NaN or inf in unused slots
of last pages, in unreferenced pages, in other layers and in padding tokens of q; absurd ids behind the used
range of every page list. Always in the mix: odd group sizes, zero query and KV lengths, partly filled pages,
more query than KV tokens.

fixed=True draws every batch of one (kind, page_size, heads, dims) at the same shapes (32 tokens, 6 rows,
about 100 listed blocks, 96 pages or 320 contiguous KV tokens, 512 mask bytes), so that a jitted function
compiles once for all seeds. Whether there is a mask and the static rules are part of the compile key: give
`variant=` and `custom_mask=`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.layout import BlockSparse, compose, from_block_mask, from_block_table, paged, ragged
from jaxinfer.variant import Variant, pack_masks

KINDS = ("paged", "table", "ragged", "compose2", "compose3", "blockmask")
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64, 65, 100, 127, 128)

#: Sizes of batches with fixed=True.
FIXED_TOKENS, FIXED_ROWS, FIXED_BLOCKS = 32, 6, 96
FIXED_PAGES, FIXED_KV_TOKENS, FIXED_MASK_BYTES = 96, 320, 512

_ABSURD_IDS = (-7, 10**9, 2**31 - 1, -(2**31), 3)
_POISON = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Case:
    """One call of attention; arrays are numpy."""

    kind: str
    q: Any  # [num_tokens, num_qo_heads, head_dim]
    k: Any
    v: Any
    layout: BlockSparse
    variant: Variant
    sm_scale: float
    layer: int | None
    kv_layout: str
    num_pages: int | None  # None: contiguous

    @property
    def args(self) -> tuple[Any, Any, Any, BlockSparse]:
        return self.q, self.k, self.v, self.layout

    @property
    def kwargs(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "sm_scale": self.sm_scale,
            "layer": self.layer,
            "kv_layout": self.kv_layout,
        }

    @property
    def oracle_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_pages": self.num_pages}

    @property
    def num_qo_heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def num_kv_heads(self) -> int:
        hnd = self.kv_layout == "HND" and not self.layout.contiguous
        return int(self.k.shape[-3 if hnd else -2])

    @property
    def head_dim(self) -> tuple[int, int]:
        return int(self.q.shape[2]), int(self.v.shape[-1])


def make_case(
    rng: np.random.Generator,
    kind: str | None = None,
    *,
    dtype: str = "float32",
    group_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 16,
    head_dim_vo: int | None = None,
    page_size: int | None = None,
    max_kv_len: int = 40,
    style: str | None = None,
    variant: Variant | None = None,
    custom_mask: bool | None = None,
    bad_ids: bool | None = None,
    tree_positions: bool | None = None,
    kv_layout: str | None = None,
    num_layers: int | None = None,
    fixed: bool = False,
) -> Case:
    """A random call. None: drawn at random.

    Args:
      style: "decode" (one token per request), "mixed" (decode and one chunk), "rand".
      variant: static rules; the mask, if any, is added to it.
      custom_mask: a packed random mask (ignored for composed layouts).
      bad_ids: page ids outside the pool inside the used range; they count as masked (ignored for contiguous).
      tree_positions: q_pos shifted at random per token: neither unique nor sorted (not for composed layouts).
      num_layers: pools with a layer axis of that size and a random layer; None: no layer axis.
      fixed: see the module docstring.
    """
    kind = str(rng.choice(KINDS, p=(0.3, 0.1, 0.15, 0.2, 0.1, 0.15))) if kind is None else kind
    group_size = int(rng.choice(GROUP_SIZES)) if group_size is None else group_size
    if num_kv_heads is None:
        num_kv_heads = int(rng.integers(1, 4)) if group_size <= 9 else 1
    page_size = int(rng.integers(1, 18)) if page_size is None else page_size
    # The fixed shapes must hold the longest batch: 6 rows of max_kv_len plus as much shared, in whole pages.
    max_kv_len = min(max_kv_len, 10 * page_size, 40) if fixed else max_kv_len
    layout, num_pages = _layout(rng, kind, page_size, max_kv_len, style, 3 if group_size > 16 else 9, fixed)
    composed = layout.num_layouts > 1
    if not composed and (rng.random() < 0.15 if tree_positions is None else tree_positions):
        shift = rng.integers(-3, 4, layout.num_tokens)
        layout = dataclasses.replace(layout, q_pos=(layout.q_pos + shift).astype(np.int32))
    used = _used(layout, num_pages)
    if not layout.contiguous and (rng.random() < 0.1 if bad_ids is None else bad_ids):
        ids = np.array(layout.kv_indices)
        spots = np.flatnonzero(_used_entries(layout))
        if spots.size:
            ids[rng.choice(spots, min(2, spots.size))] = rng.choice([-1, num_pages, 10**9])
        layout = dataclasses.replace(layout, kv_indices=ids)
    variant = _variant(rng) if variant is None else variant
    if not composed and (rng.random() < 0.2 if custom_mask is None else custom_mask):
        masks = [rng.random((int(a), int(b))) < 0.6 for a, b in zip(layout.q_len, layout.kv_len, strict=True)]
        bits, indptr = pack_masks(masks, layout, capacity=FIXED_MASK_BYTES if fixed else None)
        variant = dataclasses.replace(variant, mask_bits=bits, mask_indptr=indptr)
    kv_layout = str(rng.choice(["NHD", "HND"])) if kv_layout is None else kv_layout
    head_dim_vo = head_dim if head_dim_vo is None else head_dim_vo
    layer = None if num_layers is None else int(rng.integers(0, num_layers))
    q = rng.normal(size=(layout.num_tokens, group_size * num_kv_heads, head_dim))
    q[_covered(layout) == 0] = rng.choice(_POISON)
    pools = [
        _pool(rng, used, num_kv_heads, dim, kv_layout if not layout.contiguous else "NHD", num_layers, layer)
        for dim in (head_dim, head_dim_vo)
    ]
    return Case(
        kind=kind,
        q=q.astype(jnp.dtype(dtype)),
        k=pools[0].astype(jnp.dtype(dtype)),
        v=pools[1].astype(jnp.dtype(dtype)),
        layout=layout,
        variant=variant,
        sm_scale=0.5 if fixed else float(rng.uniform(0.1, 0.6)),
        layer=layer,
        kv_layout=kv_layout,
        num_pages=None if layout.contiguous else num_pages,
    )


def _lengths(
    rng: np.random.Generator, max_kv_len: int, style: str | None, max_q_len: int, fixed: bool
) -> tuple[Any, Any, int]:
    """q_len [rows], kv_len [rows] and num_tokens of a batch."""
    style = str(rng.choice(["decode", "mixed", "rand"])) if style is None else style
    rows = int(rng.integers(0, FIXED_ROWS + 1))
    q_len = np.ones(rows, int) if style == "decode" else rng.integers(0, max_q_len, rows)
    if style == "mixed" and rows:
        q_len = rng.integers(0, 2, rows)
        q_len[rng.integers(rows)] = int(rng.integers(1, 3 * max_q_len))
    kv_len = rng.integers(0, max_kv_len + 1, rows) * (rng.random(rows) > 0.2)
    if rng.random() < 0.2:
        kv_len = np.minimum(np.maximum(kv_len, q_len), max_kv_len)
    if fixed:
        while q_len.sum() > FIXED_TOKENS:
            q_len[q_len.argmax()] //= 2
        idle = np.zeros(FIXED_ROWS - rows, int)  # rows of a fixed batch that no request uses
        return np.concatenate([q_len, idle]), np.concatenate([kv_len, idle]), FIXED_TOKENS
    return q_len, kv_len, int(q_len.sum()) + int(rng.choice([0, 0, 1, 5, 20]))


def _layout(
    rng: np.random.Generator,
    kind: str,
    page_size: int,
    max_kv_len: int,
    style: str | None,
    max_q_len: int,
    fixed: bool,
) -> tuple[BlockSparse, int]:
    """A layout and the size of its pool: pages, or tokens of contiguous K and V."""
    q_len, kv_len, num_tokens = _lengths(rng, max_kv_len, style, max_q_len, fixed)
    qo_indptr = np.concatenate([[0], np.cumsum(q_len)])
    if kind == "blockmask":
        return _block_mask(rng, page_size, num_tokens, max_kv_len, fixed)
    if kind == "ragged":
        kv_indptr = np.concatenate([[0], np.cumsum(kv_len)])
        size = FIXED_KV_TOKENS if fixed else int(kv_indptr[-1]) + int(rng.integers(0, 9))
        return ragged(qo_indptr, kv_indptr, num_kv_tokens=size, num_tokens=num_tokens), size
    num_pages = FIXED_PAGES if fixed else 64

    def one(indptr: Any, lens: Any, capacity: int) -> BlockSparse:
        return _paged(rng, indptr, lens, page_size, num_tokens, num_pages, capacity if fixed else None)

    if kind == "paged":
        return one(qo_indptr, kv_len, FIXED_BLOCKS), num_pages
    if kind == "table":
        need = -(-kv_len // page_size)
        width = FIXED_BLOCKS // FIXED_ROWS if fixed else int(need.max(initial=0)) + int(rng.integers(1, 3))
        table = rng.integers(0, num_pages, (len(kv_len), width))
        unused = np.arange(width) >= need[:, None]
        table = np.where(unused, rng.choice(_ABSURD_IDS, table.shape), table)
        return from_block_table(table, kv_len, qo_indptr, page_size, num_tokens=num_tokens), num_pages
    rows = len(q_len)
    groups = 2 if fixed else int(rng.integers(1, 4))
    cuts = np.sort(rng.integers(0, rows + 1, groups - 1))
    shared = qo_indptr[np.concatenate([[0], cuts, [rows]])]
    levels = [one(shared, rng.integers(0, max_kv_len + 1, groups), 32), one(qo_indptr, kv_len, 64)]
    if kind == "compose3":
        levels.insert(0, one(np.array([0, qo_indptr[-1]]), rng.integers(0, max_kv_len + 1, 1), 16))
    return compose(*levels), num_pages


def _paged(
    rng: np.random.Generator,
    qo_indptr: Any,
    kv_len: Any,
    page_size: int,
    num_tokens: int,
    num_pages: int,
    capacity: int | None,
) -> BlockSparse:
    need = -(-kv_len // page_size)
    slack = np.zeros(len(need), int) if capacity is not None else rng.integers(0, 3, len(need))
    kv_indptr = np.concatenate([[0], np.cumsum(need + slack)])
    if capacity is None:
        capacity = int(kv_indptr[-1]) + int(rng.integers(0, 9))
    ids = rng.choice(_ABSURD_IDS, capacity)
    for r, blocks in enumerate(need):
        ids[kv_indptr[r] : kv_indptr[r] + blocks] = rng.integers(0, num_pages, blocks)
    return paged(qo_indptr, kv_indptr, ids, kv_len, page_size, num_tokens=num_tokens)


def _block_mask(
    rng: np.random.Generator, page_size: int, num_tokens: int, max_kv_len: int, fixed: bool
) -> tuple[BlockSparse, int]:
    block_rows = 6 if fixed else int(rng.integers(1, 7))
    padding = 2 if fixed else int(rng.integers(0, 3))
    num_kv_tokens = 5 * page_size - page_size // 2 if fixed else int(rng.integers(1, max_kv_len + 1))
    masked_tokens = max(0, num_tokens - padding)
    shape = (-(-masked_tokens // block_rows), -(-num_kv_tokens // page_size))
    mask = rng.random(shape) < 0.5
    layout = from_block_mask(mask, block_rows, page_size, num_tokens, num_kv_tokens)
    return layout, shape[1]


def _used_entries(layout: BlockSparse) -> Any:
    """Which entries of kv_indices lie in the used range of a row, bool [capacity]."""
    out = np.zeros(len(layout.kv_indices), bool)
    for start, n in zip(layout.kv_start, layout.kv_len, strict=True):
        out[start : start - (-n // layout.page_size)] = True
    return out


def _used(layout: BlockSparse, size: int) -> Any:
    """Which slots some row reads: bool [num_pages, page_size], or [num_kv_tokens]."""
    if layout.contiguous:
        out = np.zeros(size, bool)
        for start, n in zip(layout.kv_start, layout.kv_len, strict=True):
            out[start : start + n] = True
        return out
    out = np.zeros((size, layout.page_size), bool)
    for start, n in zip(layout.kv_start, layout.kv_len, strict=True):
        j = np.arange(n)
        out[layout.kv_indices[start + j // layout.page_size], j % layout.page_size] = True
    return out


def _covered(layout: BlockSparse) -> Any:
    """How many rows cover each token, int [num_tokens]."""
    out = np.zeros(layout.num_tokens, int)
    for start, n in zip(layout.q_start, layout.q_len, strict=True):
        out[start : start + n] += 1
    return out


def _pool(
    rng: np.random.Generator,
    used: Any,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: str,
    num_layers: int | None,
    layer: int | None,
) -> Any:
    x = rng.normal(size=(*used.shape, num_kv_heads, head_dim))
    x[~used] = rng.choice(_POISON)
    if kv_layout == "HND":
        x = np.ascontiguousarray(np.swapaxes(x, 1, 2))
    if num_layers is None:
        return x
    pool = np.full((num_layers, *x.shape), rng.choice(_POISON))
    pool[layer] = x
    return pool


def _variant(rng: np.random.Generator) -> Variant:
    def maybe(p: float, choices: tuple[Any, ...]) -> Any:
        return rng.choice(choices) if rng.random() < p else None

    softmax = bool(rng.random() < 0.9)
    return Variant(
        causal=bool(rng.random() < 0.5),
        window_left=maybe(0.4, (0, 1, 5, 17, 40, 1000)),
        window_right=maybe(0.2, (0, 1, 9)),
        logits_soft_cap=maybe(0.2, (0.7, 2.0, 30.0)),
        softmax=softmax,
    )
