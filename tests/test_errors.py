"""Refusals of `attention`: what is wrong, what came, what was expected; never a silent fallback.

The constructors' refusals are in test_layout.py, those of `Variant` and `pack_masks` in test_variant.py, those of
`plan` in test_plan_errors.py, those of `append_kv` in test_cache.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from backend import cpu_only

import jaxinfer
from jaxinfer import Variant

PAGED = jaxinfer.paged([0, 1, 3], [0, 1, 3], [1, 2, 3], [3, 6], 4)
RAGGED = jaxinfer.ragged([0, 1, 3], [0, 3, 9])
HEADS: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": np.float32}


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


Q, POOL = array(3, 4, 16), array(6, 4, 2, 16)
PLAN = jaxinfer.plan(PAGED, **HEADS)


def call(**changes: Any) -> Any:
    """A valid call with some arguments replaced."""
    args: dict[str, Any] = {"q": Q, "k": POOL, "v": POOL, "layout": PAGED, "plan": PLAN, **changes}
    return jaxinfer.attention(
        args.pop("q"), args.pop("k"), args.pop("v"), args.pop("layout"), args.pop("plan"), **args
    )


def both(pool: jax.Array) -> dict[str, Any]:
    return {"k": pool, "v": pool}


def with_indptr(entries: int) -> Variant:
    return Variant(mask_bits=np.zeros(8, np.uint8), mask_indptr=np.zeros(entries, np.int32))


WRONG_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "rank of q",
        {"q": array(3, 64)},
        ValueError,
        r"q must be \[num_tokens, num_qo_heads, head_dim\].*\(3, 64\)",
    ),
    ("dtype of q", {"q": array(3, 4, 16, dtype=np.int32)}, ValueError, r"q must be one of .*float32.*int32"),
    ("no q", {"q": None}, TypeError, "q must be an array, got NoneType"),
    ("a list for v", {"v": [[1.0]]}, TypeError, "v must be an array, got list"),
    ("dtype of k", {"k": POOL.astype(np.float16)}, ValueError, "k must have q's dtype float32, got float16"),
    (
        "dtype of v",
        {"v": POOL.astype(jnp.bfloat16)},
        ValueError,
        "v must have q's dtype float32, got bfloat16",
    ),
    ("rank of a pool", both(array(24, 2, 16)), ValueError, r"k must have rank 4 .*paged.*\(24, 2, 16\)"),
    ("rank of v", {"v": array(24, 2, 16)}, ValueError, r"v must have rank 4 .*paged.*\(24, 2, 16\)"),
    (
        "pages for a contiguous layout",
        {"layout": RAGGED, "plan": jaxinfer.plan(RAGGED, **HEADS)},
        ValueError,
        r"k must have rank 3 .*contiguous.*\(6, 4, 2, 16\)",
    ),
    ("k and v of different pools", {"v": array(5, 4, 2, 16)}, ValueError, r"head_dim only.*\(6, 4.*\(5, 4"),
    ("head_dim of k", both(array(6, 4, 2, 24)), ValueError, "k must have q's head_dim 16, got 24"),
    ("page size", both(array(6, 8, 2, 16)), ValueError, r"page_size 8 .*NHD.*the layout has page_size 4"),
    ("page size in HND", {"kv_layout": "HND"}, ValueError, r"page_size 2 .*HND.*the layout has page_size 4"),
    ("heads that do not divide", both(array(6, 4, 3, 16)), ValueError, "num_qo_heads 4 .*num_kv_heads 3"),
    ("no heads", both(array(6, 4, 0, 16)), ValueError, "num_qo_heads 4 .*num_kv_heads 0"),
    ("tokens of q", {"q": array(5, 4, 16)}, ValueError, r"q has 5 tokens, .*num_tokens 3"),
    ("kv_layout", {"kv_layout": "NDH"}, ValueError, r"kv_layout must be one of .*NHD.*HND.*'NDH'"),
    (
        "layout of another type",
        {"layout": {"q_start": 0}},
        TypeError,
        "layout must be a jaxinfer.BlockSparse, got dict",
    ),
    ("plan of another type", {"plan": PLAN.data}, TypeError, "plan must be a jaxinfer.Plan, got ndarray"),
    (
        "layer without its axis",
        {"layer": 0},
        ValueError,
        r"rank 5 .*\[num_layers\].*layer is given.*\(6, 4, 2, 16\)",
    ),
    ("axis without a layer", both(array(2, 6, 4, 2, 16)), ValueError, r"rank 4 .*\(2, 6, 4, 2, 16\)"),
    (
        "a float layer",
        {**both(array(2, 6, 4, 2, 16)), "layer": 0.5},
        ValueError,
        r"layer must be an int32 scalar.*0.5",
    ),
    (
        "many layers",
        {**both(array(2, 6, 4, 2, 16)), "layer": np.arange(2)},
        ValueError,
        "layer must be an int32 scalar",
    ),
    ("infinite scale", {"sm_scale": math.inf}, ValueError, "sm_scale must be finite in float32, got inf"),
    (
        "scale that is no number",
        {"sm_scale": math.nan},
        ValueError,
        "sm_scale must be finite in float32, got nan",
    ),
    (
        "scale beyond float32",
        {"sm_scale": 1e39},
        ValueError,
        r"sm_scale must be finite in float32, got 1e\+39",
    ),
    ("scale of another type", {"sm_scale": "1"}, TypeError, "sm_scale must be a Python float, got '1'"),
    ("variant of another type", {"variant": True}, TypeError, "variant must be a jaxinfer.Variant, got bool"),
    # Kernels index these by the plan's rows and tokens: one that is too short would be read out of bounds.
    (
        "rows of a layout edited by hand",
        {"layout": dataclasses.replace(PAGED, kv_offset=np.zeros(1, np.int32))},
        ValueError,
        r"layout.kv_offset must be int32\[2\], got int32\[1\]",
    ),
    (
        "rows of a layout edited by hand, read by masks only",
        {"layout": dataclasses.replace(PAGED, kv_len=np.zeros(0, np.int32)), "variant": with_indptr(3)},
        ValueError,
        r"layout.kv_len must be int32\[2\], got int32\[0\]",
    ),
    (
        "positions of another dtype",
        {"layout": dataclasses.replace(PAGED, q_pos=np.zeros(3, np.int64))},
        ValueError,
        r"layout.q_pos must be int32\[3\], got int64\[3\]",
    ),
    (
        "shape of a layout's table",
        {"layout": dataclasses.replace(PAGED, kv_indices=np.zeros((1, 3), np.int32))},
        ValueError,
        r"layout.kv_indices must be int32\[1\], got int32\[1, 3\]",
    ),
    ("scale on a device", {"sm_scale": jnp.float32(0.1)}, TypeError, "sm_scale is static.*jax.Array"),
    (
        "lse without softmax",
        {"variant": Variant(softmax=False), "return_lse": True},
        ValueError,
        "return_lse=True needs softmax",
    ),
    (
        "rows of a mask",
        {"variant": with_indptr(2)},
        ValueError,
        r"mask_indptr must have rows \+ 1 = 3 entries, got",
    ),
    (
        "unknown implementation",
        {"implementation": "cuda"},
        ValueError,
        r"None or one of .*'reference'.*'cuda'",
    ),
    ("scale that is a flag", {"sm_scale": True}, TypeError, "sm_scale must be a Python float, got True"),
    # The kernels would take the missing tokens for masked ones, which nobody asked for.
    (
        "contiguous K shorter than its layout",
        {"layout": RAGGED, "plan": jaxinfer.plan(RAGGED, **HEADS), **both(array(8, 2, 16))},
        ValueError,
        r"k has 8 KV tokens .*\(8, 2, 16\).*num_kv_tokens 9",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), [c[1:] for c in WRONG_CALLS], ids=[c[0] for c in WRONG_CALLS]
)
@pytest.mark.parametrize("traced", [False, True])
def test_wrong_calls(changes: dict[str, Any], error: type[Exception], message: str, traced: bool) -> None:
    with pytest.raises(error, match=message):
        if traced:
            jax.jit(lambda: call(**changes))()
        else:
            call(**changes)


@cpu_only("a GPU has this kernel")
@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_gpu_kernel_without_a_gpu(traced: bool, kernel: str) -> None:
    changes = {"implementation": kernel}
    test_wrong_calls(changes, NotImplementedError, rf"'{kernel}' is a GPU kernel.*\"reference\"", traced)


def test_the_unchanged_call_is_valid() -> None:
    assert call().shape == (3, 4, 16)
    assert call(implementation="reference").shape == (3, 4, 16)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_traced_scale_is_refused(implementation: str | None) -> None:
    with pytest.raises(TypeError, match="sm_scale is static and must be a Python float"):
        jax.jit(lambda s: call(sm_scale=s, implementation=implementation))(0.5)


# ---- a plan made for another call, every difference named


def replan(**changes: Any) -> jaxinfer.Plan:
    layout = changes.pop("layout", PAGED)
    return jaxinfer.plan(layout, **{**HEADS, **changes})


OTHER_PLANS: list[tuple[str, jaxinfer.Plan, str]] = [
    ("query heads", replan(num_qo_heads=8), r"num_qo_heads 8 \(this call: 4\)"),
    ("KV heads", replan(num_kv_heads=1), r"num_kv_heads 1 \(this call: 2\)"),
    ("head_dim", replan(head_dim=32), r"head_dim_qk 32 \(this call: 16\), head_dim_vo 32 \(this call: 16\)"),
    ("head_dim_vo", replan(head_dim=(16, 24)), r"head_dim_vo 24 \(this call: 16\)"),
    ("dtype", replan(dtype=np.float16), r"dtype float16 \(this call: float32\)"),
    ("causal", replan(variant=Variant(causal=True)), r"causal True \(this call: False\)"),
    ("left window", replan(variant=Variant(window_left=3)), r"window_left 3 \(this call: None\)"),
    ("right window", replan(variant=Variant(window_right=0)), r"window_right 0 \(this call: None\)"),
    ("reduction", replan(variant=Variant(softmax=False)), r"softmax False \(this call: True\)"),
    (
        "contiguity",
        replan(layout=RAGGED),
        r"page_size 1 \(this call: 4\), contiguous True \(this call: False\)",
    ),
    (
        "rows",
        replan(layout=jaxinfer.paged([0, 3], [0, 3], [1, 2, 3], [9], 4)),
        r"num_rows 1 \(this call: 2\)",
    ),
    (
        "tokens",
        replan(layout=jaxinfer.paged([0, 1, 3], [0, 1, 3], [1, 2, 3], [3, 6], 4, num_tokens=8)),
        r"num_tokens 8 \(this call: 3\)",
    ),
    (
        "KV capacity",
        replan(layout=jaxinfer.paged([0, 1, 3], [0, 1, 3], [1, 2, 3, 0], [3, 6], 4)),
        r"kv_capacity 16 \(this call: 12\)",
    ),
    (
        "levels",
        replan(layout=jaxinfer.compose(jaxinfer.paged([0], [0], [], [], 4, num_tokens=3), PAGED)),
        r"num_layouts 2 \(this call: 1\)",
    ),
    (
        "block positions",
        replan(layout=jaxinfer.from_block_mask(np.ones((2, 3), bool), 2, 4, num_tokens=3)),
        r"block_pos True \(this call: False\)",
    ),
]


@pytest.mark.parametrize(("plan", "message"), [p[1:] for p in OTHER_PLANS], ids=[p[0] for p in OTHER_PLANS])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_plan_for_another_call_is_refused(
    plan: jaxinfer.Plan, message: str, implementation: str | None
) -> None:
    """A plan clipped with other rules than the call's would compute something else (sglang#31501)."""
    with pytest.raises(ValueError, match=f"the plan was made for another call: .*{message}"):
        call(plan=plan, implementation=implementation)


def test_a_window_given_to_the_call_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"window_left None \(this call: 3\)"):
        call(variant=Variant(window_left=3))


def test_rules_that_clip_nothing_need_no_plan_of_their_own() -> None:
    bits, indptr = jaxinfer.pack_masks([np.ones((1, 3), bool), np.ones((2, 6), bool)], PAGED)
    variant = Variant(mask_bits=bits, mask_indptr=indptr, logits_soft_cap=5.0)
    assert call(variant=variant).shape == (3, 4, 16)


def test_a_truncated_plan_is_refused() -> None:
    short = dataclasses.replace(PLAN, data=PLAN.data[:-1])
    with pytest.raises(ValueError, match=rf"must have shape \({PLAN.spec.num_words},\)"):
        call(plan=short)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_a_plan_of_another_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=rf"dtype int32, got .*{np.dtype(dtype)}"):
        call(plan=dataclasses.replace(PLAN, data=PLAN.data.astype(dtype)))


# ---- something else in the place of a jaxinfer object


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: jaxinfer.check(PAGED.kv_indices, 6), "layout must be a jaxinfer.BlockSparse, got ndarray"),
        (lambda: jaxinfer.pack_masks([], None), "layout must be a jaxinfer.BlockSparse, got NoneType"),
        (lambda: jaxinfer.pack_masks(None, PAGED), "masks must be a list .* got NoneType"),
        (lambda: jaxinfer.merge(Q, Q), r"state 0 must be .*AttentionState.*return_lse=True"),
        (
            lambda: jaxinfer.merge_many(jaxinfer.AttentionState(Q, Q[..., 0])),
            "sequence of states, got one AttentionState",
        ),
        (lambda: Variant.from_cuda(None), "source must be CUDA text, got NoneType"),
    ],
)
def test_other_things_than_jaxinfers(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wrong()


# ---- masks and pages


def test_a_mask_with_a_composed_layout() -> None:
    layout = jaxinfer.compose(jaxinfer.paged([0, 3], [0, 1], [4], [4], 4), PAGED)
    with pytest.raises(NotImplementedError, match=r"mask.*composed layout"):
        call(layout=layout, plan=jaxinfer.plan(layout, **HEADS), variant=with_indptr(4))


@pytest.mark.parametrize("bad", [99, -1, 6])
def test_page_ids_outside_the_pool(bad: int) -> None:
    """Refused on the host where the pool's size is given; compiled code masks them, `check` counts them."""
    tables = ([0, 1, 3], [0, 1, 3], [1, bad, 3], [3, 6], 4)
    with pytest.raises(ValueError, match=rf"row 1 lists page {bad}, outside \[0, num_pages = 6\)"):
        jaxinfer.paged(*tables, num_pages=6)
    layout = jaxinfer.paged(*tables)
    with pytest.raises(ValueError, match=rf"row 1 lists page {bad}.*num_pages = 6"):
        jaxinfer.plan(layout, **HEADS, num_pages=6)
    assert int(jaxinfer.check(layout, 6)) == 1
    assert int(jax.jit(jaxinfer.check, static_argnums=1)(layout, 6)) == 1
    assert int(jaxinfer.check(PAGED, 6)) == 0
    assert np.isfinite(call(layout=layout, plan=jaxinfer.plan(layout, **HEADS))).all()


# ---- transformations that are not there


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f: jax.grad(lambda q: f(q).sum())(Q), r"jaxinfer_attention does not support differentiation"),
        (lambda f: jax.jvp(f, (Q,), (Q,)), r"jaxinfer_attention does not support differentiation"),
        (
            lambda f: jax.vmap(f)(Q[None]),
            r"jaxinfer_attention does not support jax.vmap .*rows of one layout",
        ),
    ],
    ids=["grad", "jvp", "vmap"],
)
@pytest.mark.parametrize("traced", [False, True])
def test_attention_refuses_differentiation_and_vmap(transform: Any, message: str, traced: bool) -> None:
    f = (lambda q: call(q=q)) if not traced else jax.jit(lambda q: call(q=q))
    with pytest.raises(NotImplementedError, match=message + '.*implementation="reference"'):
        transform(f)


def test_append_refuses_differentiation_and_vmap() -> None:
    def append(k: Any) -> Any:
        return jaxinfer.append_kv(POOL, POOL, k, k, np.arange(3))[0]

    k = array(3, 2, 16)
    with pytest.raises(
        NotImplementedError, match=r"jaxinfer_append does not support differentiation.*reference"
    ):
        jax.grad(lambda x: append(x).sum())(k)
    with pytest.raises(NotImplementedError, match=r"jaxinfer_append does not support jax.vmap.*reference"):
        jax.vmap(append)(k[None])


def test_what_the_message_recommends_works() -> None:
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 16)), jnp.float32)
    pool = jnp.asarray(np.random.default_rng(1).standard_normal(POOL.shape), jnp.float32)

    def loss(q: Any) -> Any:
        return (call(q=q, k=pool, v=pool, implementation="reference") * weights).sum()

    assert jax.vmap(lambda q: call(q=q, implementation="reference"))(Q[None]).shape == (1, 3, 4, 16)
    tangent = jax.jvp(loss, (Q,), (weights,))[1]
    step = 1e-2
    numeric = (loss(Q + step * weights) - loss(Q - step * weights)) / (2 * step)
    np.testing.assert_allclose(tangent, numeric, rtol=1e-2)


# ---- platforms without a kernel


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_are_refused_when_lowering(platform: str) -> None:
    runs = r"runs on \['cpu'.*implementation=\"reference\""
    message = rf"jaxinfer_attention has no kernel for platform .*{platform}.*{runs}"
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(lambda q: call(q=q)).trace(Q).lower(lowering_platforms=(platform,))
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(lambda q: call(q=q)), platforms=[platform])(Q)
    with pytest.raises(
        NotImplementedError, match=rf"jaxinfer_append has no kernel for platform .*{platform}"
    ):
        jax.jit(lambda k: jaxinfer.append_kv(POOL, POOL, k, k, np.arange(3))).trace(array(3, 2, 16)).lower(
            lowering_platforms=(platform,)
        )
    reference = jax.jit(lambda q: call(q=q, implementation="reference"))
    assert reference.trace(Q).lower(lowering_platforms=(platform,)).as_text()
