"""The tables against other libraries: rows and their counts, the reference, refusal of wrong results. No times."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backend import cpu_only

import jaxinfer
from jaxinfer.bench import cases as rows
from jaxinfer.bench import rivals, versus
from jaxinfer.bench.burst import Burst, JaxBurst, per_call, race
from jaxinfer.bench.cases import Case, Operands, decode_case, make_operands, prefill_case
from jaxinfer.bench.ceilings import measure_ceilings, run_until_steady
from jaxinfer.bench.measure import Timing
from jaxinfer.bench.peers import OURS
from jaxinfer.bench.rivals import RIVALS, kernel_specs
from jaxinfer.bench.row import Entry, Row, fastest_seconds, measure_case, relative_error
from jaxinfer.bench.torch_rivals import GraphBurst
from jaxinfer.bench.versus import as_json
from jaxinfer.cli import main
from jaxinfer.jit.spec import KernelSpec

SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def dense_attention(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One request with float64 loops over its tokens."""
    out = np.empty((*q.shape[:2], v.shape[-1]))
    group = case.num_qo_heads // case.num_kv_heads
    for t in range(len(q)):
        last = len(k) - len(q) + t if case.causal else len(k) - 1
        for h in range(case.num_qo_heads):
            logits = k[: last + 1, h // group] @ q[t, h] / math.sqrt(case.head_dim)
            weights = np.exp(logits - logits.max())
            out[t, h] = weights / weights.sum() @ v[: last + 1, h // group]
    return out


@pytest.mark.parametrize(
    "case",
    [
        decode_case("decode", (5, 40, 16), page_size=16, **SMALL),
        prefill_case("dense", 2, 9, page_size=None, **SMALL),
        prefill_case("chunk", 2, 21, 6, page_size=4, **SMALL),
        prefill_case("full", 2, 21, 6, page_size=4, causal=False, head_dim_vo=24, **SMALL),
    ],
    ids=lambda c: c.name,
)
def test_expected_tokens(case: Case):
    ops = make_operands(case)
    tokens = rows.checked_tokens(ops)
    got = rows.expected_tokens(ops, tokens)
    q, k, v = (np.asarray(x, np.float64) for x in ops.sets[0])
    for r in range(case.batch):
        begin, n = ops.kv_indptr[r], case.kv_len[r]
        if case.page_size is None:
            kk, vv = (x[begin : begin + n] for x in (k, v))
        else:
            pages = ops.kv_indices[begin : ops.kv_indptr[r + 1]]
            kk, vv = (x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k, v))
        want = dense_attention(case, q[ops.qo_indptr[r] : ops.qo_indptr[r + 1]], kk, vv)
        np.testing.assert_allclose(got[r], want[tokens[r] - ops.qo_indptr[r]], rtol=1e-4, atol=1e-5)


def test_rows_count_their_work():
    case = prefill_case("x", 1, 4, 2, **SMALL)
    assert case.flops == 4 * 4 * 16 * (3 + 4)  # the two queries see three and four tokens
    assert case.kv_bytes == 2 * 4 * 2 * 16 * 4
    full = replace(case, causal=False, head_dim_vo=24)
    assert full.flops == 2 * 4 * (16 + 24) * (4 + 4) and full.kv_bytes == 4 * 2 * (16 + 24) * 4
    assert len({(c.kind, c.name) for c in rows.CASES}) == len(rows.CASES)
    skewed = {c.name: c for c in rows.CASES}
    assert (sum(skewed["skewed-B16"].kv_len), max(skewed["skewed-B16"].kv_len)) == (16372, 5573)
    assert (sum(skewed["skewed-B64"].kv_len), max(skewed["skewed-B64"].kv_len)) == (87371, 32768)
    assert (sum(skewed["skewed-B128"].kv_len), max(skewed["skewed-B128"].kv_len)) == (117660, 32768)


def test_rotated_operands_exceed_the_cache():
    for case in rows.CASES:
        if "gpu" in case.platforms:
            assert case.num_sets * (case.kv_bytes + case.q_bytes) >= 380 << 20, case.name


def test_select():
    assert [c.name for c in rows.select("decode", "gpu", ["B1x8192"], page_size=1)] == ["B1x8192"]
    replaced = rows.select("prefill", "gpu", page_size=4)
    assert {c.page_size for c in replaced} == {None, 4}
    assert len({c.name for c in replaced}) == len(replaced)
    assert {c.page_size for c in replaced if "-page4" in c.name} == {4}
    with pytest.raises(ValueError, match="--rows: no prefill row 'B9' on cpu; there are B1x512, B4x256"):
        rows.select("prefill", "cpu", ["B9"])


def test_wrong_results_are_refused():
    case = decode_case("x", (5, 6), **SMALL)
    ops = make_operands(case)
    tokens = rows.checked_tokens(ops)
    expected = rows.expected_tokens(ops, tokens)
    right = jnp.asarray(expected.reshape(2, 4, 16))
    assert relative_error(case, right, tokens, expected) == 0
    with pytest.raises(ValueError, match=r"relative error .* expected below 2e-05"):
        relative_error(case, right * 1.001, tokens, expected)
    with pytest.raises(ValueError, match="not finite"):
        relative_error(case, right.at[0, 0, 0].set(jnp.nan), tokens, expected)
    with pytest.raises(ValueError, match="got shape"):
        relative_error(case, right[:1], tokens, expected)


def test_a_failing_library_is_listed_and_the_row_goes_on():
    case = decode_case("x", (5, 6), **SMALL)
    case = replace(case, platforms=("cpu",))

    def broken(ops: object) -> dict[str, object]:
        raise OSError("no such kernel")

    ours = next(r for r in RIVALS if r.name == OURS)
    liar = replace(
        ours,
        name="liar",
        variants=lambda ops: {"v1": lambda: JaxBurst(lambda q, k, v: q, ops.sets)},
    )
    row = measure_case(case, [ours, replace(ours, name="broken", variants=broken), liar], 0.0)
    # Ours ran; a figure taken in no time may be too noisy to count.
    assert [e.rival for e in row.entries] == [OURS] or row.absent[OURS].startswith("IMPOSSIBLE")
    assert row.absent["broken"] == "failed: OSError: no such kernel"
    assert "relative error" in row.absent["liar v1"]
    assert row.ratio is None
    entry = as_json([row], measure_ceilings(seconds=0.1), {"torch": ["torch"]})
    assert json.loads(json.dumps(entry))["rows"][0]["kv_tokens"] == 11


def test_missing_modules():
    assert replace(RIVALS[0], needs=("json", "no_such_module", "no_such.module")).missing() == [
        "no_such_module",
        "no_such.module",
    ]


def test_bursts_run_every_set_and_take_turns():
    sets = [(jnp.full(4, i, jnp.float32), jnp.float32(1)) for i in range(3)]
    burst = JaxBurst(lambda x, y, z: x + y + z, sets, (np.float32(10),))
    assert burst.slots == 3
    np.testing.assert_array_equal(burst.output(), np.full(4, 11))
    other = JaxBurst(lambda x, y, z: x + y + z, sets, (np.float32(10),))
    for b in (burst, other):
        b.first_estimate()
        b.warm_up()
    assert race({"a": burst, "b": other}, seconds=0.0)["a"].rounds == 5


class FakeTorch:
    """What GraphBurst uses of torch; a graph replays nothing."""

    class Nothing:
        def __init__(self, *_args: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def wait_stream(self, _stream: object) -> None: ...
        def replay(self) -> None: ...

    class cuda:
        @staticmethod
        def synchronize() -> None: ...


for _name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph"):
    setattr(FakeTorch.cuda, _name, FakeTorch.Nothing)


def test_what_a_recorded_graph_reads_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)

    class Workspace: ...

    def burst() -> tuple[GraphBurst, weakref.ref[Workspace]]:
        workspace = Workspace()
        return GraphBurst([lambda: (workspace, np.zeros(1))[1]]), weakref.ref(workspace)

    graph, workspace = burst()
    gc.collect()
    assert workspace() is not None
    graph.first_estimate()
    del graph
    gc.collect()
    assert workspace() is None


def test_variants_that_lose_are_freed_before_anything_is_timed():
    case = decode_case("x", (5, 6), **SMALL)
    ours = next(r for r in RIVALS if r.name == OURS)
    made: list[weakref.ref[Burst]] = []
    alive: list[int] = []

    class Watched(JaxBurst):
        def warm_up(self) -> float:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))
            return super().warm_up()

    def variants(ops: Operands) -> dict[str, Callable[[], Burst]]:
        def make(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
            return jaxinfer.attention(q, k, v, layout, plan, variant=jaxinfer.Variant(causal=True))

        def burst() -> Burst:
            made.append(
                weakref.ref(b := Watched(make, ops.sets, (ops.layout, rivals._plan(case, ops.layout))))
            )
            return b

        return {"a": burst, "b": burst, "c": burst}

    row = measure_case(case, [replace(ours, variants=variants)], 0.0)
    assert [e.rival for e in row.entries] == [OURS]
    assert len(made) == 3 and alive == [1]


def test_a_busy_host_cannot_make_a_figure_too_good():
    call, launch = 1e-3, 1e-4
    slots, loops = 4, 9

    def run(calls: int, noise: float) -> float:
        return launch + calls * call + noise

    rng = np.random.default_rng(5)
    quiet = [(run(slots, 0.0), run(slots * loops, 0.0))] * 5
    assert per_call(quiet, slots, loops).median == pytest.approx(call)
    for scale in (1e-3, 1e-2, 1e-1):  # of seconds, up to three times the long run
        noise = rng.exponential(scale, (40, 2))
        noise[7, 0] = 0.0  # one short run in 40 is undisturbed
        runs = [(run(slots, a), run(slots * loops, b)) for a, b in noise]
        timing = per_call(runs, slots, loops)
        assert call * (1 - 1e-9) <= timing.low <= timing.median
        # The launch alone disturbed: nothing changes.
        runs = [(run(slots, a), run(slots * loops, 0.0)) for a, _ in noise]
        assert per_call(runs, slots, loops).median == pytest.approx(call)


def test_impossible_figures_are_reported_and_not_counted():
    case = replace(decode_case("x", (5, 6), **SMALL), platforms=("cpu",))
    ours = next(r for r in RIVALS if r.name == OURS)
    row = measure_case(case, [ours], 0.0, fastest=3600.0)
    assert not row.entries and row.ratio is None
    assert re.match(r"IMPOSSIBLE and not counted: .* us per call, .* needs 3600000000", row.absent[OURS])
    ceilings = {"read": 1e12, "copy": 0.5e12, "matmul": 1e15}
    assert fastest_seconds(case, ceilings, "gpu") == pytest.approx(case.kv_bytes * 1e-12 / 1.1)
    assert fastest_seconds(case, ceilings, "cpu") == 0.0


def test_ceilings_are_of_a_warm_device():
    ceilings = measure_ceilings(seconds=0.1)
    assert set(ceilings) == {"read", "copy", "matmul"} and min(ceilings.values()) > 0
    assert set(measure_ceilings(["read"], seconds=0.1)) == {"read"}
    times = iter([*np.linspace(2.0, 1.0, 60), *[1.0] * 60])
    count = 0

    def run() -> float:
        nonlocal count
        count += 1
        return next(times)

    run_until_steady(run, 10.0)
    assert 60 < count < 90


def test_what_libraries_compile_is_ready_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    events: list[str] = []
    ours = next(r for r in RIVALS if r.name == OURS)
    made = replace(ours, prepare=lambda cases: events.append(f"prepare {[c.name for c in cases]}"))
    monkeypatch.setattr(versus, "RIVALS", (made,))
    ceilings = {"read": 1e12, "copy": 0.5e12, "matmul": 1e15}

    def measured(cases: list[Case], ready: list[rivals.Rival], seconds: float) -> Iterator[Any]:
        events.append(f"measure {[r.name for r in ready]}")
        yield from ((Row(case, absent={"all": "not run"}), ceilings) for case in cases)

    monkeypatch.setattr(versus, "measure_rows", measured)
    case = replace(prefill_case("x", 1, 9, page_size=None, **SMALL), platforms=("cpu",))
    versus.bench_versus([case, replace(case, name="y")], seconds=0.0)
    assert events == ["prepare ['x', 'y']", f"measure {[OURS]}"]
    assert "y: all: not run" in capsys.readouterr().out


def test_our_kernels_are_known_beforehand():
    for case in rows.CASES:
        if "gpu" in case.platforms and sum(case.kv_len) < 20000:
            case = replace(case, head_dim=64, head_dim_vo=96)
            first, *_, last = map(KernelSpec.from_json, kernel_specs(case))
            assert first.kernel.startswith("attention") and last.kernel in ("merge", first.kernel)
            assert (first.head_dim_qk, first.head_dim_vo, first.dtype) == (64, 96, "bfloat16")
            assert first.contiguous == (case.page_size is None)


def test_wide_quartiles_are_marked(capsys: pytest.CaptureFixture[str]):
    case = decode_case("x", (5, 6), **SMALL)
    ceilings = {"read": 1e12, "copy": 0.5e12, "matmul": 1e15}
    entries = [
        Entry(OURS, "", Timing(1e-3, 0.99e-3, 1.01e-3, 5), 1e-3, None),
        Entry("peer", "v2", Timing(2e-3, 1.9e-3, 2.1e-3, 5), 1e-3, None),
    ]
    versus._report([Row(case, entries)], ceilings, {}, [])
    out = capsys.readouterr().out
    assert "1900.0-2100.0 WIDE" in out and "990.0-1010.0 WIDE" not in out
    assert "x: 2.00 x the speed of peer v2; the quartiles of peer are more than 5% apart" in out


def test_flash_attn3_is_spared_skewed_lengths():
    flash = next(r for r in RIVALS if r.name == "flash-attn3-jax")
    refused = {c.name: flash.refuses(c) for c in rows.CASES if c.kind == "decode"}
    assert {name for name, why in refused.items() if why} == {"skewed-B16", "skewed-B64", "skewed-B128"}
    assert "illegal memory access" in str(refused["skewed-B64"])


@cpu_only("the refusal where there is no GPU")
def test_rows_are_for_gpus_on_decode(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "decode", "--rows", "B1x8192"]) == 1
    assert "--rows: decode has named rows on a GPU only" in capsys.readouterr().err
    assert main(["bench", "prefill", "--peers", "nobody"]) == 1
    assert "'nobody' is not one of jax.nn xla" in capsys.readouterr().err
