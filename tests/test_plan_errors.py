"""What `plan` refuses, and that the message names the argument, what came and what was expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import BlockSparse, Variant

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def small_layout() -> BlockSparse:
    return jaxinfer.paged([0, 1, 3], [0, 2, 4], [7, 2, 3, 9], [5, 6], 4, num_tokens=4)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_qo_heads": 7}, ValueError, "num_qo_heads 7 must be a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1, got 0"),
        ({"num_qo_heads": 258}, NotImplementedError, "group size 129 .* supported: 1 to 128"),
        ({"head_dim": 20}, NotImplementedError, "head_dim 20; supported: every multiple of 8 from 16 to 256"),
        ({"head_dim": 8}, NotImplementedError, "head_dim 8; supported"),
        ({"head_dim": 264}, NotImplementedError, "head_dim 264; supported"),
        ({"head_dim": 512}, NotImplementedError, "head_dim 512; supported"),
        ({"head_dim": (64, 20)}, NotImplementedError, "head_dim 20; supported"),
        ({"head_dim": (64, 64, 64)}, ValueError, r"head_dim must be an int or \(head_dim_qk, head_dim_vo\)"),
        ({"dtype": "bf17"}, ValueError, "dtype must be one of float32, float16, bfloat16, got 'bf17'"),
        ({"dtype": "float64"}, NotImplementedError, "dtype float64; supported: float32, float16, bfloat16"),
        ({"schedule": "eft"}, ValueError, r"schedule must be one of \('lpt', 'runs'\), got 'eft'"),
        ({"split_tokens": 40}, ValueError, "split_tokens must be a multiple of 16, got 40"),
        ({"split_tokens": 0}, ValueError, "split_tokens must be at least 1, got 0"),
        ({"split_tokens": 64}, ValueError, "split_tokens 64 cuts rows with batch_invariant=True only"),
        ({"tiles": (16.0,)}, ValueError, r"tiles must be one or two of .*got \(16.0,\)"),
        ({"num_ctas": 0}, ValueError, "num_ctas must be at least 1, got 0"),
        ({"num_ctas": 65536}, ValueError, r"num_ctas must be in \[1, 65535\], got 65536"),
        ({"num_ctas": (3, 4), "tiles": (16,)}, ValueError, r"one per tile class \(1\), got \(3, 4\)"),
        ({"tiles": ()}, ValueError, "tiles must be one or two of"),
        ({"tiles": (48,)}, ValueError, r"tiles must be one or two of \(1, 16, 32, 64, 128, 192\).*\(48,\)"),
        ({"tiles": (16, 32, 64)}, ValueError, "tiles must be one or two of"),
        ({"tiles": (64, 16)}, ValueError, r"tiles \(64, 16\) must hold an ascending number of tokens"),
        ({"tiles": (16, 16)}, ValueError, r"tiles \(16, 16\) must hold an ascending number of tokens"),
        (
            {"tiles": (16,), "num_qo_heads": 64},
            ValueError,
            "tiles: a tile of 16 rows is smaller than the group size 32",
        ),
        ({"num_pages": 9}, ValueError, r"row 1 lists page 9 as its block 1, .*\[0, num_pages = 9\)"),
        ({"num_pages": 0}, ValueError, r"row 0 lists page 7 as its block 0, .*\[0, num_pages = 0\)"),
    ],
)
def test_options(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxinfer.plan(small_layout(), **{**HEADS, **kwargs})


def test_a_number_of_heads_is_an_int_whatever_was_planned_before() -> None:
    jaxinfer.plan(small_layout(), num_qo_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match=r"num_qo_heads must be an int, got 4\.0"):
        jaxinfer.plan(small_layout(), num_qo_heads=4.0, num_kv_heads=2, head_dim=16)  # type: ignore[arg-type]


def test_supported_head_dims() -> None:
    for head_dim in range(16, 257, 8):
        assert jaxinfer.plan(small_layout(), **{**HEADS, "head_dim": head_dim}).spec.head_dim_qk == head_dim
    assert jaxinfer.plan(small_layout(), **{**HEADS, "head_dim": (192, 128)}).spec.head_dim_vo == 128


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_start", [0, -1], r"layout.q_start\[1\] = -1: expected a token in \[0, num_tokens = 4\]"),
        ("q_start", [0, 5], r"layout.q_start\[1\] = 5: expected a token in"),
        ("q_len", [-1, 2], r"layout.q_len\[0\] = -1: expected at least 0"),
        ("q_len", [1, 4], r"layout.q_len\[1\] = 4: expected q_start \+ q_len <= num_tokens, but 1 \+ 4 > 4"),
        ("q_len", [2**31 - 1, 2], r"layout.q_len\[0\] = 2147483647: expected q_start"),
        ("kv_len", [-5, 6], r"layout.kv_len\[0\] = -5: expected at least 0"),
        ("kv_len", [5, 9], r"layout.kv_len\[1\] = 9: expected kv_start \+ its 3 blocks <= 4 entries"),
        ("kv_len", [2**31 - 1, 6], r"layout.kv_len\[0\] = 2147483647: expected kv_start"),
        ("kv_start", [-1, 2], r"layout.kv_start\[0\] = -1: expected at least 0"),
        ("kv_start", [0, 2**31 - 1], r"layout.kv_len\[1\] = 6: .*kv_start is 2147483647"),
        ("q_start", [0, 0], "token 0 is covered by 2 rows, expected at most num_layouts = 1"),
        ("kv_offset", [0], "layout.kv_offset has 1 entries, expected 2"),
    ],
)
def test_values_of_the_layout(field: str, value: list[int], message: str) -> None:
    layout = dataclasses.replace(small_layout(), **{field: np.array(value, np.int32)})
    with pytest.raises(ValueError, match=message):
        jaxinfer.plan(layout, **HEADS)


def test_values_of_a_contiguous_layout() -> None:
    layout = jaxinfer.ragged([0, 1, 2], [0, 5, 9])
    with pytest.raises(
        ValueError, match=r"layout.kv_len\[1\] = 4: expected kv_start \+ its 4 tokens <= 8 KV tokens"
    ):
        jaxinfer.plan(layout, **HEADS, num_pages=8)
    layout = dataclasses.replace(layout, kv_start=np.array([0, 6], np.int32))
    with pytest.raises(ValueError, match=r"its 4 tokens <= 9 KV tokens, but kv_start is 6"):
        jaxinfer.plan(layout, **HEADS)


def test_block_positions_must_ascend() -> None:
    layout = jaxinfer.from_block_mask(np.ones((1, 3), bool), 2, 4)
    layout = dataclasses.replace(layout, block_pos=np.array([0, 8, 4], np.int32))
    with pytest.raises(ValueError, match=r"layout\.block_pos: row 0 has position 4 behind position 8"):
        jaxinfer.plan(layout, **HEADS)


def test_page_ids_behind_the_used_range_are_ignored() -> None:
    layout = jaxinfer.paged([0, 1], [0, 3], [1, -5, 10**9, 7], [4], 4)
    jaxinfer.plan(layout, **HEADS, num_pages=2)


def test_lengths_on_a_device_are_refused() -> None:
    """jax 31593: host code dereferenced a device buffer."""
    device = jax.tree.map(jnp.asarray, small_layout())
    with pytest.raises(
        TypeError, match=r"layout\.q_start must be a numpy array.*Build the layout from numpy"
    ):
        jaxinfer.plan(device, **HEADS)
    one = dataclasses.replace(small_layout(), kv_len=jnp.array([5, 6], jnp.int32))
    with pytest.raises(TypeError, match=r"layout\.kv_len must be a numpy array"):
        jaxinfer.plan(one, **HEADS)


def test_traced_lengths_are_refused() -> None:
    @jax.jit
    def step(layout: BlockSparse) -> jax.Array:
        return jnp.asarray(jaxinfer.plan(layout, **HEADS).data)

    with pytest.raises(TypeError, match=r"layout\.q_start must be a numpy array.*jitted step as operands"):
        step(small_layout())


def test_wide_integers_are_refused() -> None:
    layout = dataclasses.replace(small_layout(), kv_len=np.array([5, 6], np.int64))
    with pytest.raises(TypeError, match=r"layout\.kv_len must be int32 of rank 1, got int64"):
        jaxinfer.plan(layout, **HEADS)


def test_composed_layouts_refuse_what_they_lack() -> None:
    prefix = jaxinfer.paged([0, 3], [0, 1], [1], [4], 4, num_tokens=4)
    layout = jaxinfer.compose(prefix, small_layout())
    jaxinfer.plan(layout, **HEADS)
    with pytest.raises(NotImplementedError, match="batch_invariant=True with a composed layout"):
        jaxinfer.plan(layout, **HEADS, batch_invariant=True)
    masked = Variant(mask_bits=np.zeros(8, np.uint8), mask_indptr=np.zeros(4, np.int32))
    with pytest.raises(NotImplementedError, match="mask with a composed layout"):
        jaxinfer.plan(layout, **HEADS, variant=masked)


def test_strided_arrays_are_copied() -> None:
    layout = small_layout()
    wide = np.array([[5, -1], [6, -1]], np.int32)
    strided = dataclasses.replace(layout, kv_len=wide[:, 0])
    assert jaxinfer.plan(strided, **HEADS).data.tobytes() == jaxinfer.plan(layout, **HEADS).data.tobytes()
