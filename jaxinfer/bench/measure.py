"""Interleaved timing: every contestant runs once per round, so that drift of the machine hits all alike.

Each call is waited for; calls on a GPU, which are not, are timed in burst.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds of single calls: the median and the quartiles around it."""

    median: float
    low: float  # 25th percentile
    high: float  # 75th percentile
    rounds: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.median


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 60,
    max_seconds: float = 3.0,
    warm_up: int = 3,
) -> dict[str, Timing]:
    """Times each call `rounds` times, the order rotating; fewer (at least 5) when `max_seconds` pass.

    A call's result is waited for (`jax.block_until_ready`), so a time includes JAX's dispatch.
    """
    names = list(calls)
    for name in names:
        for _ in range(warm_up):
            jax.block_until_ready(calls[name]())
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for done in range(rounds):
        first = done % max(1, len(names))
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name].append(time.perf_counter() - begin)
        if done >= 4 and time.perf_counter() - start > max_seconds:
            break
    return {name: summary(samples) for name, samples in seconds.items()}


def summary(samples: list[float]) -> Timing:
    """Median and quartiles of samples."""
    low, median, high = np.percentile(samples, [25, 50, 75])
    return Timing(float(median), float(low), float(high), len(samples))
