"""`bench decode` on a GPU and `bench prefill`: runs the rows of cases.py, checks, times, reports.

A library that is not installed or fails is listed; the run goes on. Who runs is in rivals.py.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.burst import Burst, JaxBurst, race
from jaxinfer.bench.cases import Case, Ints, Operands, checked_tokens, expected_tokens, make_operands
from jaxinfer.bench.measure import Timing
from jaxinfer.bench.peers import TOLERANCE
from jaxinfer.bench.report import Progress, check_plot, plot_bars, print_table
from jaxinfer.bench.rivals import OURS, RIVALS, Rival

_T = TypeVar("_T")
#: A call is not believed to read or multiply this much faster than the ceilings measured in the same run (decode only
#: reads, which an H200 does at 1.06 times the rate of a copy): it did not do its work, or the clock failed.
_ABOVE_CEILING = 1.15
#: Quartiles further apart than this part of the median are marked: such a figure decides nothing.
_WIDE = 0.05
#: Making sure that cached kernels are there takes this long.
_PREPARED_SECONDS = 10.0
_PACKAGES = ("jax", "torch", "flashinfer-python", "flash-attn3-jax", "nvidia-cudnn-cu13")


@dataclass(frozen=True)
class Entry:
    """One library's best variant on one row."""

    rival: str
    variant: str
    timing: Timing
    error: float  # norm-wise relative, against float32
    copies: int | None


@dataclass
class Row:
    """What happened on one case."""

    case: Case
    entries: list[Entry] = field(default_factory=list)
    absent: dict[str, str] = field(
        default_factory=dict
    )  # library to reason: cannot, failed, impossible, no time

    @property
    def ours(self) -> Entry | None:
        return next((e for e in self.entries if e.rival == OURS), None)

    @property
    def best_peer(self) -> Entry | None:
        peers = [e for e in self.entries if e.rival != OURS]
        return min(peers, key=lambda e: e.timing.median, default=None)

    @property
    def ratio(self) -> float | None:
        """Our speed over the best peer's; above 1 we are faster."""
        if self.ours is None or self.best_peer is None:
            return None
        return self.best_peer.timing.median / self.ours.timing.median

    def speed(self, entry: Entry) -> float:
        return self.case.rate[0] / entry.timing.median


def bench_versus(
    cases: Sequence[Case],
    *,
    seconds: float = 150.0,
    output: str | None = None,
    json_path: str | None = None,
    rivals: Sequence[str] | None = None,
) -> list[Row]:
    """Measures cases until `seconds` have passed; prints the table, writes plot and JSON.

    Before anything is timed, libraries that compile their kernels do so to the end; where nothing of that is in their
    caches it takes minutes, which do not count.

    Raises:
      ValueError: an unknown name in `rivals`; `output` cannot be written.
      ModuleNotFoundError: `output` given without matplotlib.
    """
    if output is not None:
        check_plot(output)
    kind, platform = cases[0].kind, jax.default_backend()
    known = [r for r in RIVALS if kind in r.kinds and platform in r.platforms]
    for name in rivals or ():
        if name not in {r.name for r in known}:
            raise ValueError(
                f"--peers: {name!r} is not one of {', '.join(r.name for r in known if r.name != OURS)}"
            )
    asked = [r for r in known if r.name == OURS or rivals is None or r.name in rivals]
    missing = {r.name: r.missing() for r in asked if r.missing()}
    ready = [r for r in asked if r.name not in missing]
    compiling = [rival for rival in ready if rival.prepare is not None]
    progress = Progress(len(compiling) + 1 + len(cases))
    start = time.monotonic()
    for rival in compiling:
        progress.start(f"{rival.name}: compiling kernels where they are not cached")
        assert rival.prepare is not None
        rival.prepare([case for case in cases if rival.refuses(case) is None])
    prepared = time.monotonic() - start
    end = start + max(prepared, _PREPARED_SECONDS) - _PREPARED_SECONDS + seconds
    progress.start(f"ceilings of this device (kernels ready after {prepared:.1f} s)")
    ceilings = measure_ceilings(small=platform == "cpu")
    rows = []
    for left, case in zip(range(len(cases), 0, -1), cases, strict=True):
        progress.start(f"{kind} {case.name}")
        if time.monotonic() > end:
            rows.append(Row(case, absent={"all": f"not run: {seconds:.0f} s were over (--seconds, --rows)"}))
        else:
            share = (end - time.monotonic()) / left
            rows.append(measure_case(case, ready, share, fastest_seconds(case, ceilings, platform)))
        gc.collect()
        if json_path is not None:  # after every row: a run that is cut short keeps what it has
            with open(json_path, "w") as file:
                json.dump(as_json(rows, ceilings, missing), file, indent=1)
    progress.finish()
    _report(rows, ceilings, missing, ready)
    if output is not None:
        _plot(rows, output)
        print(f"plot written to {output}")
    return rows


def measure_ceilings(*, small: bool) -> dict[str, Timing]:
    """Seconds for what no attention beats: a copy (per byte read or written), a bf16 product (per operation)."""
    count, side = (1 << 22, 512) if small else (1 << 29, 8192)
    x = jax.random.normal(jax.random.key(0), (count,), jnp.bfloat16)
    a = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    bursts = {"copy": JaxBurst(jnp.negative, [(x,)]), "matmul": JaxBurst(jnp.matmul, [(a, a.T)])}
    work = {"copy": 2.0 * x.nbytes, "matmul": 2.0 * side**3}
    for burst in bursts.values():
        burst.first_estimate()
        burst.warm_up()
    timings = race(bursts, seconds=1.0)
    return {
        n: Timing(t.median / work[n], t.low / work[n], t.high / work[n], t.rounds) for n, t in timings.items()
    }


def fastest_seconds(case: Case, ceilings: dict[str, Timing], platform: str) -> float:
    """What a call cannot be faster than. A CPU keeps small operands in its caches: there only zero is impossible."""
    if platform == "cpu":
        return 0.0
    needed = max(case.kv_bytes * ceilings["copy"].median, case.flops * ceilings["matmul"].median)
    return needed / _ABOVE_CEILING


def measure_case(case: Case, rivals: Sequence[Rival], seconds: float, fastest: float = 0.0) -> Row:
    """Checks and times one case; spends about `seconds`, but at least five rounds of timing.

    A result at or below `fastest` seconds is reported as impossible, not as an entry.
    """
    end = time.monotonic() + seconds
    row = Row(case)
    ops = make_operands(case)
    tokens = checked_tokens(ops)
    expected = expected_tokens(ops, tokens)
    best: dict[str, tuple[str, Burst, float]] = {}
    allowed = [rival for rival in rivals if rival.refuses(case) is None]
    made = _make_bursts(row, allowed, ops)
    for rival in rivals:
        reason = rival.refuses(case)
        if reason is not None:
            row.absent[rival.name] = reason
            continue
        chosen = _choose(row, rival, made[rival.name], tokens, expected)
        if chosen is not None:
            best[rival.name] = chosen
        else:
            row.absent.setdefault(rival.name, "no variant ran")
    ready = {name: burst for name, (_, burst, _) in best.items() if _attempt(row, name, burst.warm_up)}
    timings = race(ready, seconds=end - time.monotonic())
    for name, timing in timings.items():
        variant, burst, error = best[name]
        if not timing.median > fastest:
            row.absent[name] = (
                f"IMPOSSIBLE and not counted: {timing.median * 1e6:.2f} us per call, where this device needs "
                f"{fastest * 1e6:.2f} us at least"
            )
        else:
            row.entries.append(Entry(name, variant, timing, error, burst.copies))
    return row


def _attempt(row: Row, name: str, action: Callable[[], _T]) -> _T | None:
    """Another library may raise anything; its message goes into the row. None: it did."""
    try:
        return action()
    except Exception as error:
        row.absent[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        return None


def _make_bursts(row: Row, rivals: Sequence[Rival], ops: Operands) -> dict[str, dict[str, Burst]]:
    """All variants by library and label. XLA compiles programs side by side; torch records its graphs when that is
    over, because recording fails when another thread allocates.
    """
    made: dict[str, dict[str, Burst]] = {rival.name: {} for rival in rivals}

    def make(rival: Rival, label: str, variant: Callable[[], Burst]) -> None:
        burst = _attempt(row, f"{rival.name} {label}".strip(), variant)
        if burst is not None:
            made[rival.name][label] = burst

    with ThreadPoolExecutor(8) as threads:
        for rival in sorted(rivals, key=lambda rival: "torch" in rival.needs):
            variants = _attempt(row, rival.name, partial(rival.variants, ops)) or {}
            if "torch" in rival.needs:
                threads.shutdown()
            for label, variant in variants.items():
                if "torch" in rival.needs:
                    make(rival, label, variant)
                else:
                    threads.submit(make, rival, label, variant)
    return made


def _choose(
    row: Row, rival: Rival, bursts: dict[str, Burst], tokens: Ints, expected: np.ndarray[Any, Any]
) -> tuple[str, Burst, float] | None:
    """The fastest variant whose result is right; variants that fail are noted under their own label."""
    best: tuple[float, str, Burst, float] | None = None
    for label, burst in bursts.items():
        name = f"{rival.name} {label}".strip()
        found = _attempt(row, name, partial(_estimated, burst, row.case, tokens, expected))
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], label, burst, found[1])
    return None if best is None else best[1:]


def _estimated(burst: Burst, case: Case, tokens: Ints, expected: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Seconds per call, and the error."""
    return burst.first_estimate(), relative_error(case, burst.output(), tokens, expected)


def relative_error(case: Case, result: jax.Array, tokens: Ints, expected: np.ndarray[Any, Any]) -> float:
    """Norm-wise relative error at `tokens`.

    Raises:
      ValueError: wrong shape, an element that is not finite, or an error that is too large for the dtype.
    """
    shape = (sum(case.q_len), case.num_qo_heads, case.head_dims[1])
    if result.shape != shape:
        raise ValueError(f"got shape {result.shape}, expected {shape}")
    if not bool(jnp.isfinite(result).all()):
        raise ValueError("the result has elements that are not finite")
    got = np.asarray(result[tokens].astype(jnp.float32))
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    if not error < TOLERANCE[case.dtype]:
        raise ValueError(f"relative error {error:.2e}, expected below {TOLERANCE[case.dtype]:.0e}")
    return error


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_json(
    rows: Sequence[Row], ceilings: dict[str, Timing], missing: dict[str, list[str]]
) -> dict[str, Any]:
    """All numbers: seconds per call, speeds in the row's unit, ceilings in bytes and operations per second."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": _versions(),
        "copy_bytes_per_second": 1 / ceilings["copy"].median,
        "matmul_flops": 1 / ceilings["matmul"].median,
        "not_installed": missing,
        "rows": [
            {
                "row": row.case.name,
                "kind": row.case.kind,
                "page_size": row.case.page_size,
                "heads": [row.case.num_qo_heads, row.case.num_kv_heads, *row.case.head_dims],
                "causal": row.case.causal,
                "dtype": row.case.dtype,
                "kv_tokens": sum(row.case.kv_len),
                "longest": max(row.case.kv_len),
                "unit": row.case.rate[1],
                "ratio": row.ratio,
                "absent": row.absent,
                "entries": [
                    {
                        "name": e.rival,
                        "variant": e.variant,
                        "seconds": e.timing.median,
                        "quartiles": [e.timing.low, e.timing.high],
                        "spread": e.timing.spread,
                        "rounds": e.timing.rounds,
                        "speed": row.speed(e),
                        "error": e.error,
                        "copies": e.copies,
                    }
                    for e in row.entries
                ],
            }
            for row in rows
        ],
    }


def _report(
    rows: Sequence[Row],
    ceilings: dict[str, Timing],
    missing: dict[str, list[str]],
    ready: Sequence[Rival],
) -> None:
    first = rows[0].case
    copy, matmul = 1 / ceilings["copy"].median / 1e12, 1 / ceilings["matmul"].median / 1e12
    title = (
        f"{first.kind}, {jax.devices()[0].device_kind}, {', '.join(f'{n} {v}' for n, v in _versions().items())}; "
        f"copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s"
    )
    unit = first.rate[1]
    ceiling = copy if first.kind == "decode" else matmul
    columns = (
        "row",
        "who",
        "variant",
        "median us",
        "quartiles us",
        unit,
        "% ceiling",
        "time / ours",
        "error",
    )
    lines: list[tuple[str, ...]] = []
    summary = []
    for row in rows:
        ours = row.ours
        for e in sorted(row.entries, key=lambda e: e.timing.median):
            t = e.timing
            lines.append(
                (
                    row.case.name,
                    e.rival,
                    e.variant + (f" ({e.copies} copies)" if e.copies else ""),
                    f"{1e6 * t.median:.1f}",
                    f"{1e6 * t.low:.1f}-{1e6 * t.high:.1f}" + (" WIDE" if t.spread > _WIDE else ""),
                    f"{row.speed(e):.3g}",
                    f"{100 * row.speed(e) / ceiling:.0f}",
                    "1" if e is ours else "" if ours is None else f"{t.median / ours.timing.median:.2f}",
                    f"{e.error:.0e}",
                )
            )
        best = row.best_peer
        if row.ratio is not None and best is not None:
            wide = [e.rival for e in (row.ours, best) if e is not None and e.timing.spread > _WIDE]
            summary.append(
                f"{row.case.name}: {row.ratio:.2f} x the speed of {best.rival} {best.variant}".rstrip()
                + (f"; the quartiles of {' and '.join(wide)} are more than 5% apart" if wide else "")
            )
    absent = [f"{row.case.name}: {name}: {why}" for row in rows for name, why in row.absent.items()]
    notes = [f"{r.name}: {r.note}" for r in ready]
    notes += [f"{name}: not installed ({', '.join(needs)})" for name, needs in missing.items()]
    print_table(title, columns, lines, text_columns=3, notes=[*notes, *absent, *summary])


def _plot(rows: Sequence[Row], output: str) -> None:
    names = list(dict.fromkeys(e.rival for row in rows for e in row.entries))
    speeds = {
        name: [next((row.speed(e) for e in row.entries if e.rival == name), 0.0) for row in rows]
        for name in names
    }
    case = rows[0].case
    what = "KV terabytes per second" if case.kind == "decode" else "TFLOP/s"
    title = f"{case.kind} on {jax.devices()[0].device_kind}, {case.dtype}"
    plot_bars(output, title, what, [row.case.name for row in rows], speeds)
