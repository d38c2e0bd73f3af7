"""A library that ends its process, or makes its device unusable, costs the table nothing but itself. No times."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_rivals import deadly, deadly_or_not, dies_while_made, lose_device, quick

from jaxinfer.bench import row, supervise
from jaxinfer.bench.cases import Case, Operands, prefill_case
from jaxinfer.bench.rivals import RIVALS, Rival, Variants

SMALL: dict[str, Any] = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "bfloat16"}
CASES = [prefill_case(name, 1, 9, page_size=None, platforms=("cpu",), **SMALL) for name in ("x", "y", "z")]


def rival(name: str, variants: Callable[[Operands], Variants]) -> Rival:
    return replace(RIVALS[0], name=name, variants=variants, prepare=None)


OTHER = rival("other", quick)


@pytest.fixture(autouse=True)
def processes_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a process is the same everywhere, and on a GPU each would take seconds to start."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def measured(*rivals: Rival, cases: list[Case] = CASES) -> list[row.Row]:
    rows = [row for row, _ in supervise.measure_rows(cases, [OTHER, *rivals], 60.0)]
    assert [r.case.name for r in rows] == [c.name for c in cases]
    return rows


def who(row: row.Row) -> set[str]:
    return {e.rival for e in row.entries}


def test_a_process_that_dies_is_replaced():
    first, *later = measured(rival("peer", partial(deadly, "y", "sample", os.abort)))
    assert who(first) == {"other", "peer"} and not first.absent
    for r in later:
        assert who(r) == {"other"}
        assert r.absent["peer deadly"] == "left out since it ended the process on y: SIGABRT"


def test_a_lost_device_ends_the_process_and_its_message_is_kept():
    for r in measured(rival("peer", partial(deadly_or_not, "x", lose_device)), cases=CASES[:2]):
        assert who(r) == {"other", "peer"}
        assert r.absent == {
            "peer deadly": "left out since it ended the process on x: OSError: CUDA_ERROR_ILLEGAL_ADDRESS"
        }


def test_who_dies_while_others_compile_is_found():
    rows = measured(rival("one", dies_while_made), rival("two", quick), cases=CASES[:1])
    assert who(rows[0]) == {"other", "two"}
    assert rows[0].absent["one"] == "left out since it ended the process on x: SIGABRT"


def test_a_process_that_dies_outside_any_library():
    # No such dtype: the operands of that row cannot be made.
    cases = [CASES[0], replace(CASES[1], dtype="float33"), CASES[2]]
    rows = measured(cases=cases)
    assert who(rows[0]) == who(rows[2]) == {"other"}
    assert rows[1].absent == {"all": "the process ended: exit status 1"}


def test_rows_without_time_say_so():
    rows = [r for r, _ in supervise.measure_rows(CASES[:2], [OTHER], 0.0)]
    assert [r.absent for r in rows] == [{"all": "not run: the time was over (--seconds, --rows)"}] * 2


def test_rivals_can_be_sent_to_a_process():
    for known in RIVALS:
        assert pickle.loads(pickle.dumps(known)).name == known.name
