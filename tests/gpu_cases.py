"""Calls for the GPU tests: one compiled program per set of static facts, results judged by the float64 oracle.

Inputs come from cases.py, expected values from oracle.py.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A second process must find memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from backend import bounds, expect_accurate
from cases import Case, make_case
from oracle import attention_oracle

import jaxinfer
from jaxinfer import Variant

TOLERANCE = bounds()
_programs: dict[Any, Callable[..., Any]] = {}


def program_of(case: Case, implementation: str | None = None) -> Callable[..., Any]:
    """The compiled call, shared by batches with the same static facts."""
    key = (case.sm_scale, case.kv_layout, case.variant.softmax, implementation)
    if key not in _programs:

        def call(q: Any, k: Any, v: Any, layout: Any, plan: Any, variant: Any, layer: Any) -> Any:
            return jaxinfer.attention(
                q,
                k,
                v,
                layout,
                plan,
                variant=variant,
                sm_scale=case.sm_scale,
                layer=layer,
                kv_layout=case.kv_layout,
                return_lse=variant.softmax,
                implementation=implementation,
            )

        _programs[key] = jax.jit(call)
    return _programs[key]


def plan_of(case: Case, **options: Any) -> jaxinfer.Plan:
    return jaxinfer.plan(
        case.layout,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.q.dtype,
        variant=case.variant,
        **options,
    )


def run(case: Case, *, implementation: str | None = None, **plan_options: Any) -> tuple[Any, Any]:
    """o and lse (None without softmax) as numpy."""
    layer = None if case.layer is None else np.int32(case.layer)
    plan = plan_of(case, **plan_options)
    out = program_of(case, implementation)(*case.args, plan, case.variant, layer)
    if case.variant.softmax:
        return np.asarray(out.o), np.asarray(out.lse)
    return np.asarray(out), None


def expect_close(case: Case, o: Any, lse: Any, expected: tuple[Any, Any] | None = None) -> None:
    """Within the documented accuracy of `expected`, by default the oracle's (o, lse)."""
    want = expected or attention_oracle(*case.args, **case.oracle_kwargs)
    expect_accurate(o, lse, *want, case.q.dtype, note=f"{case.kind} {case.variant}")


def check(case: Case, **options: Any) -> None:
    expect_close(case, *run(case, **options))


def count_differing_calls(case: Case, plan: jaxinfer.Plan, calls: int) -> int:
    """How many of so many causal calls in one program differ from the first in any bit of o or lse; o has 16 bits."""

    @jax.jit
    def count(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        def call(q: Any) -> Any:
            state = jaxinfer.attention(q, k, v, layout, plan, variant=Variant(causal=True), return_lse=True)
            bits = jax.lax.bitcast_convert_type(state.o, jnp.uint16)  # type: ignore[union-attr]
            return bits, jax.lax.bitcast_convert_type(state.lse, jnp.uint32)  # type: ignore[union-attr]

        first = call(q)

        def again(_: Any, carry: Any) -> Any:
            differing, q = carry
            now = call(q)
            same = [jnp.array_equal(a, b) for a, b in zip(now, first, strict=True)]
            # The next call waits for this one, and XLA cannot see that the factor is 1.
            q = q * jnp.where(now[1][0, 0] == 0, 2, 1).astype(q.dtype)
            return differing + ~(same[0] & same[1]), q

        return jax.lax.fori_loop(0, calls, again, (jnp.int32(0), q))[0]

    return int(count(*case.args, plan))


def draw_cases(seed: int, number: int, **options: Any) -> list[Case]:
    """Random poisoned batches of the same shapes."""
    rng = np.random.default_rng(seed)
    return [make_case(rng, fixed=True, **options) for _ in range(number)]


def long_case(
    kv_len: list[int],
    q_len: list[int],
    dtype: str,
    page_size: int = 16,
    seed: int = 7,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
) -> Case:
    """Causal requests of given lengths, their pages scattered over a pool."""
    rng = np.random.default_rng(seed)
    need = [-(-n // page_size) for n in kv_len]
    num_pages = sum(need) + 3
    layout = jaxinfer.paged(
        np.cumsum([0, *q_len]),
        np.cumsum([0, *need]),
        rng.permutation(num_pages)[: sum(need)],
        np.array(kv_len),
        page_size,
    )
    shape = (num_pages, page_size, heads[1], head_dim)
    q = rng.normal(size=(sum(q_len), heads[0], head_dim))
    k, v = rng.normal(size=shape), rng.normal(size=shape)
    case = Case("paged", q, k, v, layout, Variant(causal=True), head_dim**-0.5, None, "NHD", num_pages)
    return dataclasses.replace(case, **{name: getattr(case, name).astype(jnp.dtype(dtype)) for name in "qkv"})


def request_kv(case: Case, row: int, kv_len: int) -> tuple[Any, Any]:
    """K and V of a request of `long_case`, [kv_len, num_kv_heads, head_dim] each."""
    first = int(case.layout.kv_start[row])
    pages = case.layout.kv_indices[first : first - (-kv_len // case.layout.page_size)]
    k, v = (x[pages].reshape(-1, *x.shape[2:])[:kv_len] for x in (case.k, case.v))
    return k, v


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    """A second process on the same machine; the tests' modules can be imported there."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, **environment: str) -> tuple[str, str]:
    """(stdout, stderr) of `start_python` when it ends well."""
    process = start_python(code, **environment)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, f"{out}\n{err}"
    return out, err
