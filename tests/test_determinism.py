"""Same inputs, same bits: run after run, for any number of threads, in any program; and batch invariance."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend import cpu_only
from batches import ABSURD, ENGINE, Way, attend, make_plan, random_requests, run, same_bits, store
from plan_executor import unpack_plan

import jaxinfer
from jaxinfer import AttentionState, Variant

CAUSAL = Variant(causal=True)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
every_storage = pytest.mark.parametrize("way", ENGINE, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def long_batch(way: Way, dtype: Any = np.float32) -> Any:
    requests = random_requests([1, 1, 40, 3], [900, 2500, 300, 17], 4, 2, 32)
    return store(way, *requests, page_size=16, num_tokens=48, dtype=dtype)


# ---- run after run


@every_storage
@every_dtype
def test_the_same_call_gives_the_same_bits(way: Way, dtype: Any) -> None:
    stored = long_batch(way, dtype)
    plan = make_plan(way, stored, CAUSAL)
    assert unpack_plan(plan).num_merge > 0, "nothing is merged, so order could not matter"
    first = run(way, stored, variant=CAUSAL)
    for _ in range(8):
        assert same_bits(run(way, stored, variant=CAUSAL), first)


@every_storage
def test_where_pages_lie_changes_no_bit(way: Way) -> None:
    """Equal lengths have equal plans, whatever the page ids; K and V are the same numbers."""
    requests = random_requests([1, 1, 40, 3], [900, 2500, 300, 17], 4, 2, 32)
    first = run(way, store(way, *requests, page_size=16), variant=CAUSAL)
    for seed in (1, 2):
        assert same_bits(run(way, store(way, *requests, page_size=16, seed=seed), variant=CAUSAL), first)


def test_other_programs_give_the_same_bits() -> None:
    """Eager, jitted, in a scan beside other work: the call is the same."""
    way = ENGINE[0]
    stored = long_batch(way)
    plan = make_plan(way, stored, CAUSAL)
    q, k, v = (jnp.asarray(x) for x in (stored.q, stored.k, stored.v))
    layout = stored.layout
    first = attend(q, k, v, layout, plan, CAUSAL)
    assert same_bits(jaxinfer.attention(q, k, v, layout, plan, variant=CAUSAL, return_lse=True), first)

    @jax.jit
    def looped(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        def step(total: Any, _: Any) -> Any:
            state = jaxinfer.attention(q, k, v, layout, plan, variant=CAUSAL, return_lse=True)
            return total + jnp.where(jnp.isfinite(state.lse), state.lse, 0).sum(), state

        return jax.lax.scan(step, 0.0, None, length=4)[1]

    states = looped(q, k, v, layout, plan)
    for i in range(4):
        assert same_bits(AttentionState(states.o[i], states.lse[i]), first)


# ---- whatever the number of threads


def digests(cores: set[int], isa: str) -> list[str]:
    environment = {**os.environ, "JAXINFER_CPU_ISA": isa}
    command = [sys.executable, str(Path(__file__).parent / "digest_program.py")]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # inherited: JAX sizes its thread pool by the cores that it may use
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0, done.stderr
    threads, *lines = done.stdout.splitlines()
    assert int(threads) == len(cores)
    return lines


@cpu_only("its threads and instruction sets")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("isa", sorted({jaxinfer.ffi._native.cpu_isa(), "scalar"}))
def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    cores = os.sched_getaffinity(0)
    one = digests({min(cores)}, isa)
    assert len(one) == 2 * 2 * len(DTYPES)
    assert digests(cores, isa) == one


# ---- batch invariance


@dataclass(frozen=True)
class Request:
    q: np.ndarray[Any, Any]
    k: np.ndarray[Any, Any]
    v: np.ndarray[Any, Any]


PAGE_SIZE, NUM_PAGES, ROWS, NUM_TOKENS, NUM_BLOCKS = 16, 800, 8, 96, 760
LENGTHS = (
    (1, 4096),
    (1, 16),
    (1, 1),
    (1, 513),
    (1, 1024),
    (17, 700),
    (3, 2000),
    (40, 40),
    (5, 3),
    (2, 0),
    (0, 9),
)


def requests_of(dtype: Any) -> list[Request]:
    q, k, v = random_requests([a for a, _ in LENGTHS], [b for _, b in LENGTHS], 6, 2, 16)
    return [Request(*(x.astype(dtype) for x in parts)) for parts in zip(q, k, v, strict=True)]


def run_batch(
    requests: list[Request], rng: np.random.Generator, dtype: Any, **options: Any
) -> list[AttentionState]:
    """State of each request in a batch of fixed capacity, its pages scattered over a poisoned pool."""
    q_len = [r.q.shape[0] for r in requests] + [0] * (ROWS - len(requests))
    kv_len = [r.k.shape[0] for r in requests] + [0] * (ROWS - len(requests))
    qo, kv = np.cumsum([0, *q_len]), np.cumsum([0, *(-(-n // PAGE_SIZE) for n in kv_len)])
    table = rng.choice(ABSURD, NUM_BLOCKS).astype(np.int32)
    table[: kv[-1]] = rng.permutation(NUM_PAGES)[: kv[-1]]
    layout = jaxinfer.paged(qo, kv, table, kv_len, PAGE_SIZE, num_tokens=NUM_TOKENS)
    q = np.full((NUM_TOKENS, *requests[0].q.shape[1:]), np.nan, dtype)
    k, v = (np.full((NUM_PAGES * PAGE_SIZE, *requests[0].k.shape[1:]), np.nan, dtype) for _ in range(2))
    for r, request in enumerate(requests):
        q[qo[r] : qo[r + 1]] = request.q
        j = np.arange(kv_len[r])
        slots = table[kv[r] + j // PAGE_SIZE] * PAGE_SIZE + j % PAGE_SIZE
        k[slots], v[slots] = request.k, request.v
    plan = jaxinfer.plan(
        layout,
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=dtype,
        variant=CAUSAL,
        batch_invariant=True,
        **options,
    )
    pool = (NUM_PAGES, PAGE_SIZE, *k.shape[1:])
    state = attend(q, k.reshape(pool), v.reshape(pool), layout, plan, CAUSAL)
    o, lse = np.asarray(state.o), np.asarray(state.lse)
    return [AttentionState(o[qo[r] : qo[r + 1]], lse[qo[r] : qo[r + 1]]) for r in range(len(requests))]


@every_dtype
def test_a_requests_bits_do_not_depend_on_the_batch(dtype: Any) -> None:
    """67 random batches per dtype, about 200 in all, other CTA counts and schedules included."""
    rng = np.random.default_rng(0)
    requests = requests_of(dtype)
    alone = [run_batch([r], rng, dtype)[0] for r in requests]
    way = ENGINE[0]
    for request, state in zip(requests[:6], alone, strict=False):
        # At its own capacity, too.
        stored = store(way, [request.q], [request.k], [request.v], page_size=PAGE_SIZE, dtype=dtype)
        assert same_bits(run(way, stored, variant=CAUSAL, batch_invariant=True), state)
    for batch in range(67):
        options: dict[str, Any] = ({}, {"num_ctas": 5}, {"schedule": "runs"})[batch % 3]
        picked = rng.integers(0, len(requests), rng.integers(1, ROWS + 1))
        while (
            sum(-(-LENGTHS[i][1] // PAGE_SIZE) for i in picked) > NUM_BLOCKS
            or sum(LENGTHS[i][0] for i in picked) > NUM_TOKENS
        ):
            picked = picked[:-1]
        states = run_batch([requests[i] for i in picked], rng, dtype, **options)
        for i, state in zip(picked, states, strict=True):
            assert same_bits(state, alone[i]), f"batch {batch}: request {LENGTHS[i]} among {picked.tolist()}"


def test_default_mode_repeats_bits_for_identical_lengths() -> None:
    """Which request stands beside may change cuts, but not who: only lengths count."""
    way = ENGINE[0]
    q_len, kv_len = [1, 1, 8], [2000, 50, 300]
    requests = random_requests(q_len, kv_len, 6, 2, 16)
    others = random_requests(q_len, kv_len, 6, 2, 16, seed=9)
    mixed = [[a[0], *b[1:]] for a, b in zip(requests, others, strict=True)]
    first = run(way, store(way, *requests, page_size=16), variant=CAUSAL)
    second = run(way, store(way, *mixed, page_size=16, seed=4), variant=CAUSAL)
    assert same_bits(second.o[:1], first.o[:1])
    assert same_bits(second.lse[:1], first.lse[:1])
    assert not same_bits(second.o[1:], first.o[1:])
