"""The tests' final judge: attention and append in float64 numpy, token by token and row by row.

It reads the fields of layout and variant and shares no code with jaxinfer. What must not be read is never
read here, so poisoned inputs give finite results.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    variant: Any,
    sm_scale: float | None = None,
    layer: int | None = None,
    kv_layout: str = "NHD",
    num_pages: int | None = None,
) -> tuple[Array, Array]:
    """o float64 [num_tokens, num_qo_heads, head_dim_vo] and lse float64 [num_tokens, num_qo_heads].

    num_pages: ids at or beyond it count as masked; None: the pool's own size. Without softmax lse is all NaN.
    """
    q = np.asarray(q).astype(np.float64)
    k, v = np.asarray(k), np.asarray(v)
    num_tokens, num_qo_heads, head_dim = q.shape
    scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    o = np.zeros((num_tokens, num_qo_heads, v.shape[-1]))
    lse = np.full((num_tokens, num_qo_heads), -np.inf)
    layer_missing = layer is not None and not 0 <= layer < k.shape[0]
    # Per token: K and V of what it sees.
    seen: list[list[tuple[Array, Array]]] = [[] for _ in range(num_tokens)]
    if not layer_missing:
        if layer is not None:
            k, v = k[layer], v[layer]
        if kv_layout == "HND" and not layout.contiguous:
            k, v = np.swapaxes(k, 1, 2), np.swapaxes(v, 1, 2)
        for row in range(len(layout.q_len)):
            where, pos = _listed(layout, row, len(k) if num_pages is None else num_pages, len(k))
            readable = np.array([w is not None for w in where], bool)
            for i in range(int(layout.q_len[row])):
                t = int(layout.q_start[row]) + i
                see = readable & _visible(variant, int(layout.q_pos[t]), pos)
                if variant.mask_bits is not None:
                    see &= _mask_row(variant, row, i, len(pos))
                at = [w for w, s in zip(where, see, strict=True) if s]
                if at:
                    seen[t].append((np.stack([k[w] for w in at]), np.stack([v[w] for w in at])))
    for t in range(num_tokens):
        if not seen[t]:
            continue
        group_size = num_qo_heads // seen[t][0][0].shape[1]
        keys = np.concatenate([a for a, _ in seen[t]]).astype(np.float64)
        values = np.concatenate([b for _, b in seen[t]]).astype(np.float64)
        for h in range(num_qo_heads):
            s = scale * (keys[:, h // group_size] @ q[t, h])
            if variant.logits_soft_cap is not None:
                s = variant.logits_soft_cap * np.tanh(s / variant.logits_soft_cap)
            w = s
            if variant.softmax:
                w = np.exp(s - s.max())
                lse[t, h] = s.max() + math.log(w.sum())
                w = w / w.sum()
            o[t, h] = w @ values[:, h // group_size]
    return o, lse if variant.softmax else np.full_like(lse, np.nan)


def append_oracle(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    slots: Any,
    layer: int | None = None,
    kv_layout: str = "NHD",
) -> tuple[Array, Array]:
    """Copies of the pools with token t's K and V in slot `slots[t]`; out of range writes nothing."""

    def write(pool: Any, rows: Any) -> Array:
        out = np.array(pool)
        if layer is not None and not 0 <= layer < out.shape[0]:
            return out
        pages = out if layer is None else out[layer]
        if kv_layout == "HND":
            pages = np.swapaxes(pages, 1, 2)
        for t, slot in enumerate(np.asarray(slots).tolist()):
            if 0 <= slot < pages.shape[0] * pages.shape[1]:
                pages[slot // pages.shape[1], slot % pages.shape[1]] = np.asarray(rows)[t]
        return out

    return write(k_pages, k), write(v_pages, v)


def _listed(layout: Any, row: int, num_pages: int, size: int) -> tuple[list[Any], Array]:
    """For each KV token of the row: its index in K and V (None: not readable), and its position."""
    where: list[Any] = []
    pos: list[int] = []
    for j in range(int(layout.kv_len[row])):
        position = int(layout.kv_offset[row]) + j
        if layout.contiguous:
            token = int(layout.kv_start[row]) + j
            where.append(token if 0 <= token < size else None)
        else:
            block = int(layout.kv_start[row]) + j // layout.page_size
            page, offset = int(layout.kv_indices[block]), j % layout.page_size
            where.append((page, offset) if 0 <= page < min(num_pages, size) else None)
            if layout.block_pos is not None:
                position = int(layout.block_pos[block]) + offset
        pos.append(position)
    return where, np.array(pos, np.int64)


def _visible(variant: Any, q_pos: int, kv_pos: Array) -> Array:
    see = np.ones(len(kv_pos), bool)
    if variant.causal:
        see &= kv_pos <= q_pos
    if variant.window_left is not None:
        see &= kv_pos >= q_pos - variant.window_left
    if variant.window_right is not None:
        see &= kv_pos <= q_pos + variant.window_right
    return see


def _mask_row(variant: Any, row: int, i: int, kv_len: int) -> Array:
    """Row i of a BSR row's custom mask, bool [kv_len]."""
    first = i * kv_len
    out = np.zeros(kv_len, bool)
    for j in range(kv_len):
        bit = first + j
        byte = int(np.asarray(variant.mask_bits)[int(np.asarray(variant.mask_indptr)[row]) + bit // 8])
        out[j] = (byte >> (bit % 8)) & 1
    return out
