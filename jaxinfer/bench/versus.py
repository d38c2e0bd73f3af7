"""`bench decode` on a GPU and `bench prefill`: who takes part, the table, the plot and the JSON of their rows.

A library that is not installed or fails is listed; the run goes on. Who can take part is in rivals.py, what happens
on a row in row.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from jaxinfer.bench.cases import Case
from jaxinfer.bench.peers import OURS
from jaxinfer.bench.report import Progress, check_folder, check_plot, plot_bars, print_table
from jaxinfer.bench.rivals import RIVALS, Rival
from jaxinfer.bench.row import Row
from jaxinfer.bench.supervise import measure_rows

#: Quartiles further apart than this part of the median are marked: such a figure decides nothing.
_WIDE = 0.05
#: Making sure that cached kernels are there takes this long.
_PREPARED_SECONDS = 10.0
_PACKAGES = ("jax", "torch", "flashinfer-python", "flash-attn3-jax", "nvidia-cudnn-cu13")


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
      ValueError: an unknown name in `rivals`; `output` or `json_path` cannot be written.
      ModuleNotFoundError: `output` given without matplotlib.
    """
    if output is not None:
        check_plot(output)
    if json_path is not None:
        check_folder("--json", json_path)
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
    progress = Progress(len(compiling) + len(cases))
    start = time.monotonic()
    for rival in compiling:
        progress.start(f"{rival.name}: compiling kernels where they are not cached")
        assert rival.prepare is not None
        rival.prepare([case for case in cases if rival.refuses(case) is None])
    prepared = time.monotonic() - start
    rows: list[Row] = []
    ceilings: dict[str, float] = {}

    def announce() -> None:
        if len(rows) < len(cases):
            what = f"{kind} {cases[len(rows)].name}"
            progress.start(what if rows else f"ceilings of this device, {what} (kernels: {prepared:.1f} s)")

    announce()
    for row, ceilings in measure_rows(cases, ready, seconds - min(prepared, _PREPARED_SECONDS)):
        rows.append(row)
        if json_path is not None:  # after every row: a run that is cut short keeps what it has
            with open(json_path, "w") as file:
                json.dump(as_json(rows, ceilings, missing), file, indent=1)
        announce()
    progress.finish()
    _report(rows, ceilings, missing, ready)
    if output is not None:
        _plot(rows, output)
        print(f"plot written to {output}")
    return rows


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_json(rows: Sequence[Row], ceilings: dict[str, float], missing: dict[str, list[str]]) -> dict[str, Any]:
    """All numbers: seconds per call, speeds in the row's unit, ceilings in bytes and operations per second."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": _versions(),
        "read_bytes_per_second": ceilings["read"],
        "copy_bytes_per_second": ceilings["copy"],
        "matmul_flops": ceilings["matmul"],
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
    ceilings: dict[str, float],
    missing: dict[str, list[str]],
    ready: Sequence[Rival],
) -> None:
    first = rows[0].case
    read, copy, matmul = (ceilings[name] / 1e12 for name in ("read", "copy", "matmul"))
    title = (
        f"{first.kind}, {jax.devices()[0].device_kind}, {', '.join(f'{n} {v}' for n, v in _versions().items())}; "
        f"reading {read:.2f} TB/s, copying {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s"
    )
    unit = first.rate[1]
    ceiling = read if first.kind == "decode" else matmul
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
