"""The GPU kernels within the documented accuracy: one axis at a time, at random, on long rows, in huge pools.

Points of a test share their static shapes, so that few programs compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS
from gpu_cases import TOLERANCE, check, draw_cases, expect_close, long_case, run

import jaxinfer
from jaxinfer import Variant

pytestmark = pytest.mark.gpu

CAUSAL = Variant(causal=True)
#: What a sweep holds fixed while one of them moves.
BASE: dict[str, Any] = {
    "kind": "paged",
    "variant": CAUSAL,
    "custom_mask": False,
    "group_size": 4,
    "num_kv_heads": 2,
    "head_dim": 128,
    "page_size": 16,
    "kv_layout": "NHD",
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def sweep(
    seed: int, number: int = 2, *, dtype: str, plan: dict[str, Any] | None = None, **moved: Any
) -> None:
    for case in draw_cases(seed, number, dtype=dtype, **{**BASE, **moved}):
        check(case, **(plan or {}))


@every_dtype
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_head_dim(head_dim: int, dtype: str) -> None:
    sweep(21, dtype=dtype, head_dim=head_dim)


@every_dtype
@pytest.mark.parametrize("group_size", [*range(1, 10), 12, 16, 64, 128])
def test_group_size(group_size: int, dtype: str) -> None:
    sweep(22, dtype=dtype, group_size=group_size, num_kv_heads=2 if group_size < 64 else 1)


@every_dtype
@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 64, 256])
def test_page_size(page_size: int, dtype: str) -> None:
    sweep(23, 3, dtype=dtype, page_size=page_size)


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        *((dtype, (1,)) for dtype in TOLERANCE),
        *((dtype, (tile,)) for dtype in ("float16", "bfloat16") for tile in (16, 32, 64, 128)),
        *(("bfloat16", tiles) for tiles in ((1, 16), (16, 32), (16, 128), (32, 64), (64, 128))),
    ],
)
def test_tile(tiles: tuple[int, ...], dtype: str) -> None:
    sweep(24, 3, dtype=dtype, plan={"tiles": tiles})
    sweep(24, 3, dtype=dtype, plan={"tiles": tiles, "num_ctas": 5, "schedule": "runs"})


@every_dtype
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
def test_layout(kind: str, kv_layout: str, dtype: str) -> None:
    sweep(25, 3, dtype=dtype, kind=kind, kv_layout=kv_layout)


@every_dtype
@pytest.mark.parametrize("num_layers", [1, 3])
def test_layer_axis(num_layers: int, dtype: str) -> None:
    sweep(26, 3, dtype=dtype, num_layers=num_layers)


# ---- 300 random points


HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (80, 80), (16, 16), (256, 256), (40, 72), (128, 24))
GROUP_SIZES = (1, 4, 8, 2, 7, 3, 16, 5, 12, 6, 9, 33, 64, 17, 128)
RULES = (
    CAUSAL,
    Variant(),
    Variant(causal=True, window_left=9),
    Variant(causal=True, logits_soft_cap=3.0),
    Variant(window_left=11, window_right=4),
    Variant(softmax=False, causal=True),
)


@pytest.mark.parametrize("group", range(50))
def test_random_points(group: int) -> None:
    """Six points for each of 50 draws of all static facts."""
    rng = np.random.default_rng([31, group])
    dtype = tuple(TOLERANCE)[group % 3]
    kind = KINDS[group % len(KINDS)]
    group_size = GROUP_SIZES[group % len(GROUP_SIZES)]
    head_dim, head_dim_vo = HEAD_DIMS[group % len(HEAD_DIMS)]
    options: dict[str, Any] = {"schedule": str(rng.choice(["lpt", "runs"]))}
    if rng.random() < 0.5:
        options["num_ctas"] = int(rng.choice([1, 3, 40]))
    tiles = [t for t in (16, 32, 64, 128) if t >= group_size]
    if dtype != "float32" and rng.random() < 0.5:
        options["tiles"] = (int(rng.choice(tiles)),)
    composed = kind.startswith("compose")
    if not composed and rng.random() < 0.3:
        options["batch_invariant"] = True
    sweep(
        100 + group,
        6,
        dtype=dtype,
        plan=options,
        kind=kind,
        group_size=group_size,
        num_kv_heads=int(rng.integers(1, 4)) if group_size <= 9 else 1,
        head_dim=head_dim,
        head_dim_vo=head_dim_vo,
        page_size=int(rng.choice([1, 2, 3, 5, 8, 16, 32])),
        variant=RULES[int(rng.integers(len(RULES)))],
        custom_mask=not composed and rng.random() < 0.3,
        kv_layout=str(rng.choice(["NHD", "HND"])),
        num_layers=2 if rng.random() < 0.3 else None,
    )


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_long_rows(head_dim: int, dtype: str) -> None:
    """Thousands of KV tokens, cut and merged from partial states."""
    case = long_case([2900, 700, 1, 130], [1, 3, 1, 40], dtype, head_dim=head_dim)
    check(case)
    check(case, batch_invariant=True)


@pytest.mark.parametrize("offset", [-(2.0**15), 2.0**15])
@every_dtype
def test_logits_far_from_zero(offset: float, dtype: str) -> None:
    """A common offset of all logits, exact in every dtype, changes o by nothing but rounding."""
    case = long_case([300, 40], [1, 2], dtype, head_dim=64)
    # Multiples of 1 / 8, so that every sum of products is exact in float32.
    q, k = (np.clip(np.round(np.asarray(x, np.float32) * 8) / 8, -3, 3) for x in (case.q, case.k))
    q[..., 0], k[..., 0] = 256.0, offset / 256.0
    check(dataclasses.replace(case, q=q.astype(case.q.dtype), k=k.astype(case.k.dtype), sm_scale=1.0))


# ---- pools beyond 2^31 and 2^32 elements (flashinfer#3130)


def _needs_memory(num_bytes: float) -> None:
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < num_bytes:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of GPU memory, there are {limit / 2**30:.0f}")


@pytest.mark.parametrize(
    ("kv_layout", "page_size", "pages", "layers"),
    [
        # 16384 elements a page: ids at 2^31 and 2^32 elements.
        ("NHD", 16, (0, 131072, 262144), None),
        ("HND", 16, (0, 131072, 262144), None),
        # The same elements in pages of one token.
        ("NHD", 1, (0, 2097152, 4194304), None),
        # The last layer begins beyond 2^32 elements.
        ("NHD", 16, (0, 65537, 131072), 3),
    ],
)
def test_pools_beyond_32_bits(
    kv_layout: str, page_size: int, pages: tuple[int, ...], layers: int | None
) -> None:
    """Append and attention on pages 0 and far away; everything else in the pool is NaN."""
    heads, dim = 8, 128
    num_pages = pages[-1] + 1
    page = (page_size, heads, dim) if kv_layout == "NHD" else (heads, page_size, dim)
    shape = (*(() if layers is None else (layers,)), num_pages, *page)
    _needs_memory(2.5 * 2 * np.prod(shape, dtype=float))
    layer = None if layers is None else np.int32(layers - 1)
    rng = np.random.default_rng(0)
    num_tokens = page_size * len(pages)
    k_new, v_new = (rng.normal(size=(num_tokens, heads, dim)).astype(jnp.bfloat16) for _ in range(2))
    v_new += np.repeat(np.arange(len(pages)), page_size)[:, None, None].astype(jnp.bfloat16)
    slots = (np.array(pages)[:, None] * page_size + np.arange(page_size)).reshape(-1).astype(np.int32)
    empty = jax.jit(lambda: jnp.full(shape, jnp.nan, jnp.bfloat16))
    append = jax.jit(
        lambda k, v, *new: jaxinfer.append_kv(k, v, *new, slots, layer=layer, kv_layout=kv_layout),
        donate_argnums=(0, 1),
    )
    k, v = append(empty(), empty(), k_new, v_new)
    # What was written, by XLA's own addressing.
    read = jax.jit(lambda x, at: (x if layer is None else x[layers - 1])[at])  # type: ignore[operator]
    for pool, new in ((k, k_new), (v, v_new)):
        got = np.asarray(read(pool, np.array(pages, np.int32)))
        got = got.swapaxes(1, 2) if kv_layout == "HND" else got
        assert got.tobytes() == new.tobytes()
    # One request for each page, and one over all of them.
    table = np.array([*pages, *pages[::-1]], np.int32)
    kv_len = np.array([page_size] * len(pages) + [num_tokens])
    layout = jaxinfer.paged(np.arange(5), [0, 1, 2, 3, 6], table, kv_len, page_size)
    q = rng.normal(size=(4, 32, dim)).astype(jnp.bfloat16)
    plan = jaxinfer.plan(layout, num_qo_heads=32, num_kv_heads=heads, head_dim=dim, dtype="bfloat16")
    state = jax.jit(
        lambda q, k, v: jaxinfer.attention(
            q, k, v, layout, plan, layer=layer, kv_layout=kv_layout, return_lse=True
        )
    )(q, k, v)
    del k, v
    # The same call on a pool of those pages alone.
    small = dataclasses.replace(layout, kv_indices=np.array([0, 1, 2, 2, 1, 0], np.int32))
    case = dataclasses.replace(
        long_case([1], [1], "bfloat16"),
        q=q,
        k=k_new.reshape(len(pages), page_size, heads, dim),
        v=v_new.reshape(len(pages), page_size, heads, dim),
        layout=small,
        variant=Variant(),
        num_pages=len(pages),
    )
    o, lse = np.asarray(state.o), np.asarray(state.lse)
    expect_close(case, o, lse)
    small_o, small_lse = run(case)
    assert small_o.tobytes() == o.tobytes() and small_lse.tobytes() == lse.tobytes()
