"""`bench mixed`: decode rows and prefill chunks in one attention call, against a call for each of the two.

Operands and checks are those of the tables (cases.py, row.py); bursts take turns (burst.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxinfer.bench.burst import Burst, race
from jaxinfer.bench.cases import Case, checked_tokens, expected_tokens, make_operands
from jaxinfer.bench.measure import Timing
from jaxinfer.bench.peers import OURS
from jaxinfer.bench.report import Progress, print_table
from jaxinfer.bench.rivals import RIVALS
from jaxinfer.bench.row import relative_error


@dataclass(frozen=True)
class Mix:
    """`requests` decode over `kv_len` cached tokens; `chunks` prefill `chunk` tokens, the last of `chunk_kv_len`."""

    requests: int
    kv_len: int
    chunks: int
    chunk: int
    chunk_kv_len: int

    @property
    def name(self) -> str:
        """Short label for tables."""
        return f"{self.requests} x {self.kv_len} + {self.chunks} x {self.chunk} of {self.chunk_kv_len}"

    def cases(self) -> dict[str, Case]:
        """Both in one call, and each part alone."""
        platforms = (jax.default_backend(),)
        ones, lengths = (1,) * self.requests, (self.kv_len,) * self.requests
        chunks, chunk_lengths = (self.chunk,) * self.chunks, (self.chunk_kv_len,) * self.chunks
        return {
            "both": Case(self.name, "decode", ones + chunks, lengths + chunk_lengths, platforms=platforms),
            "decode": Case(self.name, "decode", ones, lengths, platforms=platforms),
            "chunks": Case(self.name, "decode", chunks, chunk_lengths, platforms=platforms),
        }


#: From mostly reading to mostly multiplying.
MIXES = (
    Mix(63, 8192, 1, 512, 8192),
    Mix(63, 8192, 1, 2048, 8192),
    Mix(64, 2048, 1, 512, 1024),
    Mix(32, 4096, 4, 2048, 2048),
    Mix(8, 1024, 1, 4096, 4096),
)


@dataclass(frozen=True)
class MixResult:
    """Seconds per call of a mix and of its parts alone."""

    mix: Mix
    both: Timing
    decode: Timing
    chunks: Timing

    @property
    def ratio(self) -> float:
        """Of the sum of the parts; 1 when nothing is gained."""
        return self.both.median / (self.decode.median + self.chunks.median)


def bench_mixed(mixes: Sequence[Mix] = MIXES, *, seconds: float = 3.0) -> list[MixResult]:
    """Measures mixes, `seconds` each and at least five rounds; prints the table.

    Raises:
      ValueError: a result is not the reference's.
    """
    progress = Progress(len(mixes))
    results = []
    for mix in mixes:
        progress.start(f"mixed {mix.name}")
        results.append(measure_mix(mix, seconds))
    progress.finish()
    _report(results)
    return results


def measure_mix(mix: Mix, seconds: float) -> MixResult:
    """Checks and times one mix and its parts, in turns."""
    bursts = {name: _checked_burst(case) for name, case in mix.cases().items()}
    for burst in bursts.values():
        burst.warm_up()
    return MixResult(mix, **race(bursts, seconds=seconds))


def _checked_burst(case: Case) -> Burst:
    ours = next(rival for rival in RIVALS if rival.name == OURS)
    ops = make_operands(case)
    tokens = checked_tokens(ops)
    expected = expected_tokens(ops, tokens)
    (make,) = ours.variants(ops).values()
    burst = make()
    burst.first_estimate()
    relative_error(case, burst.output(), tokens, expected)
    return burst


def _report(results: Sequence[MixResult]) -> None:
    device = jax.devices()[0].device_kind
    title = f"mixed batches, 32/8 heads of 128, bfloat16, page 16, {device}, jax {jax.__version__}"
    columns = ("requests x kv + chunks", "us", "quartiles us", "decode us", "chunks us", "of the sum")
    rows = [
        (
            r.mix.name,
            f"{1e6 * r.both.median:.1f}",
            f"{1e6 * r.both.low:.1f}-{1e6 * r.both.high:.1f}",
            f"{1e6 * r.decode.median:.1f}",
            f"{1e6 * r.chunks.median:.1f}",
            f"{r.ratio:.3f}",
        )
        for r in results
    ]
    print_table(title, columns, rows, notes=["decode, chunks: the parts of the mix in calls of their own"])
