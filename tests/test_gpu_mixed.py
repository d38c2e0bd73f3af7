"""Batches in which some rows decode and others prefill: the kernels of two tile classes run side by side.

A program is compiled for the capacities and then meets every mix, down to those where one class, or both, have no
work. What programs and loops add to a launch is test_gpu_programs.py's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from gpu_cases import count_differing_calls, expect_close, plan_of, run
from oracle import attention_oracle
from plan_executor import unpack_plan

import jaxinfer
from jaxinfer import Variant

pytestmark = pytest.mark.gpu

ROWS, NUM_TOKENS, NUM_PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 12, 300, 1200, 16, 8, 2, 128
CAUSAL = Variant(causal=True)
Lengths = tuple[list[int], list[int]]  # q_len, kv_len

DECODE = ([1] * ROWS, [900, 33, 1, 0, 64, 2000, 5, 16, 700, 300, 17, 4000])
CHUNKS = ([0] * 9 + [150, 90, 40], [40] * 9 + [700, 90, 40])
MIXES: dict[str, Lengths] = {
    "long_decode_short_chunk": ([1] * 11 + [40], [1400] * 11 + [600]),
    "short_decode_long_chunk": ([1] * 11 + [280], [30] * 11 + [900]),
    "both": ([1] * 10 + [120, 150], [900, 33, 1, 0, 64, 2000, 5, 16, 700, 300, 1200, 150]),
    "decode_only": DECODE,
    "chunks_only": CHUNKS,
    "nothing": ([0] * ROWS, [0] * ROWS),
    "no_keys": ([1] * 11 + [100], [0] * ROWS),
}


def mixed_case(lengths: Lengths, seed: int = 3) -> Case:
    """All cases have the same capacities."""
    rng = np.random.default_rng(seed)
    q_len, kv_len = lengths
    kv_indptr = np.cumsum([0, *(-(-n // PAGE_SIZE) for n in kv_len)])
    layout = jaxinfer.paged(
        np.cumsum([0, *q_len]),
        kv_indptr,
        rng.permutation(NUM_PAGES),
        np.array(kv_len),
        PAGE_SIZE,
        num_tokens=NUM_TOKENS,
    )
    pool = (NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
    q, k, v = (
        rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((NUM_TOKENS, HEADS, DIM), pool, pool)
    )
    # Pages that nobody lists, and the places behind a row's last token.
    listed = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    for r, n in enumerate(kv_len):
        pages = layout.kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
        for at in range(0, n, PAGE_SIZE):
            listed[pages[at // PAGE_SIZE], : n - at] = True
    k[~listed], v[~listed] = np.nan, np.nan
    return Case("paged", q, k, v, layout, CAUSAL, DIM**-0.5, None, "NHD", NUM_PAGES)


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_equals_the_oracle(name: str) -> None:
    case = mixed_case(MIXES[name])
    expected = attention_oracle(*case.args, **case.oracle_kwargs)
    reading = {"tiles": (16, 64)}  # both classes
    few = {"num_ctas": (8, 6), "batch_invariant": True}
    for options in ({}, reading, few, {"implementation": "mma"}):
        expect_close(case, *run(case, **options), expected)


def program(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
    """Calls that depend on each other, and with what XLA puts between them enough for a command buffer."""
    states = []
    for _ in range(5):
        state = jaxinfer.attention(q, k, v, layout, plan, variant=CAUSAL, return_lse=True)
        states.append(state)
        q = q + state.o * jnp.bfloat16(0.125)  # type: ignore[union-attr]
    return states


def test_replays_meet_every_mix() -> None:
    """The bits of each replay are those of launches one by one, whichever class was empty before."""
    traces = []

    def counted(*args: Any) -> Any:
        traces.append(1)
        return program(*args)

    captured = jax.jit(counted)
    plain = jax.jit(lambda *args: jaxinfer.attention(*args, variant=CAUSAL, return_lse=True))
    order = [name for first in MIXES for second in MIXES for name in (first, second)]
    cases = {name: mixed_case(lengths, seed) for seed, (name, lengths) in enumerate(MIXES.items())}
    plans = {name: plan_of(case) for name, case in cases.items()}
    expected: dict[str, list[list[bytes]]] = {}
    for name, case in cases.items():
        q = case.q
        expected[name] = []
        for _ in range(5):
            state = plain(q, *case.args[1:], plans[name])
            expected[name].append([np.asarray(x).tobytes() for x in (state.o, state.lse)])
            q = jnp.asarray(q) + state.o * jnp.bfloat16(0.125)
        first = plain(*case.args, plans[name])
        expect_close(case, np.asarray(first.o), np.asarray(first.lse))
    for number, name in enumerate(order):
        states = captured(*cases[name].args, plans[name])
        got = [[np.asarray(x).tobytes() for x in (state.o, state.lse)] for state in states]
        assert got == expected[name], f"call {number}: {name} after {order[number - 1]}"
    assert len(traces) == 1


def test_a_thousand_mixed_calls_give_the_same_bits() -> None:
    """Whatever the order in which the CTAs of both classes, and the merge behind them, start and end."""
    case = mixed_case(MIXES["both"])
    plan = plan_of(case)
    assert unpack_plan(plan).num_merge > 0, "nothing is merged"
    assert count_differing_calls(case, plan, 1000) == 0
