"""Rivals for test_bench_supervise.py that end their process or lose their device when asked to.

In a module of their own: they are sent to another process, which must be able to import them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxinfer.bench import row
from jaxinfer.bench.burst import Burst, JaxBurst
from jaxinfer.bench.cases import Operands
from jaxinfer.bench.rivals import Variants


def attend(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


class Quick(JaxBurst):
    """Rows take no longer than their processes' start."""

    def __init__(self, ops: Operands) -> None:
        super().__init__(attend, ops.sets)

    def first_estimate(self) -> float:
        super().first_estimate()
        self._estimate = 1e-3
        return self._estimate


class Deadly(Quick):
    """Quick and right, until it is asked for `method` on `case`."""

    def __init__(self, ops: Operands, case: str, method: str, end: Callable[[], Any]) -> None:
        super().__init__(ops)
        self._method, self._end = (method if ops.case.name == case else ""), end

    def first_estimate(self) -> float:
        if self._method == "first_estimate":
            self._end()
        return super().first_estimate()

    def sample(self) -> float:
        if self._method == "sample":
            self._end()
        return super().sample()


def quick(ops: Operands) -> Variants:
    return {"": partial(Quick, ops)}


def deadly(case: str, method: str, end: Callable[[], Any], ops: Operands) -> Variants:
    return {"deadly": partial(Deadly, ops, case, method, end)}


def deadly_or_not(case: str, end: Callable[[], Any], ops: Operands) -> Variants:
    return {"safe": partial(Quick, ops)} | deadly(case, "first_estimate", end, ops)


def dies_while_made(ops: Operands) -> Variants:
    def burst() -> Burst:
        os.abort()

    return {"": burst}


def lose_device() -> None:
    """As after an illegal memory access: this call fails and so does everybody's next one."""
    row.device_works = lambda: False
    raise OSError("CUDA_ERROR_ILLEGAL_ADDRESS")
