"""Programs saved with `jax.export`: jaxinfer's objects are operands and results of what another process loads."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

import jaxinfer
from jaxinfer import AttentionState, BlockSparse, Variant

pytest.importorskip("flatbuffers")  # jax.export saves with it

RNG = np.random.default_rng(0)
HEADS: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": np.float32}
CHECKS = [export.DisabledSafetyCheck.custom_call("jaxinfer_attention")]


def saved_and_loaded(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


def paged(kv_len: list[int]) -> BlockSparse:
    return jaxinfer.from_block_table([[3, 1], [0, 2]], kv_len, [0, 2, 5], 4, num_tokens=6)


def composed(kv_len: list[int]) -> BlockSparse:
    return jaxinfer.compose(jaxinfer.paged([0, 5], [0, 1], [1], [3], 4, num_tokens=6), paged(kv_len))


def blocks(kv_len: list[int]) -> BlockSparse:
    return jaxinfer.from_block_mask(np.arange(6).reshape(2, 3) % sum(kv_len) > 0, 3, 4)


@pytest.mark.parametrize("layout_of", [paged, composed, blocks])
@pytest.mark.parametrize("masked", [False, True])
def test_a_saved_program_serves_other_lengths(layout_of: Any, masked: bool) -> None:
    if masked and layout_of is composed:
        pytest.skip("no custom masks with composed layouts")

    def case(kv_len: list[int]) -> tuple[Any, ...]:
        layout = layout_of(kv_len)
        rules: dict[str, Any] = {"causal": True, "window_left": 6, "logits_soft_cap": 20.0}
        if masked:
            sizes = zip(layout.q_len, layout.kv_len, strict=True)
            masks = [RNG.random((q, k)) < 0.7 for q, k in sizes]
            rules["mask_bits"], rules["mask_indptr"] = jaxinfer.pack_masks(masks, layout, capacity=32)
        variant = Variant(**rules)
        return layout, jaxinfer.plan(layout, variant=variant, **HEADS), variant

    def call(q: Any, k: Any, v: Any, layout: Any, plan: Any, variant: Any) -> Any:
        return jaxinfer.attention(q, k, v, layout, plan, variant=variant, return_lse=True)

    q, k, v = (RNG.standard_normal(shape, np.float32) for shape in ((6, 4, 16), *((4, 4, 2, 16),) * 2))
    program = saved_and_loaded(export.export(jax.jit(call), disabled_checks=CHECKS)(q, k, v, *case([5, 8])))
    for kv_len in ([5, 8], [1, 7], [0, 3]):
        operands = case(kv_len)
        got, want = program.call(q, k, v, *operands), call(q, k, v, *operands)
        assert isinstance(got, AttentionState)
        np.testing.assert_array_equal(got.o, want.o)
        np.testing.assert_array_equal(got.lse, want.lse)


HOLE = "__device__ float logits(float s, const Row& row, const Col& col) const { return s + params.bias[0]; }"
PARAMS = {"bias": np.zeros(3, np.float32), "scale": 0.5, "n": 7}


def test_rules_written_as_cuda_text_are_saved() -> None:
    variant = Variant.from_cuda(HOLE, PARAMS, causal=True)
    exported = export.export(jax.jit(lambda variant: variant.operands[0] + 1))(variant)
    loaded = saved_and_loaded(exported)
    assert loaded.in_tree == exported.in_tree == jax.tree.structure(((variant,), {}))
    assert (loaded.call(variant) == 1).all()


def test_a_twin_cannot_be_saved() -> None:
    variant = Variant.from_cuda(HOLE, PARAMS, twin=object())
    with pytest.raises(NotImplementedError, match=r"a Variant with a twin; let the exported function make"):
        export.export(jax.jit(lambda variant: variant.operands[0]))(variant).serialize()


def test_a_program_of_a_version_with_other_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = json.dumps
    monkeypatch.setattr("jaxinfer._pytree.json.dumps", lambda x, **how: bytes_of({**x, "new": 1}, **how))
    saved = export.export(jax.jit(lambda layout: layout.q_len + 1))(paged([1, 2])).serialize()
    with pytest.raises(ValueError, match=r"a saved BlockSparse has the fields .*'new'\]"):
        export.deserialize(saved)


@pytest.mark.parametrize(("name", "value"), [("new", 1), ("classes", [{"width": 16}])])
def test_a_plan_of_a_version_with_other_facts_is_refused(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dumps(x: Any, default: Any) -> str:
        return bytes_of(x, default=lambda spec: {**default(spec), name: value})

    bytes_of = json.dumps
    monkeypatch.setattr("jaxinfer._pytree.json.dumps", dumps)
    plan = jaxinfer.plan(paged([1, 2]), **HEADS)
    saved = export.export(jax.jit(lambda plan: plan.data + 1))(plan).serialize()
    with pytest.raises(ValueError, match=r"a saved Plan is another version of jaxinfer's: .*(new|width)"):
        export.deserialize(saved)
