"""Runs the rows of a table in a process of their own. When a library ends it, or makes its device unusable, the rows
that are left run in a fresh process without that library. What a row does is in row.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Array, c_char
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import jax

from jaxinfer.bench.cases import Case
from jaxinfer.bench.ceilings import measure_ceilings
from jaxinfer.bench.rivals import Rival
from jaxinfer.bench.row import Conditions, DeviceLost, Row, fastest_seconds, measure_case

#: Room for the names of all libraries and variants that run at once.
_NAMES_BYTES = 1 << 12

Ceilings = dict[str, float]


@dataclass(frozen=True)
class _Job:
    """What one process does."""

    cases: Sequence[Case]
    rivals: Sequence[Rival]
    seconds: float
    ceilings: Ceilings = field(default_factory=dict)  # empty: to be measured
    excluded: dict[str, str] = field(default_factory=dict)
    threads: int = Conditions().threads


def measure_rows(
    cases: Sequence[Case], rivals: Sequence[Rival], seconds: float
) -> Iterator[tuple[Row, Ceilings]]:
    """The rows one after another, each as soon as it is measured, with the device's ceilings.

    Raises:
      RuntimeError: not even the ceilings could be measured.
    """
    end = time.monotonic() + seconds
    # What compiles beforehand has done so here.
    job = _Job(cases, [replace(rival, prepare=None) for rival in rivals], seconds)
    ceilings: Ceilings = {}
    while job.cases:
        job = replace(job, seconds=end - time.monotonic(), ceilings=ceilings)
        process, messages, active = _start(job)
        lost: DeviceLost | None = None
        try:
            while job.cases:
                message = messages.recv()
                if isinstance(message, DeviceLost):
                    lost = message
                elif isinstance(message, Row):
                    job = replace(job, cases=job.cases[1:])
                    yield message, ceilings
                else:
                    ceilings = message
        except EOFError:
            process.join()
        finally:
            process.kill()  # where the caller stops early, or nothing is left to do but to tear down
        if not job.cases:
            return
        how = lost.message if lost else _ending(process)
        if not ceilings:
            raise RuntimeError(f"the process that measures this device ended before the first row: {how}")
        suspects = [lost.name] if lost else active.value.decode().splitlines()
        if len(suspects) > 1 and job.threads > 1:  # the same row, one after another, finds out who it was
            job = replace(job, threads=1)
        elif suspects:
            why = f"left out since it ended the process on {job.cases[0].name}: {how}"
            job = replace(
                job, excluded=job.excluded | dict.fromkeys(suspects, why), threads=Conditions().threads
            )
        else:
            yield Row(job.cases[0], absent={"all": f"the process ended: {how}"}), ceilings
            job = replace(job, cases=job.cases[1:])


def _start(job: _Job) -> tuple[SpawnProcess, Connection, Array[c_char]]:
    """A process that works on the job, what it says, and the names of what it is running."""
    context = multiprocessing.get_context("spawn")
    messages, its_end = context.Pipe(duplex=False)
    active = RawArray(c_char, _NAMES_BYTES)
    process = context.Process(target=_work, args=(job, its_end, active), daemon=True)
    process.start()
    its_end.close()  # so that the end of the process is the end of the messages
    return process, messages, active


def _ending(process: SpawnProcess) -> str:
    code = process.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


class _Active:
    """Keeps the names of what is running where another process reads them after this one's death."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._names: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        self._change(self._names.append, name)
        try:
            yield
        finally:
            self._change(self._names.remove, name)

    def _change(self, change: Any, name: str) -> None:
        with self._lock:
            change(name)
            self._shared.value = "\n".join(dict.fromkeys(self._names)).encode()[: _NAMES_BYTES - 1]


def _work(job: _Job, messages: Connection, shared: Any) -> None:
    """What the process does: sends the ceilings, if it measures them, then a row for each case."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a word: the parent says "interrupted"
    end = time.monotonic() + job.seconds
    platform = jax.default_backend()
    ceilings = job.ceilings
    if not ceilings:
        ceilings = measure_ceilings(seconds=0.1 if platform == "cpu" else 1.0)
        messages.send(ceilings)
    conditions = Conditions(job.excluded, _Active(shared).running, job.threads)
    for left, case in zip(range(len(job.cases), 0, -1), job.cases, strict=True):
        share = (end - time.monotonic()) / left
        if share <= 0:
            row = Row(case, absent={"all": "not run: the time was over (--seconds, --rows)"})
        else:
            fastest = fastest_seconds(case, ceilings, platform)
            try:
                row = measure_case(case, job.rivals, share, fastest, conditions)
            except DeviceLost as lost:
                messages.send(lost)
                os._exit(1)  # whatever else runs at exit would fail or hang
        messages.send(row)
        gc.collect()
