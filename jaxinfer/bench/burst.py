"""Timing of device work in bursts: many calls in one launch, over rotated operands, contestants taking turns.

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
      copies: copies of operands that the compiler added to the loop, None where unknown; they count as time.
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
    """A traceable function in a loop inside one jit.

    Args:
      call: (first, *rest, *shared) to an array; `first` is q, of which the loop makes a new value each time.
      sets: operands that take turns.
      shared: operands of every call, pytrees.
      slots: calls per loop; the default has one per set.
    """

    def __init__(
        self,
        call: Callable[..., jax.Array],
        sets: Sequence[tuple[jax.Array, ...]],
        shared: tuple[Any, ...] = (),
        slots: int | None = None,
    ) -> None:
        self.slots = max(len(sets), slots or 0)
        self._call, self._sets, self._shared = call, list(sets), jax.device_put(shared)
        self._output: jax.Array | None = None

    def prepare(self, loops: int) -> Callable[[], Any]:
        def program(sets: Any, shared: Any) -> Any:
            def body(_: Any, outs: list[Any]) -> list[Any]:
                new = []
                for slot, before in enumerate(outs):
                    first, *rest = sets[slot % len(sets)]
                    # Without the barrier the call does not depend on the loop: XLA could run it once.
                    first, _ = jax.lax.optimization_barrier((first, before))
                    new.append(self._call(first, *rest, *shared))
                return new

            shape = jax.eval_shape(self._call, *sets[0], *shared)
            zeros = [jax.numpy.zeros(shape.shape, shape.dtype) for _ in range(self.slots)]
            return jax.lax.fori_loop(0, loops, body, zeros)

        compiled = jax.jit(program).lower(self._sets, self._shared).compile()
        self.copies = _loop_copies(compiled.as_text() or "")

        def run() -> Any:
            return jax.block_until_ready(compiled(self._sets, self._shared))

        if loops == 1:
            self._output = run()[0]
        return run

    def output(self) -> jax.Array:
        if self._output is None:
            self.prepare(1)
        assert self._output is not None
        return self._output


def _loop_copies(hlo: str) -> int:
    """Copies of arrays (not scalars) in computations other than the entry."""
    bodies = re.split(r"\n(?=ENTRY )", hlo)[0]
    return len(re.findall(r"= \w+\[\d[^\]]*\]\S* copy(?:-start)?\(", bodies))


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
