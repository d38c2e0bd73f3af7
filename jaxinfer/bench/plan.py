"""`bench plan`: what a serving step costs on the host before anything runs: its layout, its plan.

Batches are in workloads.py, the timing in measure.py.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import numpy as np

import jaxinfer
from jaxinfer import _native
from jaxinfer.bench.measure import interleaved
from jaxinfer.bench.report import Progress, print_table
from jaxinfer.bench.workloads import PLAN_SHAPES, PlanShape, plan_arrays
from jaxinfer.layout import BlockSparse
from jaxinfer.plan import host_arrays, planner_of

_CAUSAL = jaxinfer.Variant(causal=True)


def bench_plan(*, requests: Sequence[int] | None = None, rounds: int = 200) -> None:
    """Times all sizes and prints the table; `requests=None`: PLAN_SHAPES, else decode batches of these sizes.

    Raises:
      ValueError: a plan lists too few or too many KV tokens.
    """
    shapes = PLAN_SHAPES if requests is None else [PlanShape(n, 0) for n in requests]
    progress = Progress(len(shapes))
    rows = []
    for shape in shapes:
        progress.start(f"plan {shape.name}")
        rows += _measure(shape, rounds)
    progress.finish()
    shape = shapes[0]
    print_table(
        f"planning one step on the host, causal, {shape.num_qo_heads}/{shape.num_kv_heads} heads, "
        f"head_dim {shape.head_dim}, page {shape.page_size}, {platform.machine()}",
        ("step", "what", "median us", "quartiles us", "tokens", "items"),
        rows,
        text_columns=2,
    )


def _measure(shape: PlanShape, rounds: int) -> list[tuple[str, ...]]:
    arrays = plan_arrays(shape)

    def layout() -> BlockSparse:
        return jaxinfer.paged(
            arrays.qo_indptr, arrays.kv_indptr, arrays.kv_indices, arrays.kv_len, shape.page_size
        )

    built = layout()
    plan = _plan(built, shape)
    planner = planner_of(plan.spec)
    _check_coverage(plan, built, planner.items)
    calls = {
        "layout (jaxinfer.paged)": layout,
        "jaxinfer.plan": lambda: _plan(built, shape),
        "of which C++": _planner_call(planner, plan, built),
    }
    timings = interleaved(calls, rounds=rounds)
    tokens = str(built.num_tokens)
    items = str(sum(_num_items(plan, index) for index in range(len(plan.spec.classes))))
    rows: list[tuple[str, ...]] = []
    for name, t in timings.items():
        quartiles = f"{1e6 * t.low:.1f}-{1e6 * t.high:.1f}"
        rows.append((shape.name, name, f"{1e6 * t.median:.1f}", quartiles, tokens, items))
    return rows


def _plan(layout: BlockSparse, shape: PlanShape) -> jaxinfer.Plan:
    return jaxinfer.plan(
        layout,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype="bfloat16",
        variant=_CAUSAL,
    )


def _planner_call(planner: _native.Planner, plan: jaxinfer.Plan, layout: BlockSparse) -> Callable[[], None]:
    """One run of the planner alone; it must make the same plan."""
    out = np.empty(plan.spec.num_words, np.int32)
    arrays = host_arrays(layout)

    def call() -> None:
        planner(*arrays, num_pages=None, out=out)

    call()
    if not np.array_equal(out, plan.data):
        raise ValueError("the planner called alone made another plan than jaxinfer.plan")
    return call


def _check_coverage(plan: jaxinfer.Plan, layout: BlockSparse, items_begin: tuple[int, ...]) -> None:
    """The items list for every token all KV tokens that causal lets it see, and no more than its row has."""
    seen = np.zeros(layout.num_tokens, np.int64)
    for index, c in enumerate(plan.spec.classes):
        begin = items_begin[index]
        items = plan.data[begin : begin + 8 * c.item_capacity].reshape(-1, 8)[: _num_items(plan, index)]
        for token, kv_begin, kv_end, flags in items[:, [0, 1, 2, 7]]:
            seen[token : token + (flags & 0xFFFF)] += kv_end - kv_begin
    wrong = (seen <= layout.q_pos) | (seen > np.repeat(layout.kv_len, layout.q_len))
    if wrong.any():
        token = int(wrong.argmax())
        raise ValueError(f"the plan lists {seen[token]} KV tokens for token {token} at {layout.q_pos[token]}")


def _num_items(plan: jaxinfer.Plan, index: int) -> int:
    """Items of a class in use: kHeaderNumItems of csrc/plan/format.h."""
    return int(plan.data[5 + index])
