"""Rows of the tables against other libraries (`bench decode` on a GPU, `bench prefill`): lengths as data, operands.

No timing, no peers. A new row is one `Case` in CASES.
"""

from __future__ import annotations

import functools
import math
import re
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
#: Each set is one more call in a compiled program; 96 sets of the smallest row are 400 MB.
MAX_SETS = {"gpu": 96, "cpu": 3}
#: Query tokens per request that are compared with the reference.
CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One row: attention of the last `q_len[r]` of `kv_len[r]` tokens of each request."""

    name: str
    kind: str  # "decode" or "prefill"
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int | None = 16  # None: contiguous K and V
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int | None = None  # None: head_dim
    causal: bool = True
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
    def skewed(self) -> bool:
        """Most requests are short, few are very long."""
        return max(self.kv_len) * self.batch > 4 * sum(self.kv_len)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of q and K, of V and the output."""
        return self.head_dim, self.head_dim_vo or self.head_dim

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, K and V."""
        qk, vo = self.head_dims
        if self.page_size is None:
            pool: tuple[int, ...] = (sum(self.kv_len), self.num_kv_heads)
        else:
            pool = (sum(-(-n // self.page_size) for n in self.kv_len), self.page_size, self.num_kv_heads)
        return (sum(self.q_len), self.num_qo_heads, qk), (*pool, qk), (*pool, vo)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        return sum(self.kv_len) * self.num_kv_heads * sum(self.head_dims) * jnp.dtype(self.dtype).itemsize

    @property
    def q_bytes(self) -> int:
        return sum(self.q_len) * self.num_qo_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Of the two matrix products, where causal, under the mask only."""
        hidden = sum(q * (q - 1) // 2 for q in self.q_len) if self.causal else 0
        pairs = sum(q * kv for q, kv in zip(self.q_len, self.kv_len, strict=True)) - hidden
        return 2 * self.num_qo_heads * sum(self.head_dims) * pairs

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
_DENSE: dict[str, Any] = {"page_size": None}
_PAGE_1: dict[str, Any] = {"page_size": 1}
_FULL: dict[str, Any] = {"causal": False}
_D64: dict[str, Any] = {"head_dim": 64}
_D256: dict[str, Any] = {"head_dim": 256, "num_qo_heads": 16, "num_kv_heads": 4}
_D192: dict[str, Any] = {"head_dim": 192, "head_dim_vo": 128, "num_kv_heads": 32}
_UNIFORM_16, _SKEWED_16 = uniform_lengths(16, 512, 1024), skewed_lengths(16, 1024)
#: In the order in which they run: what a run is too short for is at the end.
CASES = (
    decode_case("B64x2048", (2048,) * 64),
    decode_case("skewed-B64", skewed_lengths(64, 2048)),
    decode_case("B128x1024", (1024,) * 128),
    decode_case("skewed-B128", skewed_lengths(128, 1024)),
    decode_case("B16x4096", (4096,) * 16),
    decode_case("B64x8192", (8192,) * 64),
    decode_case("B1x8192", (8192,)),
    decode_case("B1x1024", (1024,)),
    decode_case("skewed-B16", _SKEWED_16),
    decode_case("uniform-B16", _UNIFORM_16),
    decode_case("B1x32768", (32768,)),
    decode_case("B1x131072", (131072,)),
    prefill_case("B4x4096", 4, 4096, **_DENSE),
    prefill_case("B4x4096-page16", 4, 4096),
    prefill_case("B4x4096-page1", 4, 4096, **_PAGE_1),
    prefill_case("B1x16384", 1, 16384, **_DENSE),
    prefill_case("B1x16384-page16", 1, 16384),
    prefill_case("B1x16384-page1", 1, 16384, **_PAGE_1),
    prefill_case("B8x1024", 8, 1024, **_DENSE),
    prefill_case("B8x1024-page16", 8, 1024),
    prefill_case("B16x1024", 16, 1024, **_DENSE),
    prefill_case("B16x1024-page16", 16, 1024),
    Case("uniform-B16-page16", "prefill", _UNIFORM_16, _UNIFORM_16),
    Case("skewed-B16-page16", "prefill", _SKEWED_16, _SKEWED_16),
    prefill_case("chunk512-of-8192", 16, 8192, 512, **_DENSE),
    prefill_case("chunk512-of-8192-page16", 16, 8192, 512),
    prefill_case("D64", 4, 4096, **_D64, **_DENSE),
    prefill_case("D64-page16", 4, 4096, **_D64),
    prefill_case("D256", 4, 4096, **_D256, **_DENSE),
    prefill_case("D256-page16", 4, 4096, **_D256),
    prefill_case("D192x128", 4, 4096, **_D192, **_DENSE),
    prefill_case("B1x16384-full", 1, 16384, **_FULL, **_DENSE),
    prefill_case("B1x16384-full-page16", 1, 16384, **_FULL),
    prefill_case("B1x16384-full-page1", 1, 16384, **_FULL, **_PAGE_1),
    prefill_case("D64-full", 4, 4096, **_D64, **_FULL, **_DENSE),
    prefill_case("D256-full", 4, 4096, **_D256, **_FULL, **_DENSE),
    prefill_case("B1x512", 1, 512, platforms=("cpu",), **_ON_CPU),
    prefill_case("B4x256", 4, 256, platforms=("cpu",), **_ON_CPU),
)


def select(
    kind: str, platform: str, names: list[str] | None = None, page_size: int | None = None
) -> list[Case]:
    """The rows of a table, `names` of them; `page_size` replaces that of paged rows, in their names too.

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
    paged = [
        c
        if c.page_size is None
        else replace(c, page_size=page_size, name=re.sub(r"-page\d+$", f"-page{page_size}", c.name))
        for c in chosen
    ]
    return list({case.name: case for case in paged}.values())


@dataclass(frozen=True)
class Operands:
    """A case's operands on the device, in several sets that share tables and lengths."""

    case: Case
    #: q [tokens, num_qo_heads, head_dim]; k and v [num_pages, page_size, num_kv_heads, head_dim] or contiguous
    #: [kv_tokens, num_kv_heads, head_dim]; v with head_dim_vo.
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


def make_layout(case: Case, seed: int = 0) -> BlockSparse:
    """The case's rows; pages shuffled, so that nobody profits from neighbouring ones."""
    qo_indptr = np.cumsum((0, *case.q_len), dtype=np.int32)
    if case.page_size is None:
        return jaxinfer.ragged(qo_indptr, np.cumsum((0, *case.kv_len), dtype=np.int32))
    pages = [-(-n // case.page_size) for n in case.kv_len]
    kv_indptr = np.cumsum((0, *pages), dtype=np.int32)
    indices = np.random.default_rng(seed).permutation(int(kv_indptr[-1])).astype(np.int32)
    return jaxinfer.paged(qo_indptr, kv_indptr, indices, np.array(case.kv_len, np.int32), case.page_size)


def make_operands(case: Case, seed: int = 0) -> Operands:
    """Normal data and the case's layout."""
    layout = make_layout(case, seed)
    qo_indptr = np.cumsum((0, *case.q_len), dtype=np.int32)
    if case.page_size is None:
        kv_indptr, indices = np.cumsum((0, *case.kv_len), dtype=np.int32), np.zeros(0, np.int32)
    else:
        indices = np.asarray(layout.kv_indices)
        kv_indptr = np.append(np.asarray(layout.kv_start), indices.size).astype(np.int32)
    largest = max(map(math.prod, case.shapes))
    bits = (largest + _NOISE_OFFSETS).bit_length()
    noise = _noise(1 << (bits + bits % 2), case.dtype, seed)  # few sizes: each compiles a generator
    draw = jax.jit(
        lambda noise, at, shape: jax.lax.dynamic_slice(noise, (at,), (math.prod(shape),)).reshape(shape),
        static_argnums=2,
    )
    sets = [
        tuple(draw(noise, at, shape) for at, shape in zip(row, case.shapes, strict=True))
        for row in np.random.default_rng(seed).integers(0, _NOISE_OFFSETS, (case.num_sets, 3), np.int32)
    ]
    return Operands(case, sets, qo_indptr, kv_indptr, indices, layout)


#: Operands are slices of one array of normal numbers that begin at an offset below this.
_NOISE_OFFSETS = 1 << 16


@functools.cache
def _noise(count: int, dtype: str, seed: int) -> jax.Array:
    """Drawing each operand anew would compile a generator per shape."""
    return jax.random.normal(jax.random.key(seed), (count,), jnp.dtype(dtype))


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
    """The first set's result at `tokens`, [batch, tokens, num_qo_heads, head_dim_vo]: float32 over gathered K, V."""
    case = ops.case
    longest = max(case.kv_len)
    at = np.arange(longest, dtype=np.int32)
    if case.page_size is None:
        slots = np.minimum(ops.kv_indptr[:-1, None] + at, ops.kv_indptr[-1] - 1)
    else:
        slots = ops.block_table()[:, at // case.page_size] * case.page_size + at % case.page_size
    q_len, kv_len = (np.array(x, np.int32) for x in (case.q_len, case.kv_len))
    last = (kv_len - q_len - ops.qo_indptr[:-1])[:, None] + tokens  # the last KV token that each one sees
    if not case.causal:
        last = np.broadcast_to(kv_len[:, None] - 1, last.shape)
    group = case.num_qo_heads // case.num_kv_heads

    @jax.jit
    def compute(q: Any, k: Any, v: Any, slots: Any, tokens: Any, last: Any) -> Any:
        k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))

        def request(operands: Any) -> Any:
            slots, tokens, last = operands
            kk, vv, qq = (x.astype(jnp.float32) for x in (k[slots], v[slots], q[tokens]))
            qq = qq.reshape(-1, case.num_kv_heads, group, case.head_dim) / math.sqrt(case.head_dim)
            logits = jnp.einsum("thgd,lhd->thgl", qq, kk, precision="highest")
            weights = jax.nn.softmax(jnp.where(at <= last[:, None, None, None], logits, -jnp.inf), axis=-1)
            o = jnp.einsum("thgl,lhd->thgd", weights, vv, precision="highest")
            return o.reshape(-1, case.num_qo_heads, o.shape[-1])

        return jax.lax.map(request, (slots, tokens, last))

    return np.asarray(compute(*ops.sets[0], slots, tokens, last))
