"""Timing of device work in bursts: many calls without waiting, over rotated operands, contestants taking turns.

A burst's time is the slope between a short and a long run, so that what a launch costs on the host drops out. On a
card that lowers its clocks under load, turns make drift hit all alike. Who runs is elsewhere (rivals.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxinfer.bench.measure import Timing, summary

#: Length of a long run: long enough for a stable power state, short enough for many turns.
BURST_SECONDS = 0.03


class Burst:
    """`slots` calls in a row, as often as asked.

    Attributes:
      slots: calls per loop.
      copies: copies of operands that the compiler added, None where unknown; they count as time.
    """

    slots: int
    copies: int | None = None

    def prepare(self, loops: int) -> Callable[[], Any]:
        """A function that runs `loops` loops and waits for their end."""
        raise NotImplementedError

    def output(self) -> jax.Array:
        """What the call on the first set of operands computes."""
        raise NotImplementedError

    def first_estimate(self) -> float:
        """Seconds per call, launch included: for choosing between variants of one contestant."""
        self._short = self.prepare(1)
        self._short()
        self._estimate = min(_seconds(self._short) for _ in range(5)) / self.slots
        return self._estimate

    def warm_up(self) -> float:
        """Fixes the length of the long run, runs it; seconds it took. Call after `first_estimate`."""
        loops = 1 + max(2, round(BURST_SECONDS / (self.slots * self._estimate)))
        self._long = self.prepare(loops)
        self._calls = self.slots * (loops - 1)
        self._launch = min(_seconds(self._short) for _ in range(5))
        return _seconds(self._long)

    def sample(self) -> float:
        """Seconds per call, once more."""
        return (_seconds(self._long) - self._launch) / self._calls


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class JaxBurst(Burst):
    """One jit with a call per set of operands, dispatched again and again without waiting.

    The sets differ and all results are returned, so XLA can neither join nor drop calls; in a loop inside the jit it
    moves calls whose operands do not change out of the loop.

    Args:
      call: (*operands, *shared) to an array.
      sets: operands that take turns.
      shared: operands of every call, pytrees.
    """

    def __init__(
        self,
        call: Callable[..., jax.Array],
        sets: Sequence[tuple[jax.Array, ...]],
        shared: tuple[Any, ...] = (),
    ) -> None:
        self.slots = len(sets)
        self._operands = (list(sets), jax.device_put(shared))
        program = jax.jit(lambda sets, shared: [call(*operands, *shared) for operands in sets])
        self._program = program.lower(*self._operands).compile()
        hlo = self._program.as_text() or ""
        self.copies = len(re.findall(r"= \w+\[\d[^\]]*\]\S* copy(?:-start)?\(", hlo))

    def prepare(self, loops: int) -> Callable[[], Any]:
        def run() -> Any:
            for _ in range(loops):
                results = self._program(*self._operands)
            return jax.block_until_ready(results)

        return run

    def output(self) -> jax.Array:
        result: jax.Array = self._program(*self._operands)[0]
        return result


def race(
    bursts: Mapping[str, Burst], *, seconds: float, min_rounds: int = 5, max_rounds: int = 60
) -> dict[str, Timing]:
    """Samples every burst once per round, the order rotating, until `seconds` pass."""
    names = list(bursts)
    samples: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    for done in range(max_rounds):
        if done >= min_rounds and time.perf_counter() > end:
            break
        first = done % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(bursts[name].sample())
    return {name: summary(values) for name, values in samples.items()}
