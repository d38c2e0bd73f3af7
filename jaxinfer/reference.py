"""The specification in plain jax.numpy, float32 with precision HIGHEST: attention over any layout, and append.

It follows the layout row by row and knows no plan; it is slow, runs everywhere, and decides what is right in
float32. Argument checks beyond what would be silently wrong here are the public functions' business
(attention.py, cache.py).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer import _args
from jaxinfer._args import INT32_MAX, Array
from jaxinfer._mesh import vary, varying_axes
from jaxinfer.layout import BlockSparse
from jaxinfer.state import AttentionState
from jaxinfer.variant import Variant

_CHUNK = 256  # KV tokens gathered at once
_MAX_TILE = 64  # query tokens of a row that share a gathered chunk


def attention(
    q: Array,
    k: Array,
    v: Array,
    layout: BlockSparse,
    plan: object = None,
    *,
    variant: Variant = Variant(),  # noqa: B008 frozen
    sm_scale: float | Array | None = None,
    layer: int | Array | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> jax.Array | AttentionState:
    """Attention of every query token over the KV tokens of every BSR row that covers it. Works inside jit.

    Args:
      q: [num_tokens, num_qo_heads, head_dim_qk].
      k, v: pages [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or
        [num_pages, num_kv_heads, page_size, head_dim] ("HND"), contiguous layouts
        [num_kv_tokens, num_kv_heads, head_dim]. With `layer`: one leading axis more.
      layout: any layout, values on the host or traced.
      plan: ignored; here so that implementations are interchangeable.
      variant, sm_scale, layer, kv_layout, return_lse: as in `jaxinfer.attention`; sm_scale None is
        `1 / sqrt(head_dim_qk)`.

    Returns:
      o [num_tokens, num_qo_heads, head_dim_vo] in the dtype of q, or with return_lse `AttentionState(o,
      lse)`. Tokens that see nothing get o = 0 and lse = -inf.

    Raises:
      ValueError: shapes that do not fit together, or an LSE without softmax.
      NotImplementedError: a custom mask with a composed layout.
    """
    out: jax.Array | AttentionState = _attention(
        q, k, v, layout, variant, sm_scale, layer, kv_layout=kv_layout, return_lse=return_lse
    )
    return out


@functools.partial(jax.jit, static_argnames=("kv_layout", "return_lse"))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: BlockSparse,
    variant: Variant,
    sm_scale: jax.Array | None,
    layer: jax.Array | None,
    *,
    kv_layout: str,
    return_lse: bool,
) -> jax.Array | AttentionState:
    pool = _Pool(k, v, layout, layer, kv_layout)
    num_tokens, num_qo_heads, head_dim = q.shape
    if num_tokens != layout.num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the layout has {layout.num_tokens}")
    if num_qo_heads % pool.num_kv_heads or head_dim != pool.k.shape[-1]:
        raise ValueError(
            f"q has {num_qo_heads} heads of {head_dim}, k has {pool.num_kv_heads} of {pool.k.shape[-1]}"
        )
    if return_lse and not variant.softmax:
        raise ValueError("return_lse without softmax: the LSE is not defined")
    variant.check_operands(layout)
    scale = jnp.float32(1.0 / math.sqrt(head_dim)) if sm_scale is None else jnp.asarray(sm_scale, jnp.float32)

    rows = layout.num_rows
    tile = min(_MAX_TILE, max(1, -(-num_tokens // max(rows, 1))))
    heads = (pool.num_kv_heads, num_qo_heads // pool.num_kv_heads)
    # Room for one tile behind the last token, so that a tile's slice never has to be moved back.
    padded = num_tokens + tile
    q_pad = jnp.pad(jnp.asarray(q, jnp.float32), ((0, tile), (0, 0), (0, 0)))
    q_pad = q_pad.reshape(padded, *heads, head_dim)
    q_pos = jnp.pad(jnp.asarray(layout.q_pos), (0, tile))
    axes = varying_axes(*jax.tree.leaves((q, k, v, layout, variant, scale, layer)))
    # Running softmax of every token: largest logit, sum of weights, weighted sum of V.
    carry: tuple[Any, ...] = (
        jnp.full((padded, *heads), -jnp.inf, jnp.float32),
        jnp.zeros((padded, *heads), jnp.float32),
        jnp.zeros((padded, *heads, pool.v.shape[-1]), jnp.float32),
    )
    carry = tuple(vary(c, axes) for c in carry)
    q_starts, q_lens = jnp.asarray(layout.q_start), jnp.asarray(layout.q_len)

    def row_step(r: Any, carry: Any) -> Any:
        q_start = q_starts[r]
        q_end = q_start + jnp.clip(q_lens[r], 0, num_tokens)
        num_kv = pool.row_length(r)
        num_tiles = jnp.where(num_kv > 0, (q_end - q_start + tile - 1) // tile, 0)

        def tile_step(i: Any, carry: Any) -> Any:
            at = jnp.clip(q_start + i * tile, 0, num_tokens)
            token = at + jnp.arange(tile, dtype=jnp.int32)
            live = (token >= q_start) & (token < q_end) & (token < num_tokens)
            # Padding tokens of q may hold NaN.
            q_tile = jnp.where(live[:, None, None, None], lax.dynamic_slice_in_dim(q_pad, at, tile), 0.0)
            pos = lax.dynamic_slice_in_dim(q_pos, at, tile)
            old = tuple(lax.dynamic_slice_in_dim(c, at, tile) for c in carry)

            def chunk_step(c: Any, state: Any) -> Any:
                j = c * pool.chunk + jnp.arange(pool.chunk, dtype=jnp.int32)
                k_rows, v_rows, kv_pos, valid = pool.gather(r, j, num_kv)
                see = valid[None] & live[:, None] & _visible(variant, pos[:, None], kv_pos[None])
                if variant.mask_bits is not None:
                    see &= _custom_mask(variant, layout, r, token - q_start, j)
                # What nobody here may see has weight 0, and 0 * NaN must not reach the sum.
                v_rows = jnp.where(see.any(axis=0)[:, None, None], v_rows, 0.0)
                rule = None
                if variant.functor is not None:
                    rule = variant.functor.twin_rule(variant.operands, heads, r, token, pos, kv_pos, j)
                return _accumulate(variant, state, q_tile, k_rows, v_rows, see, scale, rule)

            new = lax.fori_loop(0, (num_kv + pool.chunk - 1) // pool.chunk, chunk_step, old)
            keep = [live.reshape(-1, *(1,) * (c.ndim - 1)) for c in carry]
            return tuple(
                lax.dynamic_update_slice_in_dim(c, jnp.where(m, n, o), at, 0)
                for c, m, n, o in zip(carry, keep, new, old, strict=True)
            )

        return lax.fori_loop(0, num_tiles, tile_step, carry)

    if rows > 0 and num_tokens > 0 and pool.chunk > 0:
        carry = lax.fori_loop(0, rows, row_step, carry)
    top, total, acc = (c[:num_tokens].reshape(num_tokens, num_qo_heads, *c.shape[3:]) for c in carry)
    if not variant.softmax:
        weighted: jax.Array = acc.astype(q.dtype)
        return weighted
    some = total != 0  # NaN, from a token that is seen, is no empty state
    o = jnp.where(some[..., None], acc / jnp.where(some, total, 1.0)[..., None], 0.0).astype(q.dtype)
    if not return_lse:
        return o
    return AttentionState(o, jnp.where(some, top + jnp.log(total), -jnp.inf))


def append_kv(
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    slots: Array,
    *,
    layer: int | Array | None = None,
    kv_layout: str = "NHD",
) -> tuple[jax.Array, jax.Array]:
    """Writes token t's K and V to slot `slots[t] = page * page_size + offset` of the pools. Works inside jit.

    Args:
      k_pages, v_pages: pools as in `attention`, with a leading layer axis if `layer` is given.
      k, v: [num_tokens, num_kv_heads, head_dim], dtype of the pools.
      slots: int32 [num_tokens], each at most once; a slot outside [0, num_slots) is skipped.
      layer: int; one out of range writes nothing.
      kv_layout: "NHD" or "HND".

    Returns:
      The new (k_pages, v_pages).

    Raises:
      ValueError: the pools and the new rows differ in dtype, slots in length from them, or kv_layout is neither.
    """
    offset_axis = _offset_axis(kv_layout)
    axis = 0 if layer is None else 1
    num_pages, page_size = k_pages.shape[axis], k_pages.shape[axis + offset_axis]
    slots = jnp.asarray(_args.ints("slots", slots, 1))
    ok = (slots >= 0) & (slots < num_pages * page_size)
    lead: tuple[Any, ...] = ()
    if layer is not None:
        layer = jnp.asarray(layer, jnp.int32).reshape(())
        ok &= (layer >= 0) & (layer < k_pages.shape[0])
        lead = (layer,)
    order = jnp.argsort(~ok, stable=True)  # tokens to write first

    def write(pool: Array, rows: Array) -> jax.Array:
        if rows.shape[0] != slots.shape[0]:
            raise ValueError(
                f"slots must have one entry for each of {rows.shape[0]} tokens, got {slots.shape[0]}"
            )
        if pool.dtype != rows.dtype:
            raise ValueError(f"the pool is {pool.dtype}, the new rows are {rows.dtype}")
        if rows.size == 0:
            return jnp.asarray(pool)
        rows = jnp.asarray(rows)
        pool = vary(jnp.asarray(pool), varying_axes(pool, rows, *lead, ok, slots))

        # One slice at a time: a scatter of bfloat16 makes XLA's CPU backend convert the whole pool.
        def step(i: Any, pool: Any) -> Any:
            t = order[i]
            page, offset = slots[t] // page_size, slots[t] % page_size
            # One dtype for all: with jax_enable_x64 a Python 0 is int64, and slots are int32.
            zero = jnp.zeros_like(page)
            at = (*lead, page, offset, zero, zero) if offset_axis == 1 else (*lead, page, zero, offset, zero)
            new = rows[t][None] if offset_axis == 1 else rows[t][:, None]
            return lax.dynamic_update_slice(pool, new.reshape((1,) * len(at[:-3]) + new.shape), at)

        out: jax.Array = lax.fori_loop(0, jnp.sum(ok), step, pool)
        return out

    return write(k_pages, k), write(v_pages, v)


def _offset_axis(kv_layout: str) -> int:
    """Axis of the offset in a page, counted from the page axis."""
    _args.one_of("kv_layout", kv_layout, ("NHD", "HND"))
    return 1 if kv_layout == "NHD" else 2


class _Pool:
    """K and V with the layout's addressing: the only place that knows where KV token j of row r lies."""

    def __init__(self, k: Array, v: Array, layout: BlockSparse, layer: Any, kv_layout: str) -> None:
        rank = (3 if layout.contiguous else 4) + (layer is not None)
        if k.ndim != rank or v.ndim != rank or k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"k {list(k.shape)} and v {list(v.shape)} need {rank} axes, equal up to the last one"
            )
        if k.dtype != v.dtype:
            raise ValueError(f"k is {k.dtype}, v is {v.dtype}")
        self.k, self.v, self.layout = jnp.asarray(k), jnp.asarray(v), layout
        self.layer = None if layer is None else jnp.asarray(layer, jnp.int32).reshape(())
        offset_axis = _offset_axis(kv_layout)
        base = 0 if layer is None else 1
        self.size = k.shape[base]  # pages, or KV tokens of contiguous K and V
        self.hnd = not layout.contiguous and offset_axis == 2
        self.num_kv_heads: int = k.shape[base + 1] if self.hnd else k.shape[-2]
        if not layout.contiguous and k.shape[base + offset_axis] != layout.page_size:
            raise ValueError(
                f"k has {k.shape[base + offset_axis]} tokens per page, the layout has {layout.page_size}"
            )
        self.kv_len, self.kv_start = jnp.asarray(layout.kv_len), jnp.asarray(layout.kv_start)
        self.kv_offset, self.kv_indices = jnp.asarray(layout.kv_offset), jnp.asarray(layout.kv_indices)
        self.block_pos = None if layout.block_pos is None else jnp.asarray(layout.block_pos)
        # No token of an empty pool, and none beyond what the layout can list, can be read.
        self.limit = 0 if k.size == 0 or v.size == 0 else min(layout.kv_capacity, INT32_MAX - _CHUNK)
        self.chunk = min(_CHUNK, self.limit)

    def row_length(self, r: Any) -> Any:
        """KV tokens of row r; none if the layer does not exist."""
        n = jnp.clip(self.kv_len[r], 0, self.limit)
        if self.layer is None:
            return n
        return jnp.where((self.layer >= 0) & (self.layer < self.k.shape[0]), n, 0)

    def gather(self, r: Any, j: Any, num_kv: Any) -> tuple[Any, Any, Any, Any]:
        """KV tokens j [chunk] of row r: K and V [chunk, num_kv_heads, head_dim] in float32 (0 where they cannot be
        read), positions, and which can be read.
        """
        layout = self.layout
        valid = j < num_kv
        kv_pos = self.kv_offset[r] + j
        if layout.contiguous:
            token = self.kv_start[r] + j
            valid &= (token >= 0) & (token < self.size)
            index: tuple[Any, ...] = (jnp.where(valid, token, 0),)
        else:
            block, offset = self.kv_start[r] + j // layout.page_size, j % layout.page_size
            valid &= (block >= 0) & (block < self.kv_indices.shape[0])
            block = jnp.where(valid, block, 0)
            page = self.kv_indices[block]
            valid &= (page >= 0) & (page < self.size)
            page = jnp.where(valid, page, 0)
            index = (page, slice(None), offset) if self.hnd else (page, offset)
            if self.block_pos is not None:
                kv_pos = self.block_pos[block] + offset
        if self.layer is not None:
            index = (jnp.clip(self.layer, 0, self.k.shape[0] - 1), *index)
            if self.hnd:  # a scalar beside a slice would move the token axis
                index = (jnp.broadcast_to(index[0], j.shape), *index[1:])
        live = valid[:, None, None]
        # XLA's CPU backend converts bfloat16 to float32 before it gathers, and would move that out of the
        # loop as a float32 copy of the whole pool. Tied to the loop's `live`, it converts these rows alone.
        all_k, all_v, live = lax.optimization_barrier((self.k, self.v, live))
        k = jnp.where(live, all_k[index].astype(jnp.float32), 0.0)
        v = jnp.where(live, all_v[index].astype(jnp.float32), 0.0)
        return k, v, kv_pos, valid


def _visible(variant: Variant, q_pos: Any, kv_pos: Any) -> Any:
    """Causal and windows, on positions. Bounds saturate: a window may be as large as int32."""
    see = jnp.ones(jnp.broadcast_shapes(q_pos.shape, kv_pos.shape), bool)
    if variant.causal:
        see &= kv_pos <= q_pos
    if variant.window_left is not None:
        w = variant.window_left
        see &= (q_pos < -INT32_MAX - 1 + w) | (kv_pos >= q_pos - w)
    if variant.window_right is not None:
        w = variant.window_right
        see &= (q_pos > INT32_MAX - w) | (kv_pos <= q_pos + w)
    return see


def _custom_mask(variant: Variant, layout: BlockSparse, r: Any, i: Any, j: Any) -> Any:
    """Bits of query tokens i [tile] and KV tokens j [chunk] of row r, bool [tile, chunk]."""
    bits, indptr = jnp.asarray(variant.mask_bits), jnp.asarray(variant.mask_indptr)
    n = jnp.asarray(layout.kv_len)[r]
    # Bit i * n + j, with whole bytes split off first because the bit number may exceed int32.
    low = i[:, None] * (n % 8) + j[None]
    byte = indptr[r] + i[:, None] * (n // 8) + low // 8
    inside = (byte >= 0) & (byte < bits.shape[0])
    if bits.shape[0] == 0:
        return inside
    return inside & ((bits[jnp.where(inside, byte, 0)] >> (low % 8).astype(jnp.uint8)) & 1 == 1)


def _accumulate(
    variant: Variant, state: Any, q: Any, k: Any, v: Any, see: Any, scale: Any, rule: Any = None
) -> Any:
    """Adds a chunk to the running softmax (or plain sum) of a tile.

    Shapes: q [tile, num_kv_heads, group_size, head_dim_qk], k and v [chunk, num_kv_heads, head_dim], see
    [tile, chunk]. rule: a user's own, from logits to (logits, what may be seen).
    """
    top, total, acc = state
    s = jnp.einsum("thgd,chd->thgc", q, k, precision=lax.Precision.HIGHEST) * scale
    see = see[:, None, None, :]
    if rule is not None:
        s, allowed = rule(s)
        see = see & allowed
    if variant.logits_soft_cap is not None:
        s = variant.logits_soft_cap * jnp.tanh(s / variant.logits_soft_cap)
    if variant.softmax:
        s = jnp.where(see, s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=-1))
        base = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # -inf - -inf is NaN
        w = jnp.exp(s - base[..., None])
        shrink = jnp.exp(top - base)
    else:
        new_top, w, shrink = top, jnp.where(see, s, 0.0), jnp.ones_like(total)
    added = jnp.einsum("thgc,chd->thgd", w, v, precision=lax.Precision.HIGHEST)
    return new_top, total * shrink + w.sum(axis=-1), acc * shrink[..., None] + added
