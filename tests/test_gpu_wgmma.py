"""The warpgroup kernel and the portable one are each other's second opinion: the same plan, the same operands, two
programs that share no line of their inner loops.

Each of them against the float64 oracle is for test_gpu.py and tests/cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import bounds

import jaxinfer
from jaxinfer import AttentionState, Variant

pytestmark = pytest.mark.gpu

ROWS, TOKENS, KV_TOKENS = 6, 640, 2880  # capacities; lengths are operands
QO_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
VARIANT = Variant(causal=True)


def needs_hopper() -> None:
    if str(jax.devices()[0].compute_capability) != "9.0":
        pytest.skip("needs compute capability 9.0")


def draw_lengths(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Query and KV tokens of every row: chunks behind a prefix, whole prompts, more queries than KV, single tokens,
    nothing."""
    q_len, kv_len = [], []
    for _ in range(ROWS):
        q = int(rng.choice([0, 1, 2, int(rng.integers(3, 40)), int(rng.integers(40, 106))]))
        kv = [0, q, q // 2, q + int(rng.integers(0, 17)), int(rng.integers(1, 480))][int(rng.integers(5))]
        q_len.append(q)
        kv_len.append(kv)
    return q_len, kv_len


def make_layout(rng: np.random.Generator, page_size: int) -> tuple[Any, np.ndarray[Any, Any]]:
    """A layout (page_size 0: contiguous) and which KV slots hold tokens; whatever is beyond the lengths is absurd."""
    q_len, kv_len = draw_lengths(rng)
    qo_indptr = np.cumsum([0, *q_len]).astype(np.int32)
    if page_size == 0:
        kv_indptr = np.cumsum([0, *kv_len]).astype(np.int32)
        used = np.arange(KV_TOKENS) < kv_indptr[-1]
        return jaxinfer.ragged(qo_indptr, kv_indptr, KV_TOKENS, TOKENS), used
    width = -(-KV_TOKENS // ROWS // page_size)
    num_pages = ROWS * width
    free = list(rng.permutation(num_pages))
    table = np.full((ROWS, width), 2147480000, np.int32)
    used = np.zeros((num_pages, page_size), np.bool_)
    for row, tokens in enumerate(kv_len):
        for i in range(-(-tokens // page_size)):
            page = table[row, i] = free.pop()
            used[page, : tokens - i * page_size] = True
    layout = jaxinfer.from_block_table(
        table, np.asarray(kv_len, np.int32), qo_indptr, page_size, TOKENS, num_pages
    )
    return layout, used.reshape(-1)


def make_program(page_size: int) -> Callable[..., dict[str, jax.Array]]:
    """Both kernels on random values in poisoned caches, and how far apart their results are."""

    @jax.jit
    def program(seed: jax.Array, used: jax.Array, layout: Any, plan: jaxinfer.Plan) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 3)
        q = jax.random.normal(keys[0], (TOKENS, QO_HEADS, HEAD_DIM), jnp.bfloat16)
        slots = (used.size // (page_size or 1), *([page_size] if page_size else []), KV_HEADS, HEAD_DIM)
        holds = used.reshape(*slots[:-2], 1, 1)
        k, v = (jnp.where(holds, jax.random.normal(key, slots, jnp.bfloat16), jnp.nan) for key in keys[1:])
        portable, warpgroup = (
            jaxinfer.attention(
                q, k, v, layout, plan, variant=VARIANT, return_lse=True, implementation=implementation
            )
            for implementation in ("mma", None)
        )
        assert isinstance(portable, AttentionState) and isinstance(warpgroup, AttentionState)
        a, b = portable.o.astype(jnp.float32), warpgroup.o.astype(jnp.float32)
        sees = jnp.isfinite(portable.lse)
        return {
            "not finite": jnp.sum(~jnp.isfinite(a)) + jnp.sum(~jnp.isfinite(b)),
            "empty rows differ": jnp.sum(sees != jnp.isfinite(warpgroup.lse)),
            "empty rows are not zero": jnp.sum(jnp.where(sees[..., None], 0.0, jnp.abs(b))),
            "o": jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(a), 1e-6),
            "lse": jnp.max(jnp.where(sees, jnp.abs(portable.lse - warpgroup.lse), 0.0)),
        }

    return program


@pytest.mark.parametrize("page_size", [0, 16, 8, 3])
def test_portable_and_warpgroup_kernels_agree_on_ragged_batches(page_size: int) -> None:
    """125 batches for each loader: contiguous, pages in boxes of 16 and 8 rows, row by row."""
    needs_hopper()
    program = make_program(page_size)
    results = []
    for seed in range(125):
        rng = np.random.default_rng([page_size, seed])
        layout, used = make_layout(rng, page_size)
        plan = jaxinfer.plan(
            layout,
            num_qo_heads=QO_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=jnp.bfloat16,
            variant=VARIANT,
            tiles=(128,),
            num_ctas=12,  # long queues
        )
        results.append(program(np.uint32(seed), used, layout, plan))
    for seed, result in enumerate(jax.device_get(results)):
        exact = {name: float(result[name]) for name in result if name not in ("o", "lse")}
        assert not any(exact.values()), f"batch {seed}: {exact}"
        assert result["o"] < bounds()["bfloat16"], f"batch {seed}"
        assert result["lse"] < 1e-3, f"batch {seed}"


def test_plans_on_this_gpu_use_the_warpgroup_kernel() -> None:
    """One CTA on every multiprocessor, as many rows as its warpgroups hold; explicit tiles stay as they are."""
    needs_hopper()
    layout, _ = make_layout(np.random.default_rng(0), 16)
    for head_dim, tile in ((64, 192), (128, 128), (256, 128)):
        plan = jaxinfer.plan(
            layout, num_qo_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=jnp.bfloat16, variant=VARIANT
        )
        large = plan.spec.classes[-1]
        assert (large.tile, large.num_ctas) == (tile, jax.devices()[0].core_count)
    multiprocessors = jax.devices()[0].core_count
    for heads, tokens, variant, tile in (
        ((32, 8), 48 * multiprocessors, jaxinfer.Variant(causal=True), 192),
        ((32, 8), 48 * multiprocessors - 1, jaxinfer.Variant(causal=True), 128),
        ((32, 32), 48 * multiprocessors, jaxinfer.Variant(causal=True), 128),
        ((32, 8), 48 * multiprocessors, jaxinfer.Variant(softmax=False), 128),
    ):
        layout = jaxinfer.ragged([0, tokens], [0, tokens])
        plan = jaxinfer.plan(
            layout,
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=96,
            dtype=jnp.bfloat16,
            variant=variant,
        )
        assert plan.spec.classes[-1].tile == tile
