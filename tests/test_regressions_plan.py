"""Bugs that users of attention engines met: merging, precision, plans, neighbours in a batch, host arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend import assert_close
from batches import (
    ENGINE,
    Way,
    attend,
    engine_for_all,
    every_way,
    expect_visible,
    make_plan,
    random_requests,
    run,
    same_bits,
    store,
    zero_queries,
)
from jax import export
from plan_executor import unpack_plan

import jaxinfer
from jaxinfer import AttentionState, Variant

CAUSAL = Variant(causal=True)
NHD = Way("NHD", None)
every_storage = pytest.mark.parametrize("way", ENGINE, ids=str)


# ---- base-2 LSE fed to a base-e merge (flashinfer#2113, sglang#40903)


def prefix_and_suffix() -> tuple[list[Any], list[Any], list[Any]]:
    q, k, v = zero_queries([1, 1], [4096, 4])
    return q, k, [np.zeros_like(v[0]), np.ones_like(v[1])]


@every_way
def test_merged_states_weigh_by_natural_exponentials(way: Way) -> None:
    """4096 keys of value 0 and 4 of value 1: with a base-2 LSE the weight would be 4.5e-5."""
    state = run(way, store(way, *prefix_and_suffix(), page_size=64))
    assert_close(state.lse[:, 0], [math.log(4096), math.log(4)], rtol=1e-6)
    a, b = (
        AttentionState(jnp.asarray(state.o[i : i + 1]), jnp.asarray(state.lse[i : i + 1])) for i in (0, 1)
    )
    for merged in (jaxinfer.merge(a, b), jaxinfer.merge(b, a), jaxinfer.merge_many([a, b])):
        assert_close(merged.o, np.full((1, 1, 16), 4 / 4100), rtol=1e-5)
        assert_close(merged.lse, math.log(4100), rtol=1e-6)
    log2 = jaxinfer.lse_to_log2(a.lse)
    assert_close(log2, 12.0, rtol=1e-6)
    assert_close(jaxinfer.lse_from_log2(log2), a.lse, rtol=1e-6)


@every_way
def test_levels_of_a_composed_layout_weigh_by_natural_exponentials(way: Way) -> None:
    _, k, v = prefix_and_suffix()
    stored = store(way, [np.zeros((1, 1, 16), np.float32)] * 2, k, v, page_size=64)
    row = stored.layout
    parts = []
    for r in (0, 1):
        if way.storage == "contiguous":
            ptr = [0, 4096] if r == 0 else [0, 4100]
            part = jaxinfer.ragged([0, 1], ptr, num_kv_tokens=4103)
            if r == 1:
                part = jaxinfer.BlockSparse(
                    **{
                        **vars(part),
                        "kv_start": row.kv_start[1:],
                        "kv_len": row.kv_len[1:],
                        "q_pos": np.int32([3]),
                    }
                )
        else:
            ids = np.asarray(row.kv_indices)[row.kv_start[r] :][: -(-int(row.kv_len[r]) // 64)]
            part = jaxinfer.paged([0, 1], [0, len(ids)], ids, row.kv_len[r : r + 1], 64)
        parts.append(part)
    layout = jaxinfer.compose(*parts)
    plan = jaxinfer.plan(
        layout, num_qo_heads=1, num_kv_heads=1, head_dim=16, dtype=np.float32, variant=CAUSAL
    )
    state = attend(
        stored.q[:1],
        stored.k,
        stored.v,
        layout,
        plan,
        CAUSAL,
        kv_layout=way.kv_layout,
        implementation=way.implementation,
    )
    assert_close(state.o, np.full((1, 1, 16), 4 / 4100), rtol=1e-5)
    assert_close(state.lse, math.log(4100), rtol=1e-6)


# ---- merging empty states: -inf - -inf, 0 * NaN (flashinfer#4051, vllm#39148)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_empty_state_is_neutral_bit_for_bit(dtype: Any) -> None:
    x = AttentionState(
        jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), dtype),
        jnp.asarray(np.float32([[0.1, -80.0], [3.3, 1e4], [-1e4, 0.0]])),
    )
    nothing = jnp.full((3, 2), -jnp.inf)
    merge, merge_many = jax.jit(jaxinfer.merge), jax.jit(jaxinfer.merge_many)
    for garbage in (0.0, math.nan, math.inf, -math.inf, 7.0):
        empty = AttentionState(jnp.full((3, 2, 64), garbage, dtype), nothing)
        assert same_bits(merge(empty, x), x)
        assert same_bits(merge(x, empty), x)
        assert same_bits(merge_many([empty, empty, x, empty]), x)
        both = merge(empty, empty)
        assert same_bits(both, AttentionState(jnp.zeros((3, 2, 64), dtype), nothing))


# ---- fp16 accumulation of q . k overflows (flashinfer#4297, onnxruntime#24953)


@every_way
def test_fp16_products_beyond_the_largest_fp16(way: Way) -> None:
    """q . k = 128 * 32 * 32 = 131072 > 65504."""
    q = [np.full((1, 2, 128), 32, np.float16)]
    k = [np.full((5, 1, 128), 32, np.float16)]
    v = [np.arange(5, dtype=np.float16)[:, None, None] * np.ones((1, 1, 128), np.float16)]
    state = run(way, store(way, q, k, v, dtype=np.float16))
    assert state.o.dtype == np.float16
    np.testing.assert_array_equal(state.o, np.full((1, 2, 128), 2, np.float16))
    assert_close(state.lse, 131072 / math.sqrt(128) + math.log(5), rtol=1e-6)


# ---- running sums in bf16 stall at 256


@engine_for_all("kv_len,dtype", [(n, d) for n in (1000, 65536) for d in (ml_dtypes.bfloat16, np.float16)])
def test_long_sums_in_16_bits_are_exact(way: Way, kv_len: int, dtype: Any) -> None:
    q = [np.zeros((1, 1, 16), dtype)]
    k = [np.ones((kv_len, 1, 16), dtype)]
    ones = [np.ones((kv_len, 1, 16), dtype)]
    state = run(way, store(way, q, k, ones, page_size=512, dtype=dtype))
    np.testing.assert_array_equal(state.o.astype(np.float32), 1.0)
    assert_close(state.lse, math.log(kv_len), rtol=1e-6)
    signs = [ones[0] * np.where(np.arange(kv_len) % 2 == 0, 1, -1).astype(dtype)[:, None, None]]
    state = run(way, store(way, q, k, signs, page_size=512, dtype=dtype))
    np.testing.assert_array_equal(state.o.astype(np.float32), 0.0)


# ---- a fully masked row that is the mean of V in jax.nn (onnxruntime#28904): compare valid rows only


@every_way
def test_valid_rows_equal_jax_nn(way: Way) -> None:
    q, k, v = random_requests([9], [9], 4, 2, 32)
    state = run(way, store(way, q, k, v), variant=CAUSAL)
    with jax.default_matmul_precision("highest"):
        want = jax.nn.dot_product_attention(q[0][None], k[0][None], v[0][None], is_causal=True)[0]
    assert_close(state.o, want, rtol=2e-5, atol=2e-6)


# ---- a request's bits depend on its neighbours (flash-attention#1897, flashinfer#2424)


@every_storage
def test_a_long_request_among_short_ones(way: Way) -> None:
    q, k, v = random_requests([1] * 8, [4096] + [16] * 7, 4, 2, 16)
    options: dict[str, Any] = {"variant": CAUSAL, "batch_invariant": True}
    alone = run(way, store(way, q[:1], k[:1], v[:1], page_size=16), **options)
    batch = run(way, store(way, q, k, v, page_size=16, seed=3), **options)
    assert same_bits(batch.o[:1], alone.o)
    assert same_bits(batch.lse[:1], alone.lse)
    stored = store(way, q, k, v, page_size=16)
    first = run(way, stored, variant=CAUSAL)
    for _ in range(3):
        assert same_bits(run(way, stored, variant=CAUSAL), first)


# ---- the plan of the warm-up lengths is replayed (rtp-llm#378, TensorRT-LLM#18002)


@every_way
def test_one_program_serves_every_batch_of_its_capacity(way: Way) -> None:
    traces = []

    @jax.jit
    def step(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        traces.append(1)
        return jaxinfer.attention(
            q,
            k,
            v,
            layout,
            plan,
            variant=CAUSAL,
            kv_layout=way.kv_layout,
            return_lse=True,
            implementation=way.implementation,
        )

    page_size, num_pages = 16, 40
    rng = np.random.default_rng(0)
    for kv_len in (
        [64, 1, 1, 1],
        [1, 64, 37, 0],
        [16, 15, 2, 64],
        [17, 16, 3, 64],
        [0, 0, 0, 0],
        [33, 48, 49, 5],
    ):
        if way.storage == "contiguous":
            ptr = np.cumsum([0, *kv_len])
            layout = jaxinfer.ragged([0, 1, 2, 3, 4], ptr, num_kv_tokens=256)
            place = np.arange(ptr[-1])
            cache = np.full((256, 1, 16), np.nan, np.float32)
        else:
            table = rng.permutation(num_pages)[:16].reshape(4, 4)
            layout = jaxinfer.from_block_table(table, kv_len, [0, 1, 2, 3, 4], page_size)
            place = np.concatenate(
                [table[r][np.arange(n) // 16] * 16 + np.arange(n) % 16 for r, n in enumerate(kv_len)]
            )
            cache = np.full((num_pages * page_size, 1, 16), np.nan, np.float32)
        values = np.concatenate([np.arange(n) for n in kv_len]).astype(np.float32)
        cache[place] = values[:, None, None]
        if way.storage != "contiguous":
            cache = cache.reshape(num_pages, page_size, 1, 16)
            cache = cache.swapaxes(1, 2) if way.storage == "HND" else cache
        plan = jaxinfer.plan(
            layout, num_qo_heads=1, num_kv_heads=1, head_dim=16, dtype=np.float32, variant=CAUSAL
        )
        state = step(np.zeros((4, 1, 16), np.float32), cache, cache, layout, plan)
        expect_visible(AttentionState(np.asarray(state.o), np.asarray(state.lse)), [range(n) for n in kv_len])
    assert len(traces) == 1


# ---- a fixed workspace that is too small (vllm#40381)


def test_the_workspace_follows_from_the_capacity_alone() -> None:
    specs = set()
    for kv_len in ([512, 512], [1, 0], [0, 0], [512, 3]):
        layout = jaxinfer.from_block_table(np.arange(64).reshape(2, 32), kv_len, [0, 1, 2], 16)
        plan = jaxinfer.plan(layout, num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype=np.float32)
        specs.add(plan.spec)
        assert plan.data.shape == (plan.spec.num_words,)
        view = unpack_plan(plan)
        assert 0 <= view.num_slots <= plan.spec.slot_capacity
        assert 0 <= view.num_merge <= plan.spec.merge_capacity
    assert len(specs) == 1


def test_a_plan_of_a_smaller_capacity_is_refused_with_both_numbers() -> None:
    small = jaxinfer.from_block_table(np.arange(32).reshape(2, 16), [16, 16], [0, 1, 2], 16)
    large = jaxinfer.from_block_table(np.arange(64).reshape(2, 32), [16, 16], [0, 1, 2], 16)
    plan = jaxinfer.plan(small, num_qo_heads=2, num_kv_heads=2, head_dim=16, dtype=np.float32)
    q, pool = jnp.zeros((2, 2, 16)), jnp.zeros((64, 16, 2, 16))
    with pytest.raises(ValueError, match=r"kv_capacity 512.*1024"):
        jaxinfer.attention(q, pool, pool, large, plan)


# ---- a shared prefix hangs or is wrong when a suffix is empty (vllm#26130)


@engine_for_all("causal", [False, True])
def test_a_shared_prefix_with_an_empty_suffix(way: Way, causal: bool) -> None:
    score = {0: [1, 2], 1: [3, 4], 2: [], 3: [3]}
    value = {0: [10, 20], 1: [30, 40], 2: [], 3: [30]}
    o = [34.926527, 17.310586, 25.752104]
    lse = [4.440190, 2.313262, 3.407606]
    variant = Variant(causal=causal)
    page_size = 2

    def column(numbers: list[int], axis: int) -> np.ndarray[Any, Any]:
        x = np.zeros((len(numbers), 1, 16), np.float32)
        x[:, 0, axis] = numbers
        return x

    q = np.repeat(column([1], 0), 3, axis=0)
    if way.storage == "contiguous":
        rows = [0, 1, 2, 3]
        ptr = np.cumsum([0, *(len(score[r]) for r in rows)])
        k = np.concatenate([*(column(score[r], 0) for r in rows), np.full((2, 1, 16), np.nan, np.float32)])
        v = np.concatenate([*(column(value[r], 0) for r in rows), np.full((2, 1, 16), np.nan, np.float32)])
        prefix = jaxinfer.ragged([0, 3], [0, 2], num_kv_tokens=7)
        # The suffixes start behind the prefix: a row of no tokens covers it.
        suffix = jaxinfer.ragged([0, 0, 1, 2, 3], ptr, num_kv_tokens=7)
    else:
        pages = {0: 3, 1: 1, 3: 4}
        k, v = (np.full((6, page_size, 1, 16), np.nan, np.float32) for _ in range(2))
        for r, page in pages.items():
            k[page, : len(score[r])], v[page, : len(value[r])] = column(score[r], 0), column(value[r], 0)
        if way.storage == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        prefix = jaxinfer.paged([0, 3], [0, 1], [3], [2], page_size)
        suffix = jaxinfer.paged([0, 1, 2, 3], [0, 1, 1, 2], [1, 4, 2147480000], [2, 0, 1], page_size)

    def attention(layout: jaxinfer.BlockSparse) -> Any:
        plan = jaxinfer.plan(
            layout, num_qo_heads=1, num_kv_heads=1, head_dim=16, dtype=np.float32, variant=variant
        )
        return attend(
            q,
            k,
            v,
            layout,
            plan,
            variant,
            sm_scale=1.0,
            kv_layout=way.kv_layout,
            implementation=way.implementation,
        )

    shared = attention(jaxinfer.compose(prefix, suffix))
    assert_close(shared.o[:, 0, 0], o, atol=2e-6, rtol=1e-6)
    assert_close(shared.lse[:, 0], lse, atol=1e-6, rtol=1e-6)
    if way.storage == "contiguous":
        return
    flat = attention(jaxinfer.paged([0, 1, 2, 3], [0, 2, 3, 5], [3, 1, 3, 3, 4], [4, 2, 3], page_size))
    assert_close(flat.o, shared.o, rtol=2e-6, atol=1e-6)
    assert_close(flat.lse, shared.lse, rtol=2e-6)


# ---- exported programs: refused as unknown custom calls, attributes that do not serialise (jax#24160)


@every_storage
def test_an_exported_program_computes_the_same(way: Way) -> None:
    requests = random_requests([3, 1], [9, 20], 4, 2, 16)
    stored = store(way, *requests)
    plan = make_plan(way, stored, CAUSAL)

    @jax.jit
    def call(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        return attend(q, k, v, layout, plan, CAUSAL, kv_layout=way.kv_layout, sm_scale=0.3)

    leaves, tree = jax.tree.flatten((stored.q, stored.k, stored.v, stored.layout, plan))
    flat = jax.jit(lambda *x: jax.tree.leaves(call(*jax.tree.unflatten(tree, x))))
    with pytest.raises(ValueError, match="jaxinfer_attention"):
        export.export(flat)(*leaves)
    checks = [export.DisabledSafetyCheck.custom_call("jaxinfer_attention")]
    exported = export.export(flat, disabled_checks=checks)(*leaves)
    for got, want in zip(exported.call(*leaves), flat(*leaves), strict=True):
        assert same_bits(got, want)
    assert "jaxinfer_attention" in exported.mlir_module()
