"""Run by test_transforms.py with two host devices: shard_map over heads and over KV, and explicit sharding.

Prints the name of each part that passed, with and without the reference in the kernels' place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinfer
from jaxinfer import AttentionState, Variant

CAUSAL = Variant(causal=True)
NUM_QO_HEADS, NUM_KV_HEADS, DIM, PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 8, 2, 16, 4, 9, 3
AUTO = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
LAYOUT = jaxinfer.paged([0, 1, 4], [0, 3, 5], [3, 1, 5, 2, 4], [9, 6], PAGE_SIZE, num_tokens=6)


def planned(heads: int, layout: jaxinfer.BlockSparse = LAYOUT, variant: Variant = CAUSAL) -> jaxinfer.Plan:
    """The plan with the head counts of one of `heads` shards."""
    return jaxinfer.plan(
        layout,
        num_qo_heads=NUM_QO_HEADS // heads,
        num_kv_heads=NUM_KV_HEADS // heads,
        head_dim=DIM,
        dtype=np.float32,
        variant=variant,
    )


def inputs(*pool: int) -> Any:
    rng = np.random.default_rng(0)
    shapes = [(6, NUM_QO_HEADS, DIM), (*pool, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, DIM)]
    q, k, v = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shapes[0], shapes[1], shapes[1]))
    return q, k, v


def attention(q: Any, k: Any, v: Any, layout: Any, plan: Any, implementation: str | None = None) -> Any:
    return jaxinfer.attention(
        q, k, v, layout, plan, variant=CAUSAL, return_lse=True, implementation=implementation
    )


def append_of(implementation: str | None) -> Callable[..., Any]:
    return jaxinfer.append_kv if implementation is None else jaxinfer.reference.append_kv


def varying(x: Any) -> Any:
    """Mesh axes over which the type of x says it varies."""
    return jax.typeof(x).manual_axis_type.varying


def heads_sharded(implementation: str | None) -> None:
    q, k, v = inputs()
    want = jax.jit(attention)(q, k, v, LAYOUT, planned(1))
    heads, pages = P(None, "tp", None), P(None, None, "tp", None)
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(attention, implementation=implementation),
            mesh=AUTO,
            in_specs=(heads, pages, pages, P(), P()),
            out_specs=AttentionState(heads, P(None, "tp")),
        )
    )
    got = sharded(q, k, v, LAYOUT, planned(2))
    np.testing.assert_allclose(got.o, want.o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=1e-6)
    text = sharded.lower(q, k, v, LAYOUT, planned(2)).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" not in text
    print("heads")


def layer_scan(
    q: Any, k_pages: Any, v_pages: Any, layout: Any, plan: Any, implementation: str | None = None
) -> Any:
    """Append and attention in a scan over layers; manual axes must survive the carry."""

    def step(carry: Any, layer: Any) -> Any:
        x, k_pages, v_pages = carry
        new = x[:, ::4]
        append = append_of(implementation)
        k_pages, v_pages = append(k_pages, v_pages, new, new, layout.slots(), layer=layer)
        o = jaxinfer.attention(
            x, k_pages, v_pages, layout, plan, variant=CAUSAL, layer=layer, implementation=implementation
        )
        return (o + x, k_pages, v_pages), None

    return jax.lax.scan(step, (q, k_pages, v_pages), jnp.arange(NUM_LAYERS))[0]


def scan_inside_shard_map(implementation: str | None) -> None:
    q, k, v = inputs(NUM_LAYERS)
    want = jax.jit(layer_scan)(q, k, v, LAYOUT, planned(1))
    heads, pages = P(None, "tp", None), P(None, None, None, "tp", None)
    got = jax.jit(
        jax.shard_map(
            functools.partial(layer_scan, implementation=implementation),
            mesh=AUTO,
            in_specs=(heads, pages, pages, P(), P()),
            out_specs=(heads, pages, pages),
        )
    )(q, k, v, LAYOUT, planned(2))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    print("scan")


def kv_sharded(implementation: str | None) -> None:
    """Each device holds half of the KV tokens and all heads; states merge across the mesh axis.

    q is the same everywhere, the result is not: its type must say so.
    """
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((2, NUM_QO_HEADS, DIM)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((20, NUM_KV_HEADS, DIM)), jnp.float32) for _ in range(2))
    half, whole = jaxinfer.ragged([0, 2], [0, 10]), jaxinfer.ragged([0, 2], [0, 20])
    full = Variant()

    def part(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
        state = jaxinfer.attention(q, k, v, layout, plan, return_lse=True, implementation=implementation)
        assert isinstance(state, AttentionState)
        assert varying(state.o) == {"tp"}
        assert varying(state.lse) == {"tp"}
        top = jax.lax.pmax(state.lse, "tp")
        weight = jnp.exp(state.lse - top)
        total = jax.lax.psum(weight, "tp")
        return jax.lax.psum(state.o * weight[..., None], "tp") / total[..., None], top + jnp.log(total)

    kv = P("tp", None, None)
    o, lse = jax.jit(jax.shard_map(part, mesh=AUTO, in_specs=(P(), kv, kv, P(), P()), out_specs=P()))(
        q, k, v, half, planned(1, half, full)
    )
    want = jaxinfer.attention(q, k, v, whole, planned(1, whole, full), return_lse=True)
    np.testing.assert_allclose(o, want.o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-6, atol=1e-6)

    def fresh_pool(k: Any) -> Any:
        pool = jnp.zeros((2, 8, NUM_KV_HEADS, DIM))
        pages = append_of(implementation)(pool, pool, k, k, np.arange(10, dtype=np.int32))
        assert all(varying(x) == {"tp"} for x in pages)
        return pages

    for pages in jax.jit(jax.shard_map(fresh_pool, mesh=AUTO, in_specs=kv, out_specs=P("tp")))(k):
        got = np.asarray(pages).reshape(2, 16, NUM_KV_HEADS, DIM)[:, :10]
        np.testing.assert_array_equal(got, np.asarray(k).reshape(2, 10, NUM_KV_HEADS, DIM))
    print("kv")


def explicit_sharding() -> None:
    """Result types keep the mesh axes of q and of the pools, and the values are those of one device."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    q, k, v = inputs()
    want = jax.jit(attention)(q, k, v, LAYOUT, planned(1))
    heads, pages = P(None, "tp", None), P(None, None, "tp", None)
    with jax.set_mesh(mesh):
        on_mesh = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((q, heads), (k, pages), (v, pages))]
        types = []

        @jax.jit
        def step(q: Any, k: Any, v: Any, layout: Any, plan: Any) -> Any:
            slots = np.full(6, -1, np.int32)
            new = jax.sharding.reshard(jnp.zeros((6, NUM_KV_HEADS, DIM)), heads)
            k, v = jaxinfer.append_kv(k, v, new, new, slots)
            state = attention(q, k, v, layout, plan)
            types.extend(jax.typeof(x).sharding.spec for x in (state.o, state.lse, k))
            return state

        got = step(*on_mesh, LAYOUT, planned(1))
    assert types == [heads, P(None, "tp"), pages], types
    np.testing.assert_allclose(got.o, want.o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=1e-6)
    print("explicit")


if __name__ == "__main__":
    assert jax.device_count() == 2
    for implementation in (None, "reference"):
        heads_sharded(implementation)
        scan_inside_shard_map(implementation)
        kv_sharded(implementation)
    explicit_sharding()
