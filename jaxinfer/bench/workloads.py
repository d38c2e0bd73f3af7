"""What the benchmarks run on: shapes as data, and the random batches made from them. No timing, no peers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import jaxinfer
from jaxinfer.layout import BlockSparse

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DecodeShape:
    """One query token per request, every request with the same number of cached KV tokens."""

    batch: int
    kv_len: int
    num_qo_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Short label for tables and plots."""
        return f"B {self.batch} x {self.kv_len}"

    @property
    def pages_per_request(self) -> int:
        """Pages that hold `kv_len` tokens."""
        return -(-self.kv_len // self.page_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a decode step must read once."""
        itemsize = 4 if self.dtype == "float32" else 2
        return 2 * self.batch * self.kv_len * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class DecodeBatch:
    """Random operands of one decode step, on the host in float32 except the integer tables."""

    shape: DecodeShape
    q: npt.NDArray[np.float32]  # [batch, num_qo_heads, head_dim]
    k_pages: npt.NDArray[np.float32]  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: npt.NDArray[np.float32]  # as k_pages
    block_table: Ints  # [batch, pages_per_request], a permutation of all pages
    kv_len: Ints  # [batch]
    layout: BlockSparse


def decode_batch(shape: DecodeShape, seed: int = 0) -> DecodeBatch:
    """Normal data in shuffled pages, so that neither side profits from neighbouring pages."""
    rng = np.random.default_rng(seed)
    num_pages = shape.batch * shape.pages_per_request
    pool = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    table = rng.permutation(num_pages).astype(np.int32).reshape(shape.batch, shape.pages_per_request)
    kv_len = np.full(shape.batch, shape.kv_len, np.int32)
    layout = jaxinfer.from_block_table(
        table, kv_len, np.arange(shape.batch + 1, dtype=np.int32), shape.page_size, num_pages=num_pages
    )
    return DecodeBatch(
        shape,
        rng.standard_normal((shape.batch, shape.num_qo_heads, shape.head_dim), np.float32),
        rng.standard_normal(pool, np.float32),
        rng.standard_normal(pool, np.float32),
        table,
        kv_len,
        layout,
    )


@dataclass(frozen=True)
class PlanShape:
    """A serving step to plan: a few requests prefill a chunk, all others decode, lengths are skewed."""

    requests: int
    prefill_requests: int
    prefill_tokens: int = 128
    max_kv_len: int = 4096
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        """Short label for tables."""
        return f"{self.requests} requests, {self.prefill_requests} of them prefill {self.prefill_tokens}"


@dataclass(frozen=True)
class PlanArrays:
    """Arguments of `jaxinfer.paged` for one step."""

    qo_indptr: Ints  # [requests + 1]
    kv_indptr: Ints  # [requests + 1]
    kv_indices: Ints  # [pages in use]
    kv_len: Ints  # [requests]


def plan_arrays(shape: PlanShape, seed: int = 0) -> PlanArrays:
    """KV lengths are log-uniform in [16, max_kv_len]: most requests short, a few long."""
    rng = np.random.default_rng(seed)
    q_len = np.ones(shape.requests, np.int32)
    q_len[: shape.prefill_requests] = shape.prefill_tokens
    longest = np.log2(shape.max_kv_len)
    kv_len = np.exp2(rng.uniform(4.0, longest, shape.requests)).astype(np.int32)
    kv_len = np.maximum(kv_len, q_len)
    pages = -(-kv_len // shape.page_size)
    kv_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    kv_indices = rng.permutation(int(kv_indptr[-1])).astype(np.int32)
    qo_indptr = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    return PlanArrays(qo_indptr, kv_indptr, kv_indices, kv_len)


#: What `bench decode` on a CPU measures when nothing is given, with the defaults of DecodeShape.
DECODE_BATCHES, DECODE_KV_LENS = (1, 4, 16), (64, 1024, 4096)
#: What `bench plan` measures when no size is given.
PLAN_SHAPES = (PlanShape(128, 0), PlanShape(128, 8), PlanShape(2048, 0), PlanShape(2048, 16))
