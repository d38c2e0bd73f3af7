"""Variant and pack_masks: what they accept, refuse and hash to; masks bit by bit. Not the math of rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import Variant, compose, pack_masks, ragged

# A draft tree of four tokens behind a prefix of two: parents -1, 0, 0, 1.
TREE = np.array(
    [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ],
    bool,
)


def test_packed_tree_is_little_endian() -> None:
    bits, indptr = pack_masks([TREE], ragged([0, 4], [0, 6]))
    assert bits.tobytes() == bytes.fromhex("c773bd")  # big-endian bit order would be e3cebd
    assert bits.dtype == np.uint8 and indptr.dtype == np.int32
    np.testing.assert_array_equal(indptr, [0, 3])


def test_each_row_starts_on_a_byte() -> None:
    layout = ragged([0, 1, 1, 3], [0, 3, 5, 10])
    masks = [np.ones((1, 3), bool), np.ones((0, 2), bool), np.eye(2, 5, dtype=bool)]
    bits, indptr = pack_masks(masks, layout, capacity=6)
    np.testing.assert_array_equal(indptr, [0, 1, 1, 3])
    np.testing.assert_array_equal(bits, [0b111, 0b01000001, 0, 0, 0, 0])
    np.testing.assert_array_equal(pack_masks(masks, layout)[0], bits[:3])
    with pytest.raises(ValueError, match=r"masks\[2\] has shape \(2, 4\), .*\(2, 5\)"):
        pack_masks([*masks[:2], np.ones((2, 4), bool)], layout)
    empty, indptr = pack_masks([], ragged([0], [0]))
    assert empty.shape == (0,) and indptr.tolist() == [0]


@pytest.mark.parametrize(
    "masks, capacity, error, message",
    [
        (
            [np.ones((10, 15), bool)],
            None,
            ValueError,
            r"masks\[0\] has shape \(10, 15\), .*\[q_len, kv_len\] = \(10, 20\)",
        ),
        ([np.ones((10, 20), int)], None, ValueError, r"masks\[0\] must be bool, got int64"),
        ([], None, ValueError, r"masks has 0 entries, the layout has 1 rows"),
        ([np.ones((10, 20), bool)], 24, ValueError, r"the masks need 25 bytes, capacity is 24"),
        ([np.ones((10, 20), bool)], -1, ValueError, r"capacity must be at least 0"),
        ([jnp.ones((10, 20), bool)], None, TypeError, r"needs the layout and the masks on the host"),
    ],
)
def test_masks_refused(masks: Any, capacity: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack_masks(masks, ragged([0, 10], [0, 20]), capacity)


def test_masks_of_composed_layouts_are_refused() -> None:
    a = ragged([0, 1], [0, 1])
    with pytest.raises(NotImplementedError, match="composed layout; supported: layouts of one level"):
        pack_masks([np.ones((1, 1), bool)] * 2, compose(a, a))
    masked = Variant(mask_bits=np.zeros(1, np.uint8), mask_indptr=np.zeros(3, np.int32))
    with pytest.raises(NotImplementedError, match="composed layout; supported: layouts of one level"):
        masked.check_operands(compose(a, a))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"window_left": -1}, ValueError, r"window_left must be at least 0, or None for off; got -1"),
        (
            {"window_right": np.int64(-2)},
            ValueError,
            r"window_right must be at least 0, or None for off; got -2",
        ),
        ({"window_left": True}, ValueError, r"window_left must be an int, got True"),
        ({"window_left": 3.0}, ValueError, r"window_left must be an int, got 3.0"),
        ({"window_left": 2**31}, ValueError, r"window_left must be at most 2147483647"),
        ({"window_left": jnp.int32(3)}, TypeError, r"window_left is static and must be a Python int"),
        ({"logits_soft_cap": 0}, ValueError, r"logits_soft_cap must be a positive finite number, .* got 0"),
        ({"logits_soft_cap": -1.0}, ValueError, r"logits_soft_cap must be a positive finite number"),
        ({"logits_soft_cap": float("nan")}, ValueError, r"logits_soft_cap must be a positive .* got nan"),
        ({"logits_soft_cap": float("inf")}, ValueError, r"logits_soft_cap must be a positive .* got inf"),
        (
            {"logits_soft_cap": 1e39},
            ValueError,
            r"logits_soft_cap must be from 2\*\*-126 to 2\*\*100 .*1e\+39",
        ),
        (
            {"logits_soft_cap": 1e-39},
            ValueError,
            r"logits_soft_cap must be from 2\*\*-126 to 2\*\*100 .*1e-39",
        ),
        ({"logits_soft_cap": True}, ValueError, r"logits_soft_cap must be a number, .* got True"),
        ({"logits_soft_cap": jnp.float32(2)}, TypeError, r"logits_soft_cap is static"),
        ({"causal": 1}, ValueError, r"causal must be a bool, got 1"),
        ({"softmax": None}, ValueError, r"softmax must be a bool, got None"),
        ({"mask_bits": np.zeros(1, np.uint8)}, ValueError, r"go together; mask_indptr is missing"),
        ({"mask_indptr": np.zeros(1, np.int32)}, ValueError, r"go together; mask_bits is missing"),
    ],
)
def test_variants_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Variant(**fields)


def test_traced_windows_are_refused() -> None:
    with pytest.raises(TypeError, match="window_left is static and must be a Python int"):
        jax.jit(lambda w: Variant(window_left=w).window_left)(3)


@pytest.mark.parametrize(
    "bits, indptr, message",
    [
        (np.zeros(4, np.int32), np.zeros(2, np.int32), r"mask_bits must be a 1-D uint8 array, got int32"),
        (np.zeros((2, 2), np.uint8), np.zeros(2, np.int32), r"mask_bits must be a 1-D .* shape \(2, 2\)"),
        (np.zeros(4, np.uint8), np.zeros(2, np.int64), r"mask_indptr must be a 1-D int32 array, got int64"),
        (np.zeros(4, np.uint8), np.zeros(3, np.int32), r"mask_indptr must have rows \+ 1 = 2 entries, got 3"),
    ],
)
def test_mask_operands_refused(bits: Any, indptr: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variant(mask_bits=bits, mask_indptr=indptr).check_operands(ragged([0, 1], [0, 1]))


def test_equal_rules_are_one_compile_key() -> None:
    traces = 0

    @jax.jit
    def f(variant: Variant) -> int:
        nonlocal traces
        traces += 1
        return 0

    f(Variant(causal=True, window_left=3, logits_soft_cap=2.0))
    f(Variant(causal=np.bool_(True), window_left=np.int64(3), logits_soft_cap=np.float32(2)))
    f(Variant(True, np.uint8(3), None, 2))
    assert traces == 1
    f(Variant(causal=True, window_left=4, logits_soft_cap=2.0))
    assert traces == 2


def test_is_a_pytree_whatever_its_leaves_become() -> None:
    a = Variant(window_left=2, mask_bits=np.zeros(3, np.uint8), mask_indptr=np.zeros(2, np.int32))
    assert len(jax.tree.leaves(a)) == 2 and jax.tree.leaves(Variant()) == []
    assert jax.tree.map(lambda x: object(), a).window_left == 2
    assert jax.tree.map(lambda x: None, a) == Variant(window_left=2)
    assert jax.eval_shape(lambda x: x, a).mask_bits.shape == (3,)
    stacked = jax.tree.map(lambda x: np.stack([x, x]), a)
    assert jax.vmap(
        lambda x: x.mask_bits.sum(), in_axes=(Variant(window_left=2, mask_bits=0, mask_indptr=0),)
    )(stacked).shape == (2,)
