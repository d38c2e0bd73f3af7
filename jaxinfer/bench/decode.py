"""`bench decode` on a CPU: checks every peer on every shape, times them, reports. Shapes and peers are elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jaxinfer import _native
from jaxinfer.bench.measure import Timing, interleaved
from jaxinfer.bench.peers import OURS, PEERS, Peer, check_output, expected_output
from jaxinfer.bench.report import Progress, check_plot, plot_bars, print_table
from jaxinfer.bench.workloads import DecodeShape, decode_batch


@dataclass(frozen=True)
class Result:
    """What one peer did on one shape."""

    shape: DecodeShape
    peer: Peer
    timing: Timing
    error: float  # norm-wise relative, against float64

    @property
    def gigabytes_per_second(self) -> float:
        """K and V read once, over the median."""
        return self.shape.kv_bytes / self.timing.median / 1e9


def bench_decode(
    shapes: Sequence[DecodeShape], *, rounds: int = 100, output: str | None = None
) -> list[Result]:
    """Measures all shapes, prints the table, and draws it into `output` if given.

    Raises:
      ValueError: a peer computes something else than the reference; or `output` cannot be written.
      ModuleNotFoundError: `output` given without matplotlib.
    """
    if output is not None:
        check_plot(output)
    progress = Progress(len(shapes))
    results = []
    for shape in shapes:
        progress.start(f"decode {shape.name}")
        results += _measure(shape, rounds)
    progress.finish()
    _report(results)
    if output is not None:
        _plot(results, output)
        print(f"plot written to {output}")
    return results


def _measure(shape: DecodeShape, rounds: int) -> list[Result]:
    batch = decode_batch(shape)
    expected = expected_output(batch)
    calls: dict[str, Callable[[], jax.Array]] = {peer.name: peer.prepare(batch) for peer in PEERS}
    errors = {name: check_output(name, batch, call(), expected) for name, call in calls.items()}
    timings = interleaved(calls, rounds=rounds)
    return [Result(shape, peer, timings[peer.name], errors[peer.name]) for peer in PEERS]


def _report(results: Sequence[Result]) -> None:
    shape = results[0].shape
    title = (
        f"decode, {shape.num_qo_heads}/{shape.num_kv_heads} heads, head_dim {shape.head_dim}, {shape.dtype}, "
        f"page {shape.page_size}, {len(os.sched_getaffinity(0))} cores, {_native.cpu_isa()}, "
        f"jax {jax.__version__}"
    )
    columns = ("requests x kv", "peer", "median us", "quartiles us", "GB/s", "time / ours", "error")
    ours = {r.shape: r.timing.median for r in results if r.peer.name == OURS}
    rows = []
    for r in results:
        ratio = r.timing.median / ours[r.shape]
        text = "1" if r.peer.name == OURS else f"{ratio:.2f}" if r.peer.compared else f"({ratio:.2f})"
        low, median, high = (f"{1e6 * s:.0f}" for s in (r.timing.low, r.timing.median, r.timing.high))
        rows.append(
            (
                r.shape.name,
                r.peer.name,
                median,
                f"{low}-{high}",
                f"{r.gigabytes_per_second:.1f}",
                text,
                f"{r.error:.0e}",
            )
        )
    print_table(title, columns, rows, text_columns=2, notes=[f"{p.name}: {p.note}" for p in PEERS])


def _plot(results: Sequence[Result], output: str) -> None:
    shapes = list(dict.fromkeys(r.shape for r in results))
    speed = {(r.shape, r.peer.name): r.gigabytes_per_second for r in results}
    shape = shapes[0]
    plot_bars(
        output,
        f"Decode on {len(os.sched_getaffinity(0))} CPU cores: {shape.num_qo_heads}/{shape.num_kv_heads} "
        f"heads, head_dim {shape.head_dim}, {shape.dtype}, page {shape.page_size}",
        "KV gigabytes per second",
        [s.name for s in shapes],
        {peer.name: [speed[s, peer.name] for s in shapes] for peer in PEERS},
    )
