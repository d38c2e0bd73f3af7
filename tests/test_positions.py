"""Positions at the ends of int32: what is seen does not depend on differences that int32 cannot hold. On every
tile, contiguous and paged, with positions of rows and of blocks. All queries are 0, so that o is the mean of what is
seen and lse the log of how many that are. Positions of ordinary size are for test_accuracy.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from backend import bounds, need_tile
from plan_executor import positions, visible

import jaxinfer
from jaxinfer import Variant

LEAST, MOST = -(2**31), 2**31 - 1
ENDS = (LEAST, LEAST + 1, -5, 0, 3, 50, MOST - 1, MOST)
KV_LENS, QO_HEADS, HEAD_DIM = (35, 0, 44, 136, 300), 4, 64
#: Query tokens of each row, by tile: some tiles are filled, some are not.
QUERIES = {1: 20, 16: 5, 64: 20, 128: 40, 192: 60}
KERNELS = [("float32", 1), *(("bfloat16", tile) for tile in QUERIES)]
RULES = [
    Variant(causal=True),
    Variant(causal=True, window_left=100),
    Variant(window_left=20, window_right=30),
    Variant(window_left=MOST, window_right=3),
]


def draw_layout(rng: np.random.Generator, page_size: int | None, tokens: int) -> jaxinfer.BlockSparse:
    """Rows of KV_LENS; pages in shuffled order, and None for contiguous K and V."""
    qo_indptr = np.arange(len(KV_LENS) + 1) * tokens
    if page_size is None:
        layout = jaxinfer.ragged(qo_indptr, np.cumsum([0, *KV_LENS]))
    else:
        kv_indptr = np.cumsum([0, *(-(-n // page_size) for n in KV_LENS)])
        indices = rng.permutation(kv_indptr[-1])
        layout = jaxinfer.paged(qo_indptr, kv_indptr, indices, KV_LENS, page_size)
    offsets = [rng.choice([LEAST, -3, 0, 20, MOST - max(n - 1, 0)]) for n in KV_LENS]
    q_pos = rng.choice(ENDS, qo_indptr[-1]).astype(np.int32)
    return dataclasses.replace(layout, q_pos=q_pos, kv_offset=np.array(offsets, np.int32))


def place_blocks(layout: jaxinfer.BlockSparse) -> jaxinfer.BlockSparse:
    """Half of each row's blocks at the least positions, the others at the largest."""
    size = layout.page_size
    block_pos = np.zeros(layout.kv_indices.size, np.int32)
    for begin, kv_len in zip(layout.kv_start, KV_LENS, strict=True):
        count = -(-kv_len // size)
        block = np.arange(count, dtype=np.int64)
        at = np.where(block < count // 2, LEAST + block * size, MOST + 1 - (count - block) * size)
        block_pos[begin : begin + count] = at
    return dataclasses.replace(layout, block_pos=block_pos)


def values_of(layout: jaxinfer.BlockSparse, v: Any, row: int) -> npt.NDArray[np.float64]:
    """[kv_len, head_dim]"""
    if layout.contiguous:
        return v[layout.kv_start[row] :, 0][: KV_LENS[row]].astype(np.float64)
    pages = layout.kv_indices[layout.kv_start[row] :][: -(-KV_LENS[row] // layout.page_size)]
    return v[pages, :, 0].reshape(-1, HEAD_DIM)[: KV_LENS[row]].astype(np.float64)


@pytest.mark.parametrize(("dtype", "tile"), KERNELS)
@pytest.mark.parametrize("variant", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("page_size", [None, 3, 16])
def test_ends_of_int32(page_size: int | None, variant: Variant, dtype: str, tile: int) -> None:
    need_tile(tile)
    rng = np.random.default_rng(tile)
    for blocks in (False,) if page_size is None else (False, True):
        layout = draw_layout(rng, page_size, QUERIES[tile])
        if blocks:
            layout = place_blocks(layout)
        shape = (sum(KV_LENS),) if page_size is None else (layout.kv_indices.size, page_size)
        k, v = rng.standard_normal((*shape, 1, HEAD_DIM)), rng.integers(-8, 9, (*shape, 1, HEAD_DIM))
        q = np.zeros((layout.num_tokens, QO_HEADS, HEAD_DIM))
        q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
        plan = jaxinfer.plan(
            layout, num_qo_heads=QO_HEADS, num_kv_heads=1, head_dim=HEAD_DIM, dtype=dtype, variant=variant,
            tiles=(tile,),
        )  # fmt: skip
        state = jaxinfer.attention(q, k, v, layout, plan, variant=variant, return_lse=True)
        want_o = np.zeros((layout.num_tokens, HEAD_DIM))
        want_lse = np.full(layout.num_tokens, -np.inf)
        for row in range(len(KV_LENS)):
            kv_pos, values = positions(layout, row, np.arange(KV_LENS[row])), values_of(layout, v, row)
            for token in range(layout.q_start[row], layout.q_start[row] + layout.q_len[row]):
                seen = visible(variant, layout.q_pos[token].astype(np.int64), kv_pos)
                if seen.any():
                    want_o[token] = values[seen].mean(axis=0)
                    want_lse[token] = np.log(seen.sum())
        assert np.isfinite(want_lse).any() and np.isneginf(want_lse).any()
        for head in range(QO_HEADS):
            lse = np.asarray(state.lse)[:, head].astype(np.float64)
            np.testing.assert_allclose(lse, want_lse, atol=1e-4)
            error = np.linalg.norm(np.asarray(state.o)[:, head].astype(np.float64) - want_o)
            assert error <= bounds()[dtype] * np.linalg.norm(want_o)
