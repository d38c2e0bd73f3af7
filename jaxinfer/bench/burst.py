"""Timing of device work in bursts: many calls without waiting, over rotated operands, contestants taking turns.

A burst runs short and long in every round. The long run's time less the shortest short run's is what the calls
between them took: what a launch costs on the host drops out, and a busy host can only add. On a card that lowers its
clocks under load, turns make drift hit all alike. Who runs is elsewhere (rivals.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
        self._loops = 1 + max(2, round(BURST_SECONDS / (self.slots * self._estimate)))
        self._long = self.prepare(self._loops)
        self._runs: list[tuple[float, float]] = []
        return _seconds(self._long)

    def sample(self) -> float:
        """Runs short and long once more; seconds of both."""
        self._runs.append((_seconds(self._short), _seconds(self._long)))
        return sum(self._runs[-1])

    def timing(self) -> Timing:
        """Seconds per call, of all samples; not above zero where the clock or the calls failed."""
        return per_call(self._runs, self.slots, self._loops)


def per_call(runs: Sequence[tuple[float, float]], slots: int, loops: int) -> Timing:
    """Seconds per call from (short, long) runs of `slots` and `loops * slots` calls.

    Both estimates of a round lie above the truth, whatever the host did meanwhile, so the smaller counts: all of the
    long run, whose launch counts as work, and the long run less the shortest short one. The latter is worse where a
    short run is done before the card lowers its clocks.
    """
    shortest = min(short for short, _ in runs)
    return summary(
        [min(long / (loops * slots), (long - shortest) / ((loops - 1) * slots)) for _, long in runs]
    )


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class JaxBurst(Burst):
    """One jit with a call per set of operands, dispatched again and again without waiting.

    The sets differ and all results are returned, so XLA can neither join nor drop calls; in a loop inside the jit it
    moves calls whose operands do not change out of the loop. Results overwrite those of the run before, as a serving
    step's cache does: with new addresses at every run XLA would record its command buffers again and again.

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

        def calls(before: Any, sets: Any, shared: Any) -> Any:
            return [call(*operands, *shared) for operands in sets]

        shapes = jax.eval_shape(calls, None, *self._operands)
        self._results = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        program = jax.jit(calls, donate_argnums=0, keep_unused=True)
        self._program = program.lower(self._results, *self._operands).compile()
        hlo = self._program.as_text() or ""
        self.copies = len(re.findall(r"= \w+\[\d[^\]]*\]\S* copy(?:-start)?\(", hlo))

    def prepare(self, loops: int) -> Callable[[], Any]:
        def run() -> Any:
            for _ in range(loops):
                self._results = self._program(self._results, *self._operands)
            return jax.block_until_ready(self._results)

        return run

    def output(self) -> jax.Array:
        self.prepare(1)()
        return jnp.copy(self._results[0])


def _always(name: str, action: Callable[[], float]) -> bool:
    action()
    return True


def race(
    bursts: Mapping[str, Burst],
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 60,
    attempt: Callable[[str, Callable[[], float]], bool] = _always,
) -> dict[str, Timing]:
    """Samples every burst once per round, the order rotating, until `seconds` pass.

    `attempt` runs a sample; a burst for which it says False is out.
    """
    names = list(bursts)
    end = time.perf_counter() + seconds
    for done in range(max_rounds):
        if done >= min_rounds and time.perf_counter() > end:
            break
        first = done % max(1, len(names))
        names = [name for name in names[first:] + names[:first] if attempt(name, bursts[name].sample)]
    return {name: bursts[name].timing() for name in bursts if name in names}
