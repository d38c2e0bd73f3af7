"""Arguments of the wrong kind: whatever comes, the error names the argument, what came and what was expected.

Wrong shapes, values and plans of the public functions are in test_errors.py, test_layout.py and test_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import AttentionState, Variant

LAYOUT = jaxinfer.ragged([0, 3], [0, 4])
HEADS: dict[str, Any] = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": np.float32}
PLAN = jaxinfer.plan(LAYOUT, **HEADS)
Q, K = np.zeros((3, 2, 16), np.float32), np.zeros((4, 1, 16), np.float32)
POOL = np.zeros((2, 4, 1, 16), np.float32)
STATE = AttentionState(jnp.ones((3, 2, 16)), jnp.zeros((3, 2)))
HOLE = "__device__ float logits(float s, const Row& row, const Col& col) const { return s; }"


def plan(**changes: Any) -> jaxinfer.Plan:
    return jaxinfer.plan(LAYOUT, **{**HEADS, **changes})


def call(**changes: Any) -> Any:
    return jaxinfer.attention(Q, K, K, LAYOUT, PLAN, **changes)


@pytest.mark.parametrize("value", [[2], {}, {2}, np.array([2, 3, 4]), object(), "2", 2.0, True])
@pytest.mark.parametrize(
    "name", ["num_qo_heads", "num_kv_heads", "head_dim", "num_ctas", "split_tokens", "num_pages"]
)
def test_counts_of_a_plan(name: str, value: Any) -> None:
    if name == "num_ctas" and isinstance(value, (list, np.ndarray)):
        value = [value]
    given = {"batch_invariant": True, name: value}
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be "):
        plan(**given)


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim", "num_ctas"])
def test_numpy_ints_of_rank_0_are_ints(name: str) -> None:
    value = {**HEADS, "num_ctas": 3}[name]
    assert plan(**{name: np.array(value)}).spec == plan(**{name: value}).spec


@pytest.mark.parametrize("value", [0.0, False])
def test_a_zero_that_is_no_int_is_no_number_of_pages(value: Any) -> None:
    with pytest.raises(ValueError, match=f"num_pages must be an int, got {value}"):
        plan(num_pages=value)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["num_qo_heads", "head_dim", "num_pages", "split_tokens"])
def test_counts_of_a_plan_on_a_device(name: str, traced: bool) -> None:
    make = lambda n: plan(batch_invariant=True, **{name: n}).data  # noqa: E731
    with pytest.raises(TypeError, match=f"{name} is static and must be a Python int, got a jax.Array"):
        (jax.jit(make) if traced else make)(jnp.int32(16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": ["float32"]}, r"dtype must be one of .*got \['float32'\]"),
        ({"dtype": {"names": 3}}, "dtype must be one of float32"),
        ({"dtype": np.zeros(2)}, "dtype must be one of float32"),
        ({"tiles": [[16]]}, "tiles must be one or two of"),
        ({"tiles": {16}}, r"tiles must be one or two of .*got \{16\}"),
        ({"schedule": ["lpt"]}, r"schedule must be one of \('lpt', 'runs'\), got \['lpt'\]"),
        ({"schedule": np.array(["lpt", "runs"])}, "schedule must be one of"),
        ({"batch_invariant": [True]}, r"batch_invariant must be a bool, got \[True\]"),
    ],
)
def test_options_of_a_plan(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_lse": "no"}, ValueError, "return_lse must be a bool, got 'no'"),
        ({"return_lse": np.array([1, 0])}, ValueError, "return_lse must be a bool"),
        ({"return_lse": jnp.array(True)}, TypeError, "return_lse is static and must be a Python bool"),
        ({"kv_layout": np.array(["NHD", "HND"])}, ValueError, "kv_layout must be one of"),
        ({"implementation": np.array(["mma"] * 2)}, ValueError, "implementation must be None or one of"),
        ({"sm_scale": 10**400}, ValueError, "sm_scale must be finite in float32, got an int of 1329 bits"),
        ({"variant": Variant(operands=(K,))}, ValueError, "operands holds 1 array.*from_cuda"),
        (
            {"variant": Variant(operands=K)},
            ValueError,
            "operands is filled by Variant.from_cuda, got ndarray",
        ),
    ],
)
def test_options_of_a_call(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**options)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: Variant(functor="s + 1"), TypeError, "functor is filled by Variant.from_cuda, got str"),
        (lambda: Variant(logits_soft_cap=10**400), ValueError, "logits_soft_cap must be finite in float32"),
        (lambda: Variant.from_cuda(HOLE, ["bias"]), TypeError, "params must be a mapping .*got list"),
        (lambda: Variant.from_cuda(HOLE, {3: 1.0}), ValueError, "params: 3 is not a name"),
        (
            lambda: jaxinfer.pack_masks([[[True] * 4, [True]]], LAYOUT),
            ValueError,
            r"masks\[0\] must be an array",
        ),
        (
            lambda: jaxinfer.from_block_mask([[True], [True, False]], 2, 2),
            ValueError,
            "mask must be an array",
        ),
        (
            lambda: jaxinfer.paged([0, 1], [0, 1], [[0], [1, 2]], [1], 4),
            ValueError,
            "kv_indices must be an array",
        ),
        (
            lambda: jaxinfer.reference.append_kv(POOL, POOL, K[:2], K[:2], [0, 1, 2]),
            ValueError,
            "slots must have one entry for each of 2 tokens, got 3",
        ),
        (
            lambda: jaxinfer.compose(LAYOUT, jaxinfer.paged([0, 3], [0, 1], [0], [4], 4)),
            ValueError,
            "layout 1 has contiguous False, layout 0 has True",
        ),
    ],
)
def test_rules_masks_and_layouts(wrong: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


def test_a_list_of_traced_lengths_is_refused_by_name() -> None:
    build = lambda n: jaxinfer.paged([0, 1], [0, 1], [0], [n], 4, num_tokens=1).q_pos  # noqa: E731
    with pytest.raises(TypeError, match=r"kv_len is a list that holds traced values; give one array"):
        jax.jit(build)(3)


@pytest.mark.parametrize("states", [None, 3])
def test_merging_something_that_holds_no_states(states: Any) -> None:
    with pytest.raises(TypeError, match=f"states must be a sequence .*got {type(states).__name__}"):
        jaxinfer.merge_many(states)


def test_states_may_come_from_any_iterable() -> None:
    want = jaxinfer.merge(STATE, STATE)
    for states in (iter([STATE, STATE]), np.array([STATE, STATE], object), {0: STATE, 1: STATE}.values()):
        got = jaxinfer.merge_many(states)
        assert (got.o == want.o).all() and (got.lse == want.lse).all()


@pytest.mark.parametrize("o", [jnp.float32(0), jnp.zeros((3, 2, 16), jnp.int32)])
def test_states_without_a_head_dim_or_of_integers(o: jax.Array) -> None:
    state = AttentionState(o, jnp.zeros(o.shape[:-1]))
    with pytest.raises(ValueError, match=r"o of state 0 must be floating, .*got"):
        jaxinfer.merge(state, state)


@pytest.mark.parametrize("convert", [jaxinfer.lse_to_log2, jaxinfer.lse_from_log2])
@pytest.mark.parametrize("lse", [None, "a", STATE])
def test_logarithms_of_something_else(convert: Callable[[Any], Any], lse: Any) -> None:
    with pytest.raises(TypeError, match=f"lse must be an array of numbers, got {type(lse).__name__}"):
        convert(lse)
