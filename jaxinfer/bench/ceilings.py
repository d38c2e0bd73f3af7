"""What this device can do at most: read memory, copy it, multiply matrices. Nothing of attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.burst import Burst, JaxBurst, race

#: Bytes of the array that is read, much more than any cache; side of the matrices.
READ_BYTES, SIDE = 4 << 30, 8192
#: The same for a CPU, where the figures are for information.
READ_BYTES_CPU, SIDE_CPU = 8 << 20, 512
#: A device is warm when the median of this many runs is that of as many runs before, to a part in 100: a waking GPU
#: raises its clocks for about a second.
_STEADY_RUNS, _STEADY = 12, 0.01


def _burst(name: str) -> tuple[Burst, float]:
    """What runs for one ceiling, and the bytes or operations of a call."""
    on_cpu = jax.default_backend() == "cpu"
    if name == "matmul":
        side = SIDE_CPU if on_cpu else SIDE
        a = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
        return JaxBurst(jnp.matmul, [(a, a.T)]), 2.0 * side**3
    size = (READ_BYTES_CPU if on_cpu else READ_BYTES) // (2 if name == "read" else 8)
    x = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    if name == "read":
        return JaxBurst(lambda x: jnp.sum(x, dtype=jnp.float32), [(x,)]), 1.0 * x.nbytes
    return JaxBurst(jnp.negative, [(x,)]), 2.0 * x.nbytes


def measure_ceilings(
    names: Iterable[str] = ("read", "copy", "matmul"), seconds: float = 1.0
) -> dict[str, float]:
    """Bytes or operations per second: "read" (the sum of an array), "copy" (read and written), "matmul" (bfloat16).

    Takes up to ten times `seconds`, most of it warming up. Each is the best quartile of its runs on a warm device:
    a ceiling that is too low would make true figures look impossible.
    """
    bursts, work = {}, {}
    for name in names:
        bursts[name], work[name] = _burst(name)
    for burst in bursts.values():
        burst.first_estimate()
        burst.warm_up()
    for burst in bursts.values():
        run_until_steady(burst.warm_up, 3 * seconds)
    timings = race(bursts, seconds=seconds)
    return {name: work[name] / timing.low for name, timing in timings.items()}


def run_until_steady(run: Callable[[], float], max_seconds: float) -> None:
    """Runs until the times that `run` returns no longer change."""
    end = time.monotonic() + max_seconds
    times: list[float] = []
    while time.monotonic() < end:
        times.append(run())
        before, now = times[-2 * _STEADY_RUNS : -_STEADY_RUNS], times[-_STEADY_RUNS:]
        if len(before) == _STEADY_RUNS and abs(np.median(now) / np.median(before) - 1) < _STEADY:
            return
