"""Rows of the tables against other libraries (`bench decode` on a GPU, `bench prefill`): lengths as data, operands.

No timing, no peers. A new row is one `Case` in CASES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jaxinfer
from jaxinfer.layout import BlockSparse

Ints = npt.NDArray[np.int32]
#: K, V and q of all rotated sets together: several times the largest L2 cache, so that no call finds its data there,
#: and for decode enough work per dispatch to hide what a dispatch costs the host.
ROTATED_BYTES = {"decode": 1200 << 20, "prefill": 400 << 20}
#: Each set is one more call in a compiled program.
MAX_SETS = {"gpu": 36, "cpu": 3}
#: Query tokens per request that are compared with the reference.
CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One row: causal attention of the last `q_len[r]` of `kv_len[r]` tokens of each request."""

    name: str
    kind: str  # "decode" or "prefill"
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int | None = 16  # None: contiguous K and V
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    platforms: tuple[str, ...] = ("gpu",)

    @property
    def batch(self) -> int:
        return len(self.kv_len)

    @property
    def whole(self) -> bool:
        """All requests have the same length and all their tokens are queries."""
        return self.q_len == self.kv_len and len(set(self.kv_len)) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        return 2 * sum(self.kv_len) * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def q_bytes(self) -> int:
        return sum(self.q_len) * self.num_qo_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Of the two matrix products, under the causal mask only."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_len, self.kv_len, strict=True))
        return 4 * self.num_qo_heads * self.head_dim * pairs

    @property
    def rate(self) -> tuple[float, str]:
        """What a second is measured in: decode moves K and V, prefill multiplies."""
        return (self.kv_bytes / 1e12, "TB/s") if self.kind == "decode" else (self.flops / 1e12, "TFLOP/s")

    @property
    def num_sets(self) -> int:
        """Sets of operands that calls rotate through."""
        wanted = math.ceil(ROTATED_BYTES[self.kind] / (self.kv_bytes + self.q_bytes))
        return min(wanted, MAX_SETS[self.platforms[0]])


def skewed_lengths(batch: int, mean: int, longest: int = 32768) -> tuple[int, ...]:
    """Zipf-distributed lengths (exponent 1.5), scaled to the mean, clipped to [16, longest]: few long, most short."""
    draws = np.random.default_rng(1).zipf(1.5, 8 * batch).astype(np.float64)
    draws = draws[draws < 1000][:batch]
    lengths = np.maximum(16, (draws / draws.mean() * mean).astype(np.int64))
    return tuple(int(n) for n in np.minimum(lengths, longest))


def uniform_lengths(batch: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths drawn from [low, high]."""
    return tuple(int(n) for n in np.random.default_rng(1).integers(low, high + 1, batch))


def decode_case(name: str, kv_len: tuple[int, ...], **options: Any) -> Case:
    return Case(name, "decode", (1,) * len(kv_len), kv_len, **options)


def prefill_case(name: str, batch: int, length: int, chunk: int | None = None, **options: Any) -> Case:
    """`chunk=None`: every token is a query."""
    return Case(name, "prefill", (chunk or length,) * batch, (length,) * batch, **options)


_ON_CPU: dict[str, Any] = {
    "page_size": None,
    "head_dim": 32,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "dtype": "float32",
}
CASES = (
    decode_case("B1x8192", (8192,)),
    decode_case("B16x4096", (4096,) * 16),
    decode_case("B64x2048", (2048,) * 64),
    decode_case("B128x1024", (1024,) * 128),
    decode_case("B64x8192", (8192,) * 64),
    decode_case("uniform-B16", uniform_lengths(16, 512, 1024)),
    decode_case("skewed-B16", skewed_lengths(16, 1024)),
    decode_case("skewed-B64", skewed_lengths(64, 2048)),
    decode_case("skewed-B128", skewed_lengths(128, 1024)),
    prefill_case("B4x4096", 4, 4096, page_size=None),
    prefill_case("B4x4096-page16", 4, 4096),
    prefill_case("B1x16384", 1, 16384, page_size=None),
    prefill_case("B8x1024", 8, 1024, page_size=None),
    prefill_case("chunk512-of-8192", 16, 8192, 512),
    prefill_case("D64", 4, 4096, page_size=None, head_dim=64),
    prefill_case("D256", 4, 4096, page_size=None, head_dim=256, num_qo_heads=16),
    prefill_case("B1x512", 1, 512, platforms=("cpu",), **_ON_CPU),
    prefill_case("B4x256", 4, 256, platforms=("cpu",), **_ON_CPU),
)


def select(
    kind: str, platform: str, names: list[str] | None = None, page_size: int | None = None
) -> list[Case]:
    """The rows of a table, `names` of them; `page_size` replaces that of paged rows.

    Raises:
      ValueError: a name is unknown; lists the known ones.
    """
    known = {case.name: case for case in CASES if case.kind == kind and platform in case.platforms}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--rows: no {kind} row {name!r} on {platform}; there are {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    if page_size is None:
        return chosen
    return [c if c.page_size is None else replace(c, page_size=page_size) for c in chosen]


@dataclass(frozen=True)
class Operands:
    """A case's operands on the device, in several sets that share tables and lengths."""

    case: Case
    #: q [tokens, num_qo_heads, head_dim]; k and v [num_pages, page_size, num_kv_heads, head_dim] or contiguous
    #: [kv_tokens, num_kv_heads, head_dim].
    sets: list[tuple[jax.Array, jax.Array, jax.Array]]
    qo_indptr: Ints  # [batch + 1]
    kv_indptr: Ints  # [batch + 1]; in pages, or in tokens where contiguous
    kv_indices: Ints  # [pages], a permutation; empty where contiguous
    layout: BlockSparse

    def block_table(self, multiple: int = 1) -> Ints:
        """[batch, pages of the longest request, rounded up to `multiple`]; 0 behind a request's pages."""
        pages = np.diff(self.kv_indptr)
        table = np.zeros((len(pages), -(-int(pages.max()) // multiple) * multiple), np.int32)
        for r, count in enumerate(pages):
            table[r, :count] = self.kv_indices[self.kv_indptr[r] : self.kv_indptr[r + 1]]
        return table


def make_operands(case: Case, seed: int = 0) -> Operands:
    """Normal data, pages shuffled, so that nobody profits from neighbouring pages."""
    rng = np.random.default_rng(seed)
    qo_indptr = np.cumsum((0, *case.q_len), dtype=np.int32)
    if case.page_size is None:
        kv_indptr, indices = np.cumsum((0, *case.kv_len), dtype=np.int32), np.zeros(0, np.int32)
        layout = jaxinfer.ragged(qo_indptr, kv_indptr)
        pool: tuple[int, ...] = (int(kv_indptr[-1]), case.num_kv_heads, case.head_dim)
    else:
        pages = [-(-n // case.page_size) for n in case.kv_len]
        kv_indptr = np.cumsum((0, *pages), dtype=np.int32)
        indices = rng.permutation(int(kv_indptr[-1])).astype(np.int32)
        layout = jaxinfer.paged(
            qo_indptr, kv_indptr, indices, np.array(case.kv_len, np.int32), case.page_size
        )
        pool = (indices.size, case.page_size, case.num_kv_heads, case.head_dim)
    shapes = ((int(qo_indptr[-1]), case.num_qo_heads, case.head_dim), pool, pool)
    keys = jax.random.split(jax.random.key(seed), (case.num_sets, 3))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    sets = [
        tuple(draw(key, shape, jnp.dtype(case.dtype)) for key, shape in zip(row, shapes, strict=True))
        for row in keys
    ]
    return Operands(case, sets, qo_indptr, kv_indptr, indices, layout)


def checked_tokens(ops: Operands) -> Ints:
    """[batch, tokens] indices of query tokens to compare: each request's first and last ones, others at random."""
    rng = np.random.default_rng(7)
    width = min(CHECKED_TOKENS, max(ops.case.q_len))
    rows = []
    for begin, n in zip(ops.qo_indptr, ops.case.q_len, strict=False):
        at = np.sort(rng.choice(n, width, replace=n < width))
        at[0], at[-1] = 0, n - 1
        rows.append(begin + at)
    return np.array(rows, np.int32)


def expected_tokens(ops: Operands, tokens: Ints) -> npt.NDArray[np.float32]:
    """The first set's result at `tokens`, [batch, tokens, num_qo_heads, head_dim]: float32 over gathered K, V."""
    case = ops.case
    longest = max(case.kv_len)
    at = np.arange(longest, dtype=np.int32)
    if case.page_size is None:
        slots = np.minimum(ops.kv_indptr[:-1, None] + at, ops.kv_indptr[-1] - 1)
    else:
        slots = ops.block_table()[:, at // case.page_size] * case.page_size + at % case.page_size
    q_len, kv_len = (np.array(x, np.int32) for x in (case.q_len, case.kv_len))
    last = (kv_len - q_len - ops.qo_indptr[:-1])[:, None] + tokens  # the last KV token that each one sees
    group = case.num_qo_heads // case.num_kv_heads

    @jax.jit
    def compute(q: Any, k: Any, v: Any, slots: Any, tokens: Any, last: Any) -> Any:
        k, v = (x.reshape(-1, case.num_kv_heads, case.head_dim) for x in (k, v))

        def request(operands: Any) -> Any:
            slots, tokens, last = operands
            kk, vv, qq = (x.astype(jnp.float32) for x in (k[slots], v[slots], q[tokens]))
            qq = qq.reshape(-1, case.num_kv_heads, group, case.head_dim) / math.sqrt(case.head_dim)
            logits = jnp.einsum("thgd,lhd->thgl", qq, kk, precision="highest")
            weights = jax.nn.softmax(jnp.where(at <= last[:, None, None, None], logits, -jnp.inf), axis=-1)
            o = jnp.einsum("thgl,lhd->thgd", weights, vv, precision="highest")
            return o.reshape(-1, case.num_qo_heads, case.head_dim)

        return jax.lax.map(request, (slots, tokens, last))

    return np.asarray(compute(*ops.sets[0], slots, tokens, last))
