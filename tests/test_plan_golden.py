"""Freezes the packed format: whole plans, word for word, of a few fixed layouts.

A difference means that compiled programs, saved plans or other executors read something else than they were
built for: raise kPlanVersion in csrc/plan/format.h, then write the file anew with
`python tests/test_plan_golden.py`. Where only decisions differ, another split of queues say, the latter is enough.
Costs are given here, so that tuning the defaults changes nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plan_layouts import Setting

import jaxinfer
from jaxinfer import BlockSparse, Variant

FILE = Path(__file__).parent / "data" / "plan_golden.txt"
COSTS = (8, 1, 1, 32, 1)


def decode_layout() -> BlockSparse:
    """Four requests of one token, one of them without keys, and two padding tokens."""
    return jaxinfer.paged(
        [0, 1, 2, 3, 4], [0, 3, 20, 20, 21], np.arange(21), [40, 270, 0, 3], 16, num_tokens=6
    )


def prefill_layout() -> BlockSparse:
    """A chunk of 40 tokens at the end of 100, a decode token, and a chunk longer than its keys."""
    return jaxinfer.ragged([0, 40, 41, 44], [0, 100, 290, 291])


def composed_layout() -> BlockSparse:
    """A prefix of 64 shared by two requests, one with a suffix of its own."""
    prefix = jaxinfer.paged([0, 3], [0, 4], [3, 4, 5, 6], [64], 16)
    return jaxinfer.compose(prefix, jaxinfer.paged([0, 2, 3], [0, 1, 1], [9], [10, 0], 16))


def block_mask_layout() -> BlockSparse:
    mask = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    return jaxinfer.from_block_mask(mask, 5, 24)


SMALL, LARGE = (16, True, 3, 6), (128, True, 2, 4)
CAUSAL = Variant(causal=True)
CASES: dict[str, tuple[BlockSparse, Setting]] = {
    "decode": (decode_layout(), Setting(4, 2, (SMALL,), costs=COSTS)),
    "prefill": (prefill_layout(), Setting(4, 2, (SMALL, LARGE), CAUSAL, COSTS)),
    "side_by_side": (prefill_layout(), Setting(4, 2, (SMALL, LARGE), CAUSAL, COSTS, side_by_side=True)),
    "unpacked": (prefill_layout(), Setting(4, 2, (SMALL, (16, False, 2, 4)), CAUSAL, COSTS)),
    "composed": (composed_layout(), Setting(1, 2, (SMALL,), CAUSAL, COSTS)),
    "block_mask": (
        block_mask_layout(),
        Setting(5, 1, (SMALL,), Variant(window_left=30, window_right=20), COSTS),
    ),
    "runs": (decode_layout(), Setting(4, 2, (SMALL,), costs=COSTS, runs=True)),
    "batch_invariant": (
        decode_layout(),
        Setting(4, 2, (SMALL,), Variant(window_left=200), COSTS, batch_invariant=True, split_tokens=64),
    ),
    "no_rows": (jaxinfer.ragged([0], [0], num_tokens=3), Setting(4, 2, (SMALL,), costs=COSTS)),
}


def read() -> dict[str, list[int]]:
    lines = (line.split() for line in FILE.read_text().splitlines())
    return {name: [int(word) for word in words] for name, *words in lines}


@pytest.mark.parametrize("name", CASES)
def test_packed_plan_is_frozen(name: str) -> None:
    layout, setting = CASES[name]
    assert setting.pack(layout).tolist() == read()[name]


def test_golden_file_has_these_cases() -> None:
    assert list(read()) == list(CASES)


if __name__ == "__main__":
    rows = (" ".join([name, *map(str, setting.pack(layout))]) for name, (layout, setting) in CASES.items())
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(rows) + "\n")
