"""BlockSparse, which query tokens see which KV tokens as block-sparse rows over pages, and its constructors.

What differs between page tables, ragged batches, shared prefixes and block masks is expressed here once
(FlashInfer, arXiv 2501.01005, section 3.1). Not here: the rules inside what a row lists (variant.py), who
computes which piece (plan.py), and the math (reference.py).

Every constructor but `from_block_mask` takes host values (numpy, lists; validated, numpy in and numpy out)
or traced and device values (jax.numpy, no look at values), or a mixture of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import _args, _pytree
from jaxinfer._args import INT32_MAX, Array, IntLike, all_host


@dataclass(frozen=True)
class BlockSparse:
    """BSR rows over KV blocks. Row r says: tokens [q_start[r], q_start[r] + q_len[r]) see what row r lists.

    Rows may overlap in tokens (at most `num_layouts` rows cover a token); a token attends to the KV tokens
    of every row that covers it. Tokens that no row covers are padding. Build it with `paged`,
    `from_block_table`, `ragged`, `from_block_mask` and `compose`; a pytree whose leaves are the int32 arrays.
    """

    q_start: Array  # [rows]
    q_len: Array  # [rows]
    kv_start: Array  # [rows] index of the row's first block in kv_indices; contiguous: its first KV token
    kv_indices: Array  # [capacity] page ids; contiguous: empty
    kv_len: Array  # [rows] valid KV tokens, those of this step included
    kv_offset: Array  # [rows] position of the row's first KV token
    q_pos: Array  # [num_tokens] position of each query token, 0 for padding
    block_pos: Array | None  # [capacity] position of each listed block's first token, ascending within a row
    page_size: int  # static from here on: tokens of a block
    contiguous: bool  # K and V are [num_kv_tokens, num_kv_heads, head_dim], addresses are affine
    num_layouts: int  # how many rows may cover one token
    kv_capacity: int  # the most KV tokens that all rows can list together

    @property
    def num_tokens(self) -> int:
        """Capacity in query tokens, padding included."""
        return int(self.q_pos.shape[0])

    @property
    def num_rows(self) -> int:
        """Number of BSR rows."""
        return int(self.q_len.shape[0])

    def slots(self) -> Array:
        """Cache slots of this step's new tokens, int32 [num_tokens]: `page * page_size + offset`.

        The new tokens of a row are its last q_len KV tokens. Where several rows cover a token the last row
        counts (composed: the deepest layout). -1 where no row covers the token, where the row has fewer KV
        tokens than query tokens, and where the page id is negative or its slot exceeds int32. Contiguous:
        index of the KV token.
        """
        xp, a = _together(self)
        n, rows = a.num_tokens, a.num_rows
        if n == 0 or rows == 0 or (not a.contiguous and a.kv_indices.shape[0] == 0):
            return xp.full(n, -1, np.int32)  # type: ignore[no-any-return]
        row = last_row(a)
        r = xp.maximum(row, 0)
        j = a.kv_len[r] - a.q_len[r] + xp.arange(n, dtype=np.int32) - a.q_start[r]
        ok = (row >= 0) & (j >= 0)
        j = xp.maximum(j, 0)
        if a.contiguous:
            slot = a.kv_start[r] + j
        else:
            capacity = a.kv_indices.shape[0]
            at = a.kv_start[r] + j // a.page_size
            page = a.kv_indices[xp.clip(at, 0, capacity - 1)]
            offset = j % a.page_size
            # Garbage ids are legal until they are used; their product must not wrap into a valid slot.
            ok &= (at >= 0) & (at < capacity) & (page >= 0) & (page <= (INT32_MAX - offset) // a.page_size)
            slot = xp.where(ok, page, 0) * np.int32(a.page_size) + offset
        return xp.where(ok, slot, -1).astype(np.int32)  # type: ignore[no-any-return]


_DATA = ("q_start", "q_len", "kv_start", "kv_indices", "kv_len", "kv_offset", "q_pos", "block_pos")
_pytree.register(
    BlockSparse, data_fields=_DATA, meta_fields=("page_size", "contiguous", "num_layouts", "kv_capacity")
)


def paged(
    qo_indptr: IntLike,
    kv_indptr: IntLike,
    kv_indices: IntLike,
    kv_len: IntLike,
    page_size: int,
    num_tokens: int | None = None,
    num_pages: int | None = None,
) -> BlockSparse:
    """One row per request, each with its own list of pages.

    Args:
      qo_indptr: int [rows + 1]; request r owns tokens [qo_indptr[r], qo_indptr[r + 1]).
      kv_indptr: int [rows + 1]; request r lists `kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`.
      kv_indices: int [capacity] page ids; entries behind kv_indptr[-1] are ignored, whatever they hold.
      kv_len: int [rows] valid KV tokens, those appended in this step included.
      page_size: tokens per page, at least 1.
      num_tokens: static capacity in query tokens; None: qo_indptr[-1], which must then be on the host.
      num_pages: size of the pool; given, page ids on the host inside the used range are checked against it.

    Raises:
      ValueError: bad shape, dtype or (on the host) value; the message names the argument and the numbers.
      TypeError: num_tokens is None and qo_indptr is traced or on a device.
    """
    page_size = _args.positive("page_size", page_size)
    qo, kv_ptr = _args.indptr("qo_indptr", qo_indptr), _args.indptr("kv_indptr", kv_indptr)
    indices, lens = _args.ints("kv_indices", kv_indices, 1), _args.lengths("kv_len", kv_len)
    rows = lens.shape[0]
    _same_rows("qo_indptr", qo, rows)
    _same_rows("kv_indptr", kv_ptr, rows)
    if all_host(kv_ptr):
        if kv_ptr[-1] > indices.shape[0]:
            raise ValueError(
                f"kv_indptr[-1] = {kv_ptr[-1]} exceeds the {indices.shape[0]} entries of kv_indices"
            )
        if all_host(lens):
            _fits_pages(lens, np.diff(kv_ptr), page_size)
    return _from_rows(qo, kv_ptr[:-1], indices, lens, page_size, num_tokens, num_pages)


def from_block_table(
    block_table: IntLike,
    kv_len: IntLike,
    qo_indptr: IntLike,
    page_size: int,
    num_tokens: int | None = None,
    num_pages: int | None = None,
) -> BlockSparse:
    """One row per request from a dense page table.

    Args:
      block_table: int [rows, max_pages]; entries beyond `ceil(kv_len / page_size)` are ignored.
      kv_len, qo_indptr, page_size, num_tokens, num_pages: as in `paged`; same errors.
    """
    page_size = _args.positive("page_size", page_size)
    table, lens = _args.ints("block_table", block_table, 2), _args.lengths("kv_len", kv_len)
    qo = _args.indptr("qo_indptr", qo_indptr)
    rows, width = table.shape
    if lens.shape[0] != rows:
        raise ValueError(f"kv_len has {lens.shape[0]} rows, block_table has {rows}")
    _same_rows("qo_indptr", qo, rows)
    if rows * width > INT32_MAX:
        raise ValueError(f"block_table of shape {table.shape} has more than {INT32_MAX} entries")
    if all_host(lens):
        _fits_pages(lens, np.full(rows, width), page_size)
    start = np.arange(rows, dtype=np.int32) * np.int32(width)
    return _from_rows(qo, start, table.reshape(-1), lens, page_size, num_tokens, num_pages)


def ragged(
    qo_indptr: IntLike, kv_indptr: IntLike, num_kv_tokens: int | None = None, num_tokens: int | None = None
) -> BlockSparse:
    """One row per request over contiguous K and V [num_kv_tokens, num_kv_heads, head_dim].

    Args:
      qo_indptr, kv_indptr: int [rows + 1]; request r owns query tokens [qo_indptr[r], qo_indptr[r + 1]) and
        KV tokens [kv_indptr[r], kv_indptr[r + 1]).
      num_kv_tokens, num_tokens: static capacities; None: the last entry of the indptr, which must be on the
      host.

    Raises:
      ValueError, TypeError: as in `paged`.
    """
    qo, kv_ptr = _args.indptr("qo_indptr", qo_indptr), _args.indptr("kv_indptr", kv_indptr)
    _same_rows("kv_indptr", kv_ptr, qo.shape[0] - 1)
    capacity = _args.capacity("num_kv_tokens", num_kv_tokens, "kv_indptr", kv_ptr)
    n = _args.capacity("num_tokens", num_tokens, "qo_indptr", qo)
    q_start, q_len, kv_start, kv_len = qo[:-1], qo[1:] - qo[:-1], kv_ptr[:-1], kv_ptr[1:] - kv_ptr[:-1]
    return BlockSparse(
        q_start=q_start,
        q_len=q_len,
        kv_start=kv_start,
        kv_indices=np.zeros(0, np.int32),
        kv_len=kv_len,
        kv_offset=np.zeros(q_len.shape[0], np.int32),
        q_pos=_bottom_right(qo, kv_len, n),
        block_pos=None,
        page_size=1,
        contiguous=True,
        num_layouts=1,
        kv_capacity=capacity,
    )


def from_block_mask(
    mask: np.ndarray[Any, np.dtype[Any]],
    block_rows: int,
    block_cols: int,
    num_tokens: int | None = None,
    num_kv_tokens: int | None = None,
) -> BlockSparse:
    """Block-sparse attention from a bool matrix of blocks; K and V are paged with page_size = block_cols.

    Positions are the dense matrix's own indices, so causal and windows cut it as they cut the dense matrix.

    Args:
      mask: bool [num_block_rows, num_block_cols] on the host; True where the block is attended to. Block
        column c is page c.
      block_rows, block_cols: query and KV tokens per block.
      num_tokens: capacity; less than num_block_rows * block_rows cuts the last block row, more is padding.
      num_kv_tokens: KV tokens of the dense matrix; less than num_block_cols * block_cols cuts the last block.

    Raises:
      TypeError: mask is traced or on a device.
      ValueError: mask is not bool and 2-D, or the counts do not fit the blocks.
    """
    if isinstance(mask, jax.Array):
        raise TypeError(
            "mask: from_block_mask needs a host array (numpy.asarray outside jit), got a jax.Array"
        )
    m = _args.host("mask", mask)
    if m.ndim != 2 or m.dtype != np.bool_:
        raise ValueError(f"mask must be bool [block rows, block cols], got {m.dtype} of shape {m.shape}")
    block_rows = _args.positive("block_rows", block_rows)
    block_cols = _args.positive("block_cols", block_cols)
    mb, nb = m.shape
    n = mb * block_rows if num_tokens is None else _args.static_int("num_tokens", num_tokens)
    kv = nb * block_cols if num_kv_tokens is None else _args.static_int("num_kv_tokens", num_kv_tokens)
    if n <= (mb - 1) * block_rows:
        raise ValueError(f"num_tokens {n} leaves whole rows of the {mb} x {block_rows} mask without tokens")
    if not (nb - 1) * block_cols < kv <= nb * block_cols:
        raise ValueError(f"num_kv_tokens {kv} does not end in the last of {nb} blocks of {block_cols}")
    if max(n, kv, m.size) > INT32_MAX:
        raise ValueError(f"a mask of shape {m.shape} over {n} x {kv} tokens exceeds int32")
    row, col = np.nonzero(m)
    count = m.sum(axis=1)
    q_start = np.minimum(np.arange(mb, dtype=np.int32) * np.int32(block_rows), np.int32(n))
    indices, block_pos = np.zeros(m.size, np.int32), np.zeros(m.size, np.int32)
    # Capacity is that of the full mask, so that masks of one shape share a compiled program.
    indices[: col.size], block_pos[: col.size] = col, col * block_cols
    kv_len = np.bincount(row, np.minimum(block_cols, kv - col * block_cols), mb).astype(np.int64)
    if kv_len.size and kv_len.max() > INT32_MAX:
        raise ValueError(f"a row lists {kv_len.max()} KV tokens, more than int32 holds")
    pos = np.arange(n, dtype=np.int32)
    return BlockSparse(
        q_start=q_start,
        q_len=np.clip(n - q_start, 0, block_rows).astype(np.int32),
        kv_start=(np.cumsum(count) - count).astype(np.int32),
        kv_indices=indices,
        kv_len=kv_len.astype(np.int32),
        kv_offset=np.zeros(mb, np.int32),
        q_pos=np.where(pos < mb * block_rows, pos, 0).astype(np.int32),
        block_pos=block_pos,
        page_size=block_cols,
        contiguous=False,
        num_layouts=1,
        kv_capacity=m.size * block_cols,
    )


def compose(*layouts: BlockSparse) -> BlockSparse:
    """Rows of several layouts over the same tokens and pool in one: shared prefixes and what follows them.

    Composable formats (FlashInfer, arXiv 2501.01005, section 3.1.2): a token attends to the rows of every
    layout that cover it, in the given order. A row's KV tokens are placed behind those that earlier layouts
    list for its tokens (`kv_offset`), and `q_pos` is counted over all of them, so causal and windows mean
    what they mean on the flat layout.

    Args:
      layouts: at least one; same page_size, contiguity and num_tokens, none with block_pos. Contiguous
        layouts index the same K and V.

    Raises:
      ValueError: no layout, one that does not match, or (on the host) a row whose tokens have different
        numbers of KV tokens before them. In compiled code the row's first token counts.
      TypeError: something else than layouts.
    """
    if not layouts:
        raise ValueError("compose needs at least one layout")
    first = layouts[0]
    for i, a in enumerate(layouts):
        if not isinstance(a, BlockSparse):
            raise TypeError(f"layout {i} must be a BlockSparse, got {type(a).__name__}")
        for name in ("contiguous", "page_size", "num_tokens"):
            if getattr(a, name) != getattr(first, name):
                raise ValueError(
                    f"layout {i} has {name} {getattr(a, name)}, layout 0 has {getattr(first, name)}"
                )
        if a.block_pos is not None:
            raise ValueError(f"layout {i} has block_pos; such layouts cannot be composed")
    xp: Any = np if all(all_host(*_leaves(a)) for a in layouts) else jnp
    layouts = tuple(_as(xp, a) for a in layouts)
    n = first.num_tokens
    before: Any = xp.zeros(n, np.int32)
    q_pos: Any = xp.zeros(n, np.int32)
    offsets, starts, entries = [], [], 0
    for i, a in enumerate(layouts):
        offsets.append(a.kv_offset + _before_rows(xp, i, a, before))
        q_pos = xp.where(_sum_over_rows(xp, a, xp.ones(a.num_rows, np.int32)) > 0, before + a.q_pos, q_pos)
        before = before + _sum_over_rows(xp, a, a.kv_len)
        starts.append(a.kv_start + np.int32(entries))
        entries += a.kv_indices.shape[0]
    if entries > INT32_MAX:
        raise ValueError(f"the layouts list {entries} blocks together, more than int32 holds")

    def join(arrays: list[Any]) -> Array:
        return xp.concatenate(arrays).astype(np.int32)  # type: ignore[no-any-return]

    return BlockSparse(
        q_start=join([a.q_start for a in layouts]),
        q_len=join([a.q_len for a in layouts]),
        kv_start=join(starts),
        kv_indices=join([a.kv_indices for a in layouts]),
        kv_len=join([a.kv_len for a in layouts]),
        kv_offset=join(offsets),
        q_pos=q_pos.astype(np.int32),
        block_pos=None,
        page_size=first.page_size,
        contiguous=first.contiguous,
        num_layouts=sum(a.num_layouts for a in layouts),
        kv_capacity=sum(a.kv_capacity for a in layouts),
    )


def check(layout: BlockSparse, num_pages: int) -> Array:
    """Number of listed blocks in the used range whose page id is outside [0, num_pages), int32; 0 = good.

    Used are the first `ceil(kv_len / page_size)` blocks of each row; those that lie outside kv_indices count
    too. Works on the host and inside jit. Contiguous layouts list no blocks: 0.

    Raises:
      TypeError: something else than a layout, or num_pages is traced.
      ValueError: num_pages is no int, or negative.
    """
    if not isinstance(layout, BlockSparse):
        raise TypeError(f"layout must be a jaxinfer.BlockSparse, got {type(layout).__name__}")
    num_pages = _args.static_int("num_pages", num_pages)
    xp, layout = _together(layout)
    if layout.contiguous:
        return xp.zeros((), np.int32)  # type: ignore[no-any-return]
    capacity = layout.kv_indices.shape[0]
    begin, kv_len = layout.kv_start, xp.maximum(layout.kv_len, 0)
    blocks = kv_len // layout.page_size + (kv_len % layout.page_size > 0)
    end = begin + xp.minimum(blocks, INT32_MAX - xp.maximum(begin, 0))  # absurd values must not wrap around
    outside = blocks - (xp.clip(end, 0, capacity) - xp.clip(begin, 0, capacity))
    outside = xp.minimum(outside, (INT32_MAX - capacity) // max(layout.num_rows, 1))
    listed = _cover(xp, begin, end, xp.ones(layout.num_rows, np.int32), capacity)
    bad = (layout.kv_indices < 0) | (layout.kv_indices >= num_pages)
    return (xp.sum(xp.where(bad, listed, 0)) + xp.sum(outside)).astype(np.int32)  # type: ignore[no-any-return]


def last_row(layout: BlockSparse) -> Array:
    """The last BSR row that covers each token, int32 [num_tokens]; -1 for padding. Works inside jit."""
    n, rows = layout.num_tokens, layout.num_rows
    xp, layout = _together(layout)
    if n == 0 or rows == 0:
        return xp.full(n, -1, np.int32)  # type: ignore[no-any-return]
    if xp is np:
        out = np.full(n, -1, np.int32)
        q_len = np.asarray(layout.q_len)
        first = np.repeat(layout.q_start - (np.cumsum(q_len) - q_len), q_len)
        out[first + np.arange(first.size)] = np.repeat(np.arange(rows), q_len)  # the last assignment stays
        return out
    total = layout.num_layouts * n  # rows of one layout do not overlap: there are no more (row, token) pairs
    at = jnp.arange(total, dtype=jnp.int32)
    ends = jnp.cumsum(layout.q_len)
    row = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
    r = jnp.minimum(row, rows - 1)
    token = jnp.where(row < rows, layout.q_start[r] + at - (ends[r] - layout.q_len[r]), n)
    return jnp.full(n, -1, jnp.int32).at[jnp.where(token < 0, n, token)].max(r, mode="drop")


def _leaves(layout: BlockSparse) -> list[Any]:
    return [getattr(layout, name) for name in _DATA]


def _as(xp: Any, layout: BlockSparse) -> BlockSparse:
    leaves, tree = jax.tree.flatten(layout)
    out: BlockSparse = jax.tree.unflatten(tree, [xp.asarray(x) for x in leaves])
    return out


def _together(layout: BlockSparse) -> tuple[Any, BlockSparse]:
    """numpy, or jax.numpy as soon as one leaf needs it, and the layout with all leaves there: a host array
    cannot be indexed by a traced one."""
    xp: Any = np if all_host(*_leaves(layout)) else jnp
    return xp, _as(xp, layout)


def _same_rows(name: str, ptr: Array, rows: int) -> None:
    if ptr.shape[0] != rows + 1:
        raise ValueError(f"{name} must have rows + 1 = {rows + 1} entries, got {ptr.shape[0]}")


def _fits_pages(kv_len: Any, pages: Any, page_size: int) -> None:
    over = kv_len > pages.astype(np.int64) * page_size
    if over.any():
        r = int(over.argmax())
        raise ValueError(
            f"kv_len[{r}] = {kv_len[r]} exceeds the {pages[r]} pages of row {r} with page_size {page_size}"
        )


def _used_ids_in_pool(indices: Any, kv_start: Any, kv_len: Any, page_size: int, num_pages: int) -> None:
    blocks = -(-kv_len.astype(np.int64) // page_size)
    ends = np.cumsum(blocks)
    at = np.repeat(kv_start - (ends - blocks), blocks) + np.arange(blocks.sum())
    bad = (indices[at] < 0) | (indices[at] >= num_pages)
    if bad.any():
        first = int(bad.argmax())
        row = int(np.searchsorted(ends, first, side="right"))
        raise ValueError(f"row {row} lists page {indices[at[first]]}, outside [0, num_pages = {num_pages})")


def _bottom_right(qo: Any, kv_len: Any, num_tokens: int) -> Array:
    """q_pos [num_tokens]: the last query token of a row sits on its last KV token; padding is 0."""
    rows = kv_len.shape[0]
    if all_host(qo, kv_len):
        pos = np.zeros(num_tokens, np.int32)
        n = int(qo[-1])
        pos[:n] = np.repeat(kv_len - qo[1:], qo[1:] - qo[:-1]) + np.arange(n, dtype=np.int32)
        return pos
    if rows == 0:
        return jnp.zeros(num_tokens, jnp.int32)
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = jnp.asarray(qo[1:])
    row = jnp.minimum(jnp.searchsorted(ends, t, side="right"), rows - 1)
    return jnp.where(t < ends[-1], jnp.asarray(kv_len)[row] - ends[row] + t, 0)


def _from_rows(
    qo: Any,
    kv_start: Any,
    kv_indices: Array,
    kv_len: Any,
    page_size: int,
    num_tokens: int | None,
    num_pages: int | None,
) -> BlockSparse:
    n = _args.capacity("num_tokens", num_tokens, "qo_indptr", qo)
    if num_pages is not None:
        num_pages = _args.static_int("num_pages", num_pages)
        if all_host(kv_indices, kv_start, kv_len):
            _used_ids_in_pool(kv_indices, kv_start, kv_len, page_size, num_pages)
    return BlockSparse(
        q_start=qo[:-1],
        q_len=qo[1:] - qo[:-1],
        kv_start=kv_start,
        kv_indices=kv_indices,
        kv_len=kv_len,
        kv_offset=np.zeros(kv_len.shape[0], np.int32),
        q_pos=_bottom_right(qo, kv_len, n),
        block_pos=None,
        page_size=page_size,
        contiguous=False,
        num_layouts=1,
        kv_capacity=kv_indices.shape[0] * page_size,
    )


def _cover(xp: Any, begin: Any, end: Any, value: Any, size: int) -> Any:
    """Sum of `value` over the intervals [begin, end) that hold each of 0 .. size - 1, int32 [size]."""
    begin, end = xp.clip(begin, 0, size), xp.clip(end, 0, size)
    step: Any
    if xp is np:
        step = np.zeros(size + 1, np.int32)
        np.add.at(step, begin, value)
        np.subtract.at(step, end, value)
    else:
        step = jnp.zeros(size + 1, jnp.int32).at[begin].add(value).at[end].add(-jnp.asarray(value))
    return xp.cumsum(step[:size], dtype=np.int32)


def _sum_over_rows(xp: Any, layout: BlockSparse, value: Any) -> Any:
    """Sum of `value` [rows] over the rows that cover each token, int32 [num_tokens]."""
    return _cover(xp, layout.q_start, layout.q_start + layout.q_len, value, layout.num_tokens)


def _before_rows(xp: Any, index: int, layout: BlockSparse, before: Any) -> Any:
    """What `before` [num_tokens] holds for each row's tokens, int32 [rows]; 0 for rows without tokens."""
    n = layout.num_tokens
    if n == 0 or layout.num_rows == 0:
        return xp.zeros(layout.num_rows, np.int32)
    some = xp.asarray(layout.q_len) > 0
    first = xp.clip(layout.q_start, 0, n - 1)
    if xp is np:
        changes = np.cumsum(np.concatenate([[False], before[1:] != before[:-1]]))
        last = np.clip(layout.q_start + layout.q_len - 1, 0, n - 1)
        bad = np.asarray(some & (changes[first] != changes[last]))
        if bad.any():
            r = int(bad.argmax())
            tokens = before[first[r] : last[r] + 1]
            raise ValueError(
                f"row {r} of layout {index} covers tokens with {tokens.min()} to {tokens.max()} KV tokens in "
                "earlier layouts; all tokens of a row must have the same number"
            )
    return xp.where(some, xp.asarray(before)[first], 0)
