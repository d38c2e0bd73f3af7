"""The operator inside JAX: jit, scan, cond, donation, retracing, strides, attribute types, shard_map.

What a call computes is tested elsewhere; here it must stay the same call wherever it stands.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close
from batches import ABSURD, Way, attend, make_plan, random_requests, run, same_bits, store

import jaxinfer
from jaxinfer import Variant

CAUSAL = Variant(causal=True)
NHD = Way("NHD", None)
HEADS: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": np.float32}


def batch(page_size: int = 4) -> Any:
    return store(NHD, *random_requests([1, 5, 0], [30, 9, 4], 4, 2, 16), page_size=page_size, num_tokens=8)


# ---- jit and eager, control flow


def test_eager_and_jit_give_the_same_bits() -> None:
    stored = batch()
    plan = make_plan(NHD, stored, CAUSAL)
    args = (jnp.asarray(stored.q), jnp.asarray(stored.k), jnp.asarray(stored.v), stored.layout, plan)
    eager = jaxinfer.attention(*args, variant=CAUSAL, return_lse=True)
    assert same_bits(attend(*args, CAUSAL), eager)
    assert same_bits(jaxinfer.attention(*args, variant=CAUSAL), eager.o)


def test_cond_runs_either_branch() -> None:
    stored = batch()
    variants = CAUSAL, Variant(window_left=2)
    plans = [make_plan(NHD, stored, v) for v in variants]
    q, k, v = (jnp.asarray(x) for x in (stored.q, stored.k, stored.v))

    @jax.jit
    def step(pick: Any, q: Any, k: Any, v: Any, layout: Any, plans: Any) -> Any:
        branches = [
            lambda i=i: jaxinfer.attention(q, k, v, layout, plans[i], variant=variants[i], return_lse=True)
            for i in (0, 1)
        ]
        return jax.lax.cond(pick, *branches)

    for pick, i in ((True, 0), (False, 1)):
        want = attend(q, k, v, stored.layout, plans[i], variants[i])
        assert same_bits(step(pick, q, k, v, stored.layout, plans), want)


def test_a_scan_over_100_layers_equals_the_loop() -> None:
    """Whole pool carried, `layer` an operand. Handlers that allocate corrupt constants under scan (jax#36580)."""
    num_layers = 100
    layout = jaxinfer.paged([0, 1, 4, 4], [0, 2, 4, 5], [3, 1, 5, 2, 4, *ABSURD], [7, 5, 0], 4, num_tokens=6)
    plan = jaxinfer.plan(layout, **HEADS, variant=CAUSAL)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4, 16)).astype(np.float32)
    pool = rng.standard_normal((num_layers, 7, 4, 2, 16)).astype(np.float32)

    def layer_step(carry: Any, layer: Any) -> Any:
        x, k_pages, v_pages, layout, plan = carry
        new = x[:, ::2] * 0.5
        k_pages, v_pages = jaxinfer.append_kv(k_pages, v_pages, new, new + 1, layout.slots(), layer=layer)
        o = jaxinfer.attention(x, k_pages, v_pages, layout, plan, variant=CAUSAL, layer=layer)
        return (jnp.tanh(o + x), k_pages, v_pages, layout, plan), o[:, 0, 0]

    start = jax.tree.map(jnp.asarray, (x, pool, pool, layout, plan))
    scan, scan_marks = jax.jit(lambda carry: jax.lax.scan(layer_step, carry, jnp.arange(num_layers)))(start)
    loop, loop_marks, step = start, [], jax.jit(layer_step)
    for layer in range(num_layers):
        loop, mark = step(loop, jnp.int32(layer))
        loop_marks.append(np.asarray(mark))
    assert len(np.unique(np.stack(loop_marks)[:, 0])) == num_layers
    # XLA may fuse tanh(o + x) differently in the two programs: rounding, not bits.
    for a, b in zip((*scan[:3], scan_marks), (*loop[:3], np.stack(loop_marks)), strict=True):
        assert np.isfinite(b).all()
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_layer_out_of_range_gives_the_empty_state() -> None:
    stored = batch()
    plan = make_plan(NHD, stored, CAUSAL)
    pools = [jnp.stack([jnp.asarray(x)] * 2) for x in (stored.k, stored.v)]
    for implementation in (None, "reference"):

        def at(layer: int, implementation: str | None = implementation) -> Any:
            operand = jnp.int32(layer)
            return attend(
                stored.q, *pools, stored.layout, plan, CAUSAL, operand, implementation=implementation
            )

        for layer in (-1, 2, 2147483647, -2147483648):
            state = at(layer)
            assert not np.asarray(state.o).any()
            assert np.isneginf(state.lse).all()
        assert same_bits(at(0), at(1))
        flat = attend(
            stored.q, stored.k, stored.v, stored.layout, plan, CAUSAL, implementation=implementation
        )
        assert same_bits(at(1), flat)


# ---- jax_debug_nans: memory to work in may hold anything


def test_debug_nans_finds_none_where_there_are_none() -> None:
    """Split requests leave most of the workspace unwritten; outside jit JAX looks at every result."""
    stored = batch()
    plan = make_plan(NHD, stored, CAUSAL)
    size = 4 * plan.spec.slot_capacity * 4 * 18
    q, k, v = (jnp.nan_to_num(jnp.asarray(x), posinf=1, neginf=1) for x in (stored.q, stored.k, stored.v))
    for _ in range(3):
        (jnp.full(size // 4, jnp.nan) + 1).block_until_ready()  # memory that the next results may get
        with jax.debug_nans(True):
            assert np.isfinite(jaxinfer.attention(q, k, v, stored.layout, plan, variant=CAUSAL)).all()


def test_disabled_jit_changes_no_bit() -> None:
    stored = batch()
    plan = make_plan(NHD, stored, CAUSAL)
    operands = (stored.q, stored.k, stored.v, stored.layout, plan)
    expected = jaxinfer.attention(*operands, variant=CAUSAL, return_lse=True)
    with jax.disable_jit():
        got = jaxinfer.attention(*operands, variant=CAUSAL, return_lse=True)
    assert same_bits(got, expected)


# ---- the cache is copied instead of updated (sglang-jax#65, jax#1273)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_donated_pools_are_updated_in_place(kv_layout: str) -> None:
    shape = (512, 16, 2, 64) if kv_layout == "NHD" else (512, 2, 16, 64)
    size = 4 * int(np.prod(shape))

    def step(q: Any, k_pages: Any, v_pages: Any, new: Any, layout: Any, plan: Any) -> Any:
        k_pages, v_pages = jaxinfer.append_kv(k_pages, v_pages, new, new, layout.slots(), kv_layout=kv_layout)
        o = jaxinfer.attention(q, k_pages, v_pages, layout, plan, variant=CAUSAL, kv_layout=kv_layout)
        return o, k_pages, v_pages

    jitted = jax.jit(step, donate_argnums=(1, 2))
    k_pages, v_pages = jnp.zeros(shape), jnp.zeros(shape)
    q, new = jnp.ones((2, 4, 64)), jnp.ones((2, 2, 64))
    table = np.arange(512).reshape(2, 256)

    def planned(i: int) -> Any:
        layout = jaxinfer.from_block_table(table, [i + 1, 2 * i + 5], [0, 1, 2], 16)
        return layout, jaxinfer.plan(layout, **{**HEADS, "head_dim": 64}, variant=CAUSAL)

    temp = jitted.lower(q, k_pages, v_pages, new, *planned(0)).compile().memory_analysis().temp_size_in_bytes
    assert temp < size
    pointers = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        for i in range(10):
            o, k_pages, v_pages = jitted(q, k_pages, v_pages, new, *planned(i))
    assert (k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()) == pointers
    assert np.isfinite(o).all()


def test_pools_that_are_not_donated_keep_their_values() -> None:
    pool, new = jnp.zeros((3, 4, 2, 16)), jnp.ones((1, 2, 16))
    after, _ = jax.jit(jaxinfer.append_kv)(pool, pool, new, new, np.array([5], np.int32))
    assert not np.asarray(pool).any()
    assert np.asarray(after).sum() == 32


def test_a_decode_loop_over_a_layer_loop_keeps_the_pool() -> None:
    """scan over steps of scan over layers, pool donated: same buffer, no temporary of its size."""
    num_layers, steps = 4, 5
    pool = jnp.zeros((num_layers, 64, 16, 2, 16))
    layouts = [jaxinfer.paged([0, 1], [0, 4], [9, 3, 7, 1], [n], 16) for n in range(14, 14 + steps)]
    plans = [jaxinfer.plan(a, **HEADS, variant=CAUSAL) for a in layouts]
    layouts, plans = (jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (layouts, plans))

    def step(x: Any, k_pages: Any, v_pages: Any, layouts: Any, plans: Any) -> Any:
        def decode(carry: Any, now: Any) -> Any:
            def layer_step(inner: Any, layer: Any) -> Any:
                x, k_pages, v_pages = inner
                slots = now[0].slots()
                k_pages, v_pages = jaxinfer.append_kv(
                    k_pages, v_pages, x[:, :2], x[:, 2:], slots, layer=layer
                )
                o = jaxinfer.attention(x, k_pages, v_pages, *now, variant=CAUSAL, layer=layer)
                return (o + x, k_pages, v_pages), None

            return jax.lax.scan(layer_step, carry, jnp.arange(num_layers))[0], None

        return jax.lax.scan(decode, (x, k_pages, v_pages), (layouts, plans))[0]

    jitted = jax.jit(step, donate_argnums=(1, 2))
    x, k_pages, v_pages = jnp.ones((1, 4, 16)), pool, pool + 0
    memory = jitted.lower(x, k_pages, v_pages, layouts, plans).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pool.nbytes / 4
    pointers = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    x, k_pages, v_pages = jitted(x, k_pages, v_pages, layouts, plans)
    assert (k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()) == pointers
    assert np.isfinite(x).all()
    assert np.count_nonzero(np.asarray(v_pages).any(axis=(-1, -2))) == num_layers * steps


# ---- recompilation storms (sglang-jax#1044, sglang-jax#609)


def test_twenty_decode_steps_and_masks_that_come_and_go_are_one_trace() -> None:
    """No mask is a mask of ones in the same capacity, so the pytree keeps its structure."""
    traces = []

    @jax.jit
    def step(q: Any, k: Any, v: Any, layout: Any, plan: Any, variant: Any) -> Any:
        traces.append(1)
        return jaxinfer.attention(q, k, v, layout, plan, variant=variant)

    pool = jnp.asarray(np.arange(32.0).reshape(8, 4, 1, 1) * np.ones((1, 1, 2, 16)), jnp.float32)
    q = jnp.zeros((1, 4, 16))
    structures = set()
    for n in range(1, 21):
        layout = jaxinfer.paged([0, 1], [0, 5], np.arange(8), [n], 4)
        mask = np.ones((1, n), bool)
        mask[0, 0] = n % 2 == 0 or n == 1
        bits, indptr = jaxinfer.pack_masks([mask], layout, capacity=4)
        variant = Variant(causal=True, mask_bits=bits, mask_indptr=indptr)
        plan = jaxinfer.plan(layout, **HEADS, variant=variant)
        structures.add(jax.tree.structure((layout, plan, variant)))
        o = step(q, pool, pool, layout, plan, variant)
        assert_close(o, np.full((1, 4, 16), np.flatnonzero(mask[0]).mean()), rtol=1e-6)
    assert len(structures) == 1
    assert len(traces) == 1


# ---- strides: rows of packed QKV, transposed heads, transposed pools (flashinfer#4625, vllm#32008)


def test_queries_sliced_from_packed_qkv() -> None:
    num_qo_heads, num_kv_heads, dim = 32, 4, 128
    rng = np.random.default_rng(0)
    packed = rng.standard_normal((4, (num_qo_heads + 2 * num_kv_heads) * dim)).astype(np.float32)
    layout = jaxinfer.paged([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], 4)
    plan = jaxinfer.plan(
        layout, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=dim, dtype=np.float32
    )
    pool = rng.standard_normal((5, 4, num_kv_heads, dim)).astype(np.float32)

    def step(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        k_pages, v_pages = jaxinfer.append_kv(jnp.asarray(pool), jnp.asarray(pool), k, v, layout.slots())
        return jaxinfer.attention(q, k_pages, v_pages, layout, plan), k_pages, v_pages

    def split(x: Any) -> Any:
        end_q, end_k = num_qo_heads * dim, (num_qo_heads + num_kv_heads) * dim
        parts = x[:, :end_q], x[:, end_q:end_k], x[:, end_k:]
        return [part.reshape(4, -1, dim) for part in parts]

    want = jax.jit(step)(*(np.ascontiguousarray(x) for x in split(packed)), layout, plan)
    got = jax.jit(lambda x, *rest: step(*split(x), *rest))(packed, layout, plan)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


def test_transposed_queries_and_pools() -> None:
    stored = batch()
    plan = make_plan(NHD, stored, CAUSAL)
    want = attend(stored.q, stored.k, stored.v, stored.layout, plan, CAUSAL)

    @jax.jit
    def step(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        q, k, v = q.swapaxes(0, 1), k.swapaxes(1, 2), jnp.moveaxis(v, -1, 0)
        v = jnp.moveaxis(v, 0, -1)
        return jaxinfer.attention(q, k, v, layout, plan, variant=CAUSAL, return_lse=True)

    got = step(stored.q.swapaxes(0, 1), stored.k.swapaxes(1, 2), stored.v, stored.layout, plan)
    assert same_bits(got, want)
    # numpy views with strides of their own
    view = np.asfortranarray(stored.k), stored.v[:, ::-1][:, ::-1]
    assert same_bits(attend(stored.q, *view, stored.layout, plan, CAUSAL), want)


# ---- attribute types: the width of a Python number (jax#24160)


def test_numbers_of_any_type_mean_the_same() -> None:
    stored = batch()

    def with_scale(sm_scale: Any) -> Any:
        return run(NHD, stored, variant=CAUSAL, sm_scale=sm_scale)

    # 0.40625 is exact in every width: the values are equal as jit keys, so a wrong width would hit others.
    first = with_scale(0.40625)
    for number in (np.float32(0.40625), np.float64(0.40625), np.float16(0.40625)):
        assert same_bits(with_scale(number), first)
    second = with_scale(np.float32(0.28125))
    assert same_bits(with_scale(0.28125), second)
    assert not same_bits(first.o, second.o)
    one = with_scale(1)
    for number in (1.0, np.int64(1), np.int32(1), np.float32(1)):
        assert same_bits(with_scale(number), one)
    assert np.isfinite(with_scale(0.1).o[:6]).all()


def test_windows_and_caps_of_any_type_mean_the_same() -> None:
    stored = batch()
    want = run(NHD, stored, variant=Variant(window_left=3, logits_soft_cap=2.0))
    for window in (np.int64(3), np.int32(3), np.uint8(3)):
        for cap in (2, np.float32(2), np.float64(2)):
            variant = Variant(window_left=window, logits_soft_cap=cap)
            assert variant == Variant(window_left=3, logits_soft_cap=2.0)
            assert same_bits(run(NHD, stored, variant=variant), want)


# ---- several devices


def test_heads_sharded_over_two_devices() -> None:
    """In a process of its own, because the number of host devices is fixed when JAX starts."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags}
    program = Path(__file__).parent / "sharded_program.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [*["heads", "scan", "kv"] * 2, "explicit"]
