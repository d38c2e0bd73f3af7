"""Launches from whole programs: command buffers, threads and devices, saved and cached programs, loops.

What one call computes is judged in test_gpu.py and test_gpu_accuracy.py; here a call must give the same bits
however it was launched.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import count_differing_calls, long_case, plan_of, run, run_python
from plan_executor import unpack_plan

import jaxinfer
from jaxinfer import Variant

pytestmark = pytest.mark.gpu

CAUSAL = Variant(causal=True)
LAYERS, BATCH, PAGE_SIZE, PAGES_PER_REQUEST, HEADS, KV_HEADS, DIM = 6, 4, 16, 40, 8, 2, 128
NUM_PAGES = BATCH * PAGES_PER_REQUEST


def new_pools() -> tuple[jax.Array, jax.Array]:
    shape = (LAYERS, NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
    keys = jax.random.split(jax.random.key(3))
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    return k, v


def draw_step(rng: np.random.Generator, kv_len: list[int] | None = None) -> tuple[Any, ...]:
    """q, the new K and V, layout and plan of a decode step; every argument differs from step to step."""
    lens = rng.integers(0, PAGES_PER_REQUEST * PAGE_SIZE + 1, BATCH) if kv_len is None else np.array(kv_len)
    table = rng.permutation(NUM_PAGES).reshape(BATCH, PAGES_PER_REQUEST).astype(np.int32)
    layout = jaxinfer.from_block_table(table, lens, np.arange(BATCH + 1), PAGE_SIZE)
    plan = jaxinfer.plan(
        layout, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16", variant=CAUSAL
    )
    q = rng.normal(size=(BATCH, HEADS, DIM)).astype(jnp.bfloat16)
    new = rng.normal(size=(2, LAYERS, BATCH, KV_HEADS, DIM)).astype(jnp.bfloat16)
    return q, new, layout, plan


def one_layer(x: Any, k: Any, v: Any, new: Any, layout: Any, plan: Any, layer: Any) -> tuple[Any, Any, Any]:
    """Too few launches to be worth a command buffer."""
    k, v = jaxinfer.append_kv(k, v, new[0], new[1], layout.slots(), layer=layer)
    o = jaxinfer.attention(x, k, v, layout, plan, variant=CAUSAL, layer=layer)
    return o, k, v


def all_layers(q: Any, k: Any, v: Any, new: Any, layout: Any, plan: Any) -> tuple[Any, Any, Any]:
    """Twelve calls in a row, which XLA captures."""
    x = q
    for layer in range(LAYERS):
        x, k, v = one_layer(x, k, v, new[:, layer], layout, plan, np.int32(layer))
    return x, k, v


def test_replays_of_a_command_buffer_equal_fresh_launches() -> None:
    """200 steps with other lengths, tables and plans; the plan of the first step must not stay captured."""
    traces = []

    def counted(*args: Any) -> Any:
        traces.append(1)
        return all_layers(*args)

    captured = jax.jit(counted, donate_argnums=(1, 2))
    plain = jax.jit(one_layer, donate_argnums=(1, 2))
    k, v = new_pools()
    k_plain, v_plain = new_pools()
    rng = np.random.default_rng(5)
    special = ([64, 1, 1, 1], [1, 64, 37, 0], [16, 16, 16, 16], [17, 17, 17, 17], [640] * 4, [0] * 4)
    for number in range(200):
        q, new, layout, plan = draw_step(rng, special[number] if number < len(special) else None)
        x, k, v = captured(q, k, v, new, layout, plan)
        y = jnp.asarray(q)
        for layer in range(LAYERS):
            args = (y, k_plain, v_plain, new[:, layer], layout, plan, np.int32(layer))
            y, k_plain, v_plain = plain(*args)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"step {number}, lengths {layout.kv_len}"
    assert len(traces) == 1
    assert bool(jnp.array_equal(k, k_plain)) and bool(jnp.array_equal(v, v_plain))


DUMPED = """
import jax, numpy as np
import test_gpu_programs as t
step = t.draw_step(np.random.default_rng(0))
x, k, v = jax.jit(t.all_layers, donate_argnums=(1, 2))(step[0], *t.new_pools(), *step[1:])
x.block_until_ready()
"""


def test_handlers_are_inside_a_command_buffer(tmp_path: Path) -> None:
    """XLA's dump of the thunks: no custom call is left outside (xla#14889)."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    run_python(DUMPED, XLA_FLAGS=flags)
    files = list(tmp_path.glob("*all_layers*thunk_sequence*"))
    assert files, sorted(path.name for path in tmp_path.iterdir())
    # The sequence is dumped before and after the pass that makes command buffers, in files or paragraphs.
    parts = [part for path in files for part in path.read_text().split("\n\n")]
    captured = [part for part in parts if "kCommandBuffer" in part]
    assert captured, "\n".join(parts)
    for part in captured:
        assert "kCustomCall" in part and not calls_outside(part), part


def calls_outside(sequence: str) -> list[str]:
    """Custom calls that are not indented below a command buffer."""
    outside, inside_from = [], None
    for line in sequence.splitlines():
        indent = len(line) - len(line.lstrip())
        if inside_from is not None and indent <= inside_from:
            inside_from = None
        if "kCommandBuffer" in line:
            inside_from = indent
        elif "kCustomCall" in line and inside_from is None:
            outside.append(line)
    return outside


def test_without_command_buffers_bits_are_the_same() -> None:
    code = """
import hashlib, jax, numpy as np
import test_gpu_programs as t
program, pools, rng = jax.jit(t.all_layers), t.new_pools(), np.random.default_rng(11)
for _ in range(5):
    step = t.draw_step(rng)
    x, *pools = program(step[0], *pools, *step[1:])
    print(hashlib.sha256(np.asarray(x).tobytes()).hexdigest())
"""
    flags = os.environ.get("XLA_FLAGS", "")
    off, on = (
        run_python(code, XLA_FLAGS=f"{flags} {more}".strip())[0]
        for more in ("--xla_gpu_enable_command_buffer=", "")
    )
    assert len(on.split()) == 5 and on == off


# ---- threads and devices


def _in_two_threads(devices: list[jax.Device]) -> None:
    """Each thread has its device, its pools and its own steps; both run the same two programs."""
    captured, plain = jax.jit(all_layers), jax.jit(one_layer)
    turn = threading.Barrier(2, timeout=300)
    failures: list[str] = []

    def serve(index: int) -> None:
        try:
            with jax.default_device(devices[index]):
                rng = np.random.default_rng(index)
                pools, alone = new_pools(), new_pools()
                for number in range(20):
                    turn.wait()
                    q, new, layout, plan = draw_step(rng)
                    x, *pools = captured(q, *pools, new, layout, plan)
                    assert x.devices() == {devices[index]}
                    y = jnp.asarray(q)
                    for layer in range(LAYERS):
                        y, *alone = plain(y, *alone, new[:, layer], layout, plan, np.int32(layer))
                    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"thread {index} step {number}"
        except BaseException as error:
            failures.append(repr(error))
            turn.abort()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_threads_on_one_device() -> None:
    _in_two_threads([jax.devices()[0]] * 2)


def test_two_threads_on_two_devices() -> None:
    """Work on device 1 must not be launched on device 0 (flashinfer#349)."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    _in_two_threads(jax.devices()[:2])


def test_everything_on_the_second_device() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    case = long_case([700, 33], [1, 4], "bfloat16")
    want = run(case)
    with jax.default_device(jax.devices()[1]):
        args = [jax.device_put(x, jax.devices()[1]) for x in (case.q, case.k, case.v)]
        plan = plan_of(case)
        got = jax.jit(lambda *a: jaxinfer.attention(*a, case.layout, plan, variant=CAUSAL, return_lse=True))(
            *args
        )
    assert got.o.devices() == {jax.devices()[1]}  # type: ignore[union-attr]
    assert np.asarray(got.o).tobytes() == want[0].tobytes()  # type: ignore[union-attr]


# ---- programs from elsewhere


CACHED = """
import logging, sys, jax, numpy as np
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
jax.config.update("jax_compilation_cache_dir", FOLDER)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import test_gpu_programs as t
step = t.draw_step(np.random.default_rng(0))
x, k, v = jax.jit(t.all_layers)(step[0], *t.new_pools(), *step[1:])
np.save(OUT, np.asarray(x).astype(np.float32))
"""


def test_program_from_the_persistent_compilation_cache(tmp_path: Path) -> None:
    """A fresh process takes the program from JAX's cache and finds no kernel: it compiles what the call names."""
    logs, results = [], []
    for name in ("first", "second"):
        out = tmp_path / f"{name}.npy"
        code = f"FOLDER, OUT = {str(tmp_path / 'jax')!r}, {str(out)!r}\n{CACHED}"
        logs.append("\n".join(run_python(code, JAXINFER_CACHE=str(tmp_path / name))))
        results.append(np.load(out))
        assert len(list((tmp_path / name / "kernels").glob("*.cubin"))) >= 2
    assert results[0].tobytes() == results[1].tobytes() and np.abs(results[0]).max() > 0
    hits = [line for line in logs[1].splitlines() if "cache hit" in line.lower() and "all_layers" in line]
    assert hits, "the second process did not take the program from the cache"


# ---- merging


def test_merging_gives_the_same_bits_a_thousand_times() -> None:
    """Rows cut over many CTAs that finish in any order; one program counts the launches that differ."""
    case = long_case([9000, 17, 2100, 4000, 900], [1, 1, 1, 1, 1], "bfloat16")
    plan = plan_of(case)
    assert unpack_plan(plan).num_merge > 0, "nothing is merged"
    assert count_differing_calls(case, plan, 1000) == 0
