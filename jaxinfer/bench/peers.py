"""Who takes part in `bench decode` on a CPU: one entry per way to compute the same step. Timing is in measure.py.

A new peer is one `Peer` in PEERS: a name and a function that prepares its call. Those of the tables for GPUs are in
rivals.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.bench.workloads import DecodeBatch

#: Norm-wise relative error against the reference that a result may have to be worth timing.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Peer:
    """One way to compute a decode step.

    `prepare` puts the operands on the device and returns a call without arguments whose result is o
    [batch, num_qo_heads, head_dim]. `compared`: a fair rival; else its ratio is shown in brackets, as information.
    """

    name: str
    prepare: Callable[[DecodeBatch], Callable[[], jax.Array]]
    compared: bool = True
    note: str = ""


def _put(batch: DecodeBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = jnp.dtype(batch.shape.dtype)
    return tuple(jnp.asarray(x, dtype) for x in (batch.q, batch.k_pages, batch.v_pages))  # type: ignore[return-value]


def _jaxinfer(batch: DecodeBatch) -> Callable[[], jax.Array]:
    shape = batch.shape
    q, k_pages, v_pages = _put(batch)
    plan = jaxinfer.plan(
        batch.layout,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        num_pages=k_pages.shape[0],
    )
    layout, plan = jax.device_put((batch.layout, plan))
    step = jax.jit(jaxinfer.attention)
    return lambda: step(q, k_pages, v_pages, layout, plan)


def _dot_product(q: jax.Array, k: jax.Array, v: jax.Array, kv_len: jax.Array | None) -> jax.Array:
    o = jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=kv_len)
    return o[:, 0]


def _lengths(batch: DecodeBatch) -> jax.Array | None:
    # Where the last page is full, the peer is spared the length mask that it would need for ragged batches.
    full = batch.shape.kv_len % batch.shape.page_size == 0
    return None if full else jnp.asarray(batch.kv_len)


def _dot_product_gathered(batch: DecodeBatch) -> Callable[[], jax.Array]:
    q, k_pages, v_pages = _put(batch)
    table, kv_len = jnp.asarray(batch.block_table), _lengths(batch)

    @jax.jit
    def step(
        q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table: jax.Array, kv_len: jax.Array | None
    ) -> jax.Array:
        rows = (q.shape[0], -1, *k_pages.shape[2:])
        return _dot_product(q, k_pages[table].reshape(rows), v_pages[table].reshape(rows), kv_len)

    return lambda: step(q, k_pages, v_pages, table, kv_len)


def _dot_product_dense(batch: DecodeBatch) -> Callable[[], jax.Array]:
    q, k_pages, v_pages = _put(batch)
    table, kv_len = jnp.asarray(batch.block_table), _lengths(batch)
    rows = (q.shape[0], -1, *k_pages.shape[2:])
    k, v = k_pages[table].reshape(rows), v_pages[table].reshape(rows)
    step = jax.jit(_dot_product)
    return lambda: step(q, k, v, kv_len)


OURS = "jaxinfer"
#: The first is ours; ratios are the others' time over ours.
PEERS = (
    Peer(OURS, _jaxinfer, note="jaxinfer.attention over the pages, the plan made beforehand"),
    Peer(
        "jax.nn, gathered pages",
        _dot_product_gathered,
        note="k_pages[block_table], then jax.nn.dot_product_attention, in one jit",
    ),
    Peer(
        "jax.nn, dense",
        _dot_product_dense,
        compared=False,
        note="jax.nn.dot_product_attention on a dense cache: information, it cannot page",
    ),
)


def expected_output(batch: DecodeBatch) -> np.ndarray[Any, np.dtype[Any]]:
    """What every peer must compute: numpy in float64 on the operands as rounded to the batch's dtype."""
    dtype = jnp.dtype(batch.shape.dtype)
    q, k_pages, v_pages = (
        np.asarray(x).astype(dtype).astype(np.float64) for x in (batch.q, batch.k_pages, batch.v_pages)
    )
    shape = batch.shape
    group = shape.num_qo_heads // shape.num_kv_heads
    out = np.empty(q.shape, np.float64)
    for r in range(shape.batch):
        n = int(batch.kv_len[r])
        k, v = (x[batch.block_table[r]].reshape(-1, *x.shape[2:])[:n] for x in (k_pages, v_pages))
        heads = q[r].reshape(shape.num_kv_heads, group, shape.head_dim)
        logits = np.einsum("hgd,nhd->hgn", heads, k) / math.sqrt(shape.head_dim)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[r] = np.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape[1:])
    return out


def check_output(
    name: str, batch: DecodeBatch, result: jax.Array, expected: np.ndarray[Any, np.dtype[Any]]
) -> float:
    """Norm-wise relative error of a peer's result; ValueError where it is not worth timing."""
    got = np.asarray(result).astype(np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"{name}, {batch.shape.name}: got shape {got.shape}, expected {expected.shape}")
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    limit = TOLERANCE[batch.shape.dtype]
    if not error < limit:
        raise ValueError(
            f"{name}, {batch.shape.name}: relative error {error:.2e}, expected below {limit:.0e}"
        )
    return error
