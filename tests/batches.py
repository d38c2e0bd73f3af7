"""Batches written token by token, put into poisoned pools of any storage and run through any implementation.

For tests that state their numbers by hand. Random cases are made by cases.py, expected values of random
inputs come from oracle.py; nothing here computes attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close

import jaxinfer
from jaxinfer import AttentionState, BlockSparse, Plan, Variant

#: Page ids and slots that must never be followed.
ABSURD = (2147480000, -2147480000, 2147483647, -1)


@dataclass(frozen=True)
class Way:
    """Where K and V lie and who computes."""

    storage: str  # "NHD", "HND" or "contiguous"
    implementation: str | None

    def __str__(self) -> str:
        return f"{self.implementation or 'engine'}-{self.storage}"

    @property
    def kv_layout(self) -> str:
        return "HND" if self.storage == "HND" else "NHD"


ENGINE = tuple(Way(s, None) for s in ("NHD", "HND", "contiguous"))
REFERENCE = tuple(Way(s, "reference") for s in ("NHD", "HND", "contiguous"))
#: The reference compiles slowly: tests of unusual shapes run it on one storage, the others on all.
every_way = pytest.mark.parametrize("way", (*ENGINE, REFERENCE[0]), ids=str)
every_way_and_storage = pytest.mark.parametrize("way", ENGINE + REFERENCE, ids=str)
every_paged_way = pytest.mark.parametrize("way", (*ENGINE[:2], REFERENCE[0]), ids=str)


def engine_for_all(names: str, values: Sequence[Any], *, storages: Sequence[Way] = ENGINE) -> Any:
    """Parametrizes "way" and `names`: the engine with every value, the reference with the first."""

    def entry(way: Way, value: Any) -> Any:
        return (way, *value) if "," in names else (way, value)

    entries = [entry(way, value) for value in values for way in storages] + [entry(REFERENCE[0], values[0])]
    return pytest.mark.parametrize(f"way,{names}", entries, ids=lambda x: str(x))


def attend(*args: Any, implementation: str | None = None, **options: Any) -> Any:
    """`jaxinfer.attention` compiled once per shape for all tests of a process."""
    return (_attend_reference if implementation == "reference" else _attend_engine)(*args, **options)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: BlockSparse,
    plan: Plan,
    variant: Variant,
    layer: jax.Array | None = None,
    *,
    sm_scale: float | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = True,
    implementation: str | None,
) -> Any:
    return jaxinfer.attention(
        q,
        k,
        v,
        layout,
        plan,
        variant=variant,
        sm_scale=sm_scale,
        layer=layer,
        kv_layout=kv_layout,
        return_lse=return_lse,
        implementation=implementation,
    )


_STATIC = ("sm_scale", "kv_layout", "return_lse")
_attend_engine = jax.jit(functools.partial(_attend, implementation=None), static_argnames=_STATIC)
# Half the compile time; the batches are small.
_attend_reference = jax.jit(
    functools.partial(_attend, implementation="reference"),
    static_argnames=_STATIC,
    compiler_options={"xla_backend_optimization_level": 0},
)


@dataclass(frozen=True)
class Stored:
    """What a call needs: packed queries, K and V in their storage, and the layout."""

    q: np.ndarray[Any, Any]
    k: np.ndarray[Any, Any]
    v: np.ndarray[Any, Any]
    layout: BlockSparse


def store(
    way: Way,
    q: Sequence[np.ndarray[Any, Any]],
    k: Sequence[np.ndarray[Any, Any]],
    v: Sequence[np.ndarray[Any, Any]],
    *,
    page_size: int = 4,
    num_tokens: int | None = None,
    poison_k: float = np.nan,
    poison_v: float = np.nan,
    seed: int = 0,
    dtype: Any = np.float32,
) -> Stored:
    """Requests' q [q_len, heads, dim], k, v [kv_len, heads, dim] in shuffled pages of a poisoned pool.

    Page 0 belongs to nobody, entries behind the used table are absurd, queries behind the last request NaN.
    """
    q_len, kv_len = [x.shape[0] for x in q], [x.shape[0] for x in k]
    qo_indptr = np.cumsum([0, *q_len])
    n = int(qo_indptr[-1]) if num_tokens is None else num_tokens
    heads = q[0].shape[1:]
    queries = np.full((n, *heads), np.nan, dtype)
    queries[: qo_indptr[-1]] = np.concatenate(q)
    if way.storage == "contiguous":
        tail = 3
        kv_indptr = np.cumsum([0, *kv_len])
        layout = jaxinfer.ragged(qo_indptr, kv_indptr, num_kv_tokens=int(kv_indptr[-1]) + tail, num_tokens=n)
        k_all = np.concatenate([*k, np.full((tail, *k[0].shape[1:]), poison_k)]).astype(dtype)
        v_all = np.concatenate([*v, np.full((tail, *v[0].shape[1:]), poison_v)]).astype(dtype)
        return Stored(queries, k_all, v_all, layout)
    blocks = [-(-m // page_size) for m in kv_len]
    num_pages = sum(blocks) + 2
    ids = np.random.default_rng(seed).permutation(np.arange(1, num_pages))[: sum(blocks)]
    kv_indptr = np.cumsum([0, *blocks])
    table = np.concatenate([ids, ABSURD]).astype(np.int32)
    layout = jaxinfer.paged(qo_indptr, kv_indptr, table, kv_len, page_size, num_tokens=n, num_pages=num_pages)
    pools = []
    for rows, poison in ((k, poison_k), (v, poison_v)):
        pool = np.full((num_pages, page_size, *rows[0].shape[1:]), poison, dtype)
        for r, x in enumerate(rows):
            for j in range(x.shape[0]):
                pool[ids[kv_indptr[r] + j // page_size], j % page_size] = x[j]
        pools.append(pool.swapaxes(1, 2) if way.storage == "HND" else pool)
    return Stored(queries, pools[0], pools[1], layout)


def run(
    way: Way,
    stored: Stored,
    *,
    variant: Variant | None = None,
    sm_scale: float | None = None,
    **plan_options: Any,
) -> AttentionState:
    """Plans and runs one call; o and lse as numpy (o keeps its dtype)."""
    variant = Variant() if variant is None else variant
    n = stored.q.shape[0]
    if way.implementation == "reference" and n > 0:
        stored, variant = _in_capacity_bucket(stored, variant)
    plan = make_plan(way, stored, variant, **plan_options)
    state = attend(
        jnp.asarray(stored.q),
        jnp.asarray(stored.k),
        jnp.asarray(stored.v),
        stored.layout,
        plan,
        variant,
        sm_scale=sm_scale,
        kv_layout=way.kv_layout,
        return_lse=variant.softmax,
        implementation=way.implementation,
    )
    if not variant.softmax:
        return AttentionState(np.asarray(state)[:n], np.zeros(0, np.float32))
    assert not np.asarray(state.o)[n:].any()
    assert np.isneginf(state.lse[n:]).all()
    return AttentionState(np.asarray(state.o)[:n], np.asarray(state.lse)[:n])


def _in_capacity_bucket(stored: Stored, variant: Variant) -> tuple[Stored, Variant]:
    """More padding, so that batches of different lengths share a compiled program."""

    def more(x: Any, fill: Any) -> np.ndarray[Any, Any]:
        size = next(b for b in (64, 512, 4096, 32768, 262144) if b >= x.shape[0])
        return np.concatenate([x, np.full((size - x.shape[0], *x.shape[1:]), fill, x.dtype)])

    a = stored.layout
    k, v = more(stored.k, np.nan), more(stored.v, np.nan)
    layout = dataclasses.replace(
        a,
        q_start=more(a.q_start, a.num_tokens),
        **{name: more(getattr(a, name), 0) for name in ("q_len", "kv_start", "kv_len", "kv_offset", "q_pos")},
        kv_indices=a.kv_indices if a.contiguous else more(a.kv_indices, ABSURD[0]),
    )
    capacity = k.shape[0] if a.contiguous else layout.kv_indices.shape[0] * a.page_size
    layout = dataclasses.replace(layout, kv_capacity=capacity)
    if variant.mask_bits is not None and variant.mask_indptr is not None:
        bits, indptr = np.asarray(variant.mask_bits), np.asarray(variant.mask_indptr)
        ends = np.full(layout.num_rows + 1 - indptr.size, indptr[-1], np.int32)
        variant = dataclasses.replace(
            variant, mask_bits=more(bits, 255), mask_indptr=np.concatenate([indptr, ends])
        )
    return Stored(more(stored.q, np.nan), k, v, layout), variant


def make_plan(way: Way, stored: Stored, variant: Variant, **plan_options: Any) -> Plan:
    """The plan for `stored`, page ids checked against the pool."""
    return jaxinfer.plan(
        stored.layout,
        num_qo_heads=stored.q.shape[1],
        num_kv_heads=stored.k.shape[1] if way.storage in ("HND", "contiguous") else stored.k.shape[2],
        head_dim=(stored.k.shape[-1], stored.v.shape[-1]),
        dtype=stored.q.dtype,
        variant=variant,
        num_pages=stored.k.shape[0],
        **plan_options,
    )


def zero_queries(
    q_len: Sequence[int],
    kv_len: Sequence[int],
    num_qo_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 16,
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """q = 0, any k, v[j, h, :] = j + 1000 h: o is the mean visible index, lse the log of the count."""
    rng = np.random.default_rng(7)
    q = [np.zeros((n, num_qo_heads, head_dim), np.float32) for n in q_len]
    k = [rng.standard_normal((n, num_kv_heads, head_dim)).astype(np.float32) for n in kv_len]
    v = []
    for n in kv_len:
        x = np.arange(n)[:, None, None] + 1000.0 * np.arange(num_kv_heads)[None, :, None]
        v.append(np.broadcast_to(x, (n, num_kv_heads, head_dim)).astype(np.float32))
    return q, k, v


def random_requests(
    q_len: Sequence[int],
    kv_len: Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int = 1,
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Standard normal q, k and v, float32."""
    rng = np.random.default_rng(seed)

    def draw(n: int, heads: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal((n, heads, head_dim)).astype(np.float32)

    return (
        [draw(n, num_qo_heads) for n in q_len],
        [draw(n, num_kv_heads) for n in kv_len],
        [draw(n, num_kv_heads) for n in kv_len],
    )


def expect_visible(
    state: AttentionState, visible: Sequence[Sequence[int] | range], num_kv_heads: int = 1
) -> None:
    """`state` of `zero_queries` when token t sees the KV tokens `visible[t]`; beyond them, padding."""
    num_tokens, num_qo_heads, _ = state.o.shape
    group = num_qo_heads // num_kv_heads
    for t in range(num_tokens):
        seen = list(visible[t]) if t < len(visible) else []
        for h in range(num_qo_heads):
            if not seen:
                assert not state.o[t, h].any(), f"token {t} head {h} sees nothing: o is {state.o[t, h, 0]}"
                assert np.isneginf(state.lse[t, h]), (
                    f"token {t} head {h} sees nothing: lse is {state.lse[t, h]}"
                )
                continue
            want = np.mean(seen) + 1000.0 * (h // group)
            assert_close(state.o[t, h], want, rtol=2e-6, atol=1e-6, err_msg=f"o of token {t} head {h}")
            assert_close(
                state.lse[t, h], np.log(len(seen)), rtol=1e-6, atol=1e-6, err_msg=f"lse of token {t} head {h}"
            )


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays or states are equal bit for bit."""
    if isinstance(a, AttentionState):
        return same_bits(a.o, b.o) and same_bits(a.lse, b.lse)
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
