"""One row of the tables: every library's variants are made, checked and timed. A library may fail; the row goes on.

Processes that die and the order of rows are in supervise.py, the tables in versus.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.burst import Burst, race
from jaxinfer.bench.cases import Case, Ints, Operands, checked_tokens, expected_tokens, make_operands
from jaxinfer.bench.measure import Timing
from jaxinfer.bench.peers import OURS, TOLERANCE
from jaxinfer.bench.rivals import Rival

_T = TypeVar("_T")
#: A call is not believed to read or multiply this much faster than the ceilings measured in the same run: it did not
#: do its work, or the clock failed.
_ABOVE_CEILING = 1.1


class DeviceLost(RuntimeError):
    """A library's failure made the device unusable for everybody in this process.

    Attributes:
      name: the library and its variant.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name = name
        self.message = message


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
    #: Library to reason: cannot, failed, impossible, no time.
    absent: dict[str, str] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Conditions:
    """How libraries are run.

    Attributes:
      excluded: why libraries or variants ("name label") are not run.
      running: entered with that name around everything a library does.
      threads: how many programs compile side by side.
    """

    excluded: Mapping[str, str] = field(default_factory=dict)
    running: Callable[[str], AbstractContextManager[object]] = nullcontext
    threads: int = 8


def fastest_seconds(case: Case, ceilings: dict[str, float], platform: str) -> float:
    """What a call cannot be faster than. A CPU keeps small operands in its caches: there only zero is impossible."""
    if platform == "cpu":
        return 0.0
    needed = max(case.kv_bytes / ceilings["read"], case.flops / ceilings["matmul"])
    return needed / _ABOVE_CEILING


def measure_case(
    case: Case,
    rivals: Sequence[Rival],
    seconds: float,
    fastest: float = 0.0,
    conditions: Conditions = Conditions(),
) -> Row:
    """Checks and times one case; spends about `seconds`, but at least five rounds of timing.

    A result at or below `fastest` seconds is reported as impossible, not as an entry.

    Raises:
      DeviceLost: a library failed and left the device unusable.
    """
    end = time.monotonic() + seconds
    row = Row(case)
    trial = _Trial(row, conditions)
    ops = make_operands(case)
    tokens = checked_tokens(ops)
    expected = expected_tokens(ops, tokens)
    best: dict[str, tuple[str, Burst, float]] = {}
    allowed = [rival for rival in rivals if rival.refuses(case) is None]
    made = _make_bursts(trial, allowed, ops)
    for rival in rivals:
        reason = rival.refuses(case)
        if reason is not None:
            row.absent[rival.name] = reason
            continue
        chosen = _choose(trial, rival, made[rival.name], tokens, expected)
        if chosen is not None:
            best[rival.name] = chosen
        else:
            row.absent.setdefault(rival.name, "no variant ran")

    def attempt(name: str, action: Callable[[], float]) -> bool:
        return trial(_label(name, best[name][0]), action) is not None

    ready = {name: burst for name, (_, burst, _) in best.items() if attempt(name, burst.warm_up)}
    timings = race(ready, seconds=end - time.monotonic(), attempt=attempt)
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


def _label(rival: str, variant: str) -> str:
    return f"{rival} {variant}".strip()


@dataclass(frozen=True)
class _Trial:
    """Runs what belongs to a library, which may raise anything; its message goes into the row."""

    row: Row
    conditions: Conditions

    def __call__(self, name: str, action: Callable[[], _T]) -> _T | None:
        """The action's result; None where the library is excluded or failed."""
        if name in self.conditions.excluded:
            self.row.absent[name] = self.conditions.excluded[name]
            return None
        with self.conditions.running(name):
            try:
                return action()
            except Exception as error:
                message = f"{type(error).__name__}: {str(error)[:300]}"
            self.row.absent[name] = f"failed: {message}"
            if not device_works():
                raise DeviceLost(name, message)
        return None


def device_works() -> bool:
    """False after an illegal memory access: the CUDA context then refuses everything, whoever asks."""
    try:
        return bool(np.asarray(jax.device_put(np.ones(8, np.float32)) + 1)[0] == 2)
    except Exception:
        return False


def _make_bursts(trial: _Trial, rivals: Sequence[Rival], ops: Operands) -> dict[str, dict[str, Burst]]:
    """All variants by library and label. XLA compiles programs side by side; torch records its graphs when that is
    over, because recording fails when another thread allocates.
    """
    made: dict[str, dict[str, Burst]] = {rival.name: {} for rival in rivals}

    def make(rival: Rival, label: str, variant: Callable[[], Burst]) -> None:
        burst = trial(_label(rival.name, label), variant)
        if burst is not None:
            made[rival.name][label] = burst

    compiling: list[Future[None]] = []
    with ThreadPoolExecutor(trial.conditions.threads) as threads:
        for rival in rivals:
            if "torch" not in rival.needs:
                variants = trial(rival.name, partial(rival.variants, ops)) or {}
                compiling += [threads.submit(make, rival, *variant) for variant in variants.items()]
    for future in compiling:
        future.result()
    for rival in rivals:
        if "torch" in rival.needs:
            for variant in (trial(rival.name, partial(rival.variants, ops)) or {}).items():
                make(rival, *variant)
    return made


def _choose(
    trial: _Trial, rival: Rival, bursts: dict[str, Burst], tokens: Ints, expected: np.ndarray[Any, Any]
) -> tuple[str, Burst, float] | None:
    """The fastest variant whose result is right; variants that fail are noted under their own label.

    Empties `bursts`: the others' workspaces, up to half a gigabyte each, are free before anything is timed.
    """
    best: tuple[float, str, Burst, float] | None = None
    for label in list(bursts):
        burst = bursts.pop(label)
        found = trial(_label(rival.name, label), partial(_estimated, burst, trial.row.case, tokens, expected))
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
