"""`append_kv`: which bytes it writes, which it leaves alone, its refusals. Donation: test_transforms.py."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend import assert_close
from batches import ABSURD
from jax import export

import jaxinfer
from jaxinfer import reference

IMPLEMENTATIONS = {"engine": jaxinfer.append_kv, "reference": reference.append_kv}
every_append = pytest.mark.parametrize("append", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
every_kv_layout = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
NUM_PAGES, PAGE_SIZE, HEADS = 7, 4, 3


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Every bit pattern may occur, NaN payloads included: a cache is bytes."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, size), np.uint8).reshape(-1).view(dtype).reshape(shape)


def pool_shape(kv_layout: str, dim: int, layers: int | None = None) -> tuple[int, ...]:
    page = (PAGE_SIZE, HEADS, dim) if kv_layout == "NHD" else (HEADS, PAGE_SIZE, dim)
    return (NUM_PAGES, *page) if layers is None else (layers, NUM_PAGES, *page)


def written(
    pool: np.ndarray[Any, Any], x: np.ndarray[Any, Any], slots: Any, kv_layout: str, layer: int | None
) -> np.ndarray[Any, Any]:
    """The pool after writing token by token."""
    out = pool.copy()
    target = out if layer is None else out[layer] if 0 <= layer < out.shape[0] else None
    for t, slot in enumerate(np.asarray(slots)):
        if target is not None and 0 <= slot < NUM_PAGES * PAGE_SIZE:
            page, offset = divmod(int(slot), PAGE_SIZE)
            if kv_layout == "NHD":
                target[page, offset] = x[t]
            else:
                target[page, :, offset] = x[t]
    return out


@functools.cache
def jitted(append: Any, kv_layout: str) -> Any:
    def step(k_pages: Any, v_pages: Any, k: Any, v: Any, slots: Any, layer: Any) -> Any:
        return append(k_pages, v_pages, k, v, slots, layer=layer, kv_layout=kv_layout)

    return jax.jit(step)


def expect_written(
    append: Any,
    kv_layout: str,
    dtype: Any,
    slots: Any,
    *,
    layers: int | None = None,
    layer: int | None = None,
) -> None:
    rng = np.random.default_rng(0)
    dims = (16, 24)
    pools = [random_bits(rng, pool_shape(kv_layout, d, layers), dtype) for d in dims]
    new = [random_bits(rng, (len(slots), HEADS, d), dtype) for d in dims]
    if append is reference.append_kv:
        # XLA's bfloat16 copies go through float32, which quiets signalling NaNs.
        for x in (*pools, *new):
            x[np.isnan(x.astype(np.float32))] = np.nan
    step = jitted(append, kv_layout)
    args = [jnp.asarray(x) for x in (*pools, *new, np.asarray(slots, np.int32))]
    got = step(*args, None if layer is None else jnp.int32(layer))
    for name, after, pool, x in zip("kv", got, pools, new, strict=True):
        want = written(pool, x, slots, kv_layout, layer)
        assert after.dtype == dtype
        assert np.asarray(after).tobytes() == want.tobytes(), f"{name} pool"


@every_append
@every_kv_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_the_pool(append: Any, kv_layout: str, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        slots = rng.permutation(NUM_PAGES * PAGE_SIZE)[:9].astype(np.int32)
        slots[rng.random(9) < 0.3] = rng.choice([-1, -7, NUM_PAGES * PAGE_SIZE, *ABSURD])
        expect_written(append, kv_layout, dtype, slots)


@every_append
@every_kv_layout
def test_layers_of_one_pool(append: Any, kv_layout: str) -> None:
    """Out of range nothing is written, whatever the layer number would wrap around to."""
    slots = [5, -1, 27, 0, 13]
    for layer in (0, 2, 3, -1, 2147483647, -2147483648):
        expect_written(append, kv_layout, np.float32, slots, layers=3, layer=layer)


@every_append
def test_no_tokens(append: Any) -> None:
    expect_written(append, "NHD", np.float32, [])


@every_append
def test_padding_tokens_write_nothing(append: Any) -> None:
    """They used to share a trash page that is also read (transformers#46765)."""
    slots = [9, -1, 3, -1, -1, 20, -1, -1]
    expect_written(append, "NHD", np.float32, slots)


@every_append
def test_bad_page_ids_are_skipped(append: Any) -> None:
    """Mapping a bad id to page 0 overwrites foreign data (onnxruntime#32391)."""
    for bad in (99, -1, 2**30, 2**29 - 1, 2147483647, -2147483648):
        layout = jaxinfer.paged([0, 6], [0, 3], [2, bad, 1], [12], PAGE_SIZE)
        slots = layout.slots()
        assert not np.isin(slots[:2], np.arange(NUM_PAGES * PAGE_SIZE)).any()
        assert slots[2:].tolist() == [4, 5, 6, 7]
        expect_written(append, "NHD", np.float32, slots)


# ---- slots of a step


def test_requests_that_are_fully_cached_need_no_slots() -> None:
    """Requests 1 and 4 have no new tokens, the last two of the capacity are padding (flashinfer#616)."""
    q_len, kv_len = [2, 0, 1, 1, 0, 2], [6, 8, 1, 4, 3, 9]
    pages = [[0, 1], [2, 3], [4], [5], [6], [7, 8, 9]]
    qo, kv = np.cumsum([0, *q_len]), np.cumsum([0, *(len(p) for p in pages)])
    table = np.concatenate([*pages, ABSURD])
    layout = jaxinfer.paged(qo, kv, table, kv_len, 4, num_tokens=8)
    want = [1 * 4 + 0, 1 * 4 + 1, 4 * 4, 5 * 4 + 3, 8 * 4 + 3, 9 * 4, -1, -1]
    assert layout.slots().tolist() == want
    assert jax.jit(jaxinfer.BlockSparse.slots)(layout).tolist() == want


@every_append
@every_kv_layout
def test_an_append_over_a_page_edge(append: Any, kv_layout: str) -> None:
    """Position, slot and argument order were confused (sarathi-serve#56)."""
    layout = jaxinfer.paged([0, 3], [0, 2], [6, 1], [6], PAGE_SIZE)
    assert layout.slots().tolist() == [27, 4, 5]
    expect_written(append, kv_layout, np.float32, layout.slots())


@every_kv_layout
def test_append_then_attend_sees_what_was_appended(kv_layout: str) -> None:
    """q = 0 and values 0, 1, 2, ... written token by token over a poisoned pool: o is the mean so far."""
    table = [6, 1, 3]
    shape = (7, 4, 2, 16) if kv_layout == "NHD" else (7, 2, 4, 16)
    k_pages = v_pages = jnp.full(shape, jnp.nan, jnp.float32)

    @jax.jit
    def step(k_pages: Any, v_pages: Any, value: Any, layout: Any, plan: Any) -> Any:
        new = jnp.full((1, 2, 16), value)
        k_pages, v_pages = jaxinfer.append_kv(k_pages, v_pages, new, new, layout.slots(), kv_layout=kv_layout)
        q = jnp.zeros((1, 4, 16))
        return jaxinfer.attention(q, k_pages, v_pages, layout, plan, kv_layout=kv_layout), k_pages, v_pages

    for n in range(1, 11):
        layout = jaxinfer.paged([0, 1], [0, 3], [*table, *ABSURD], [n], 4)
        plan = jaxinfer.plan(layout, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=np.float32)
        o, k_pages, v_pages = step(k_pages, v_pages, float(n - 1), layout, plan)
        assert_close(o, np.full((1, 4, 16), (n - 1) / 2), rtol=1e-6)
    assert step._cache_size() == 1


# ---- refusals


def call(**changes: Any) -> Any:
    pool, x = jnp.zeros((6, 4, 2, 16)), jnp.zeros((3, 2, 16))
    args: dict[str, Any] = {
        "k_pages": pool,
        "v_pages": pool,
        "k": x,
        "v": x,
        "slots": np.arange(3),
        **changes,
    }
    operands = [args.pop(name) for name in ("k_pages", "v_pages", "k", "v", "slots")]
    return jaxinfer.append_kv(*operands, **args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pages": jnp.zeros((24, 2, 16))}, r"k_pages must be \[num_pages, page_size, .*\(24, 2, 16\)"),
        ({"v_pages": jnp.zeros((6, 4, 2, 16), jnp.int32)}, "v_pages must be one of .*float32.*int32"),
        ({"v_pages": jnp.zeros((5, 4, 2, 16))}, r"may differ in head_dim only.*6, 4, 2, 16.*5, 4, 2, 16"),
        ({"k": jnp.zeros((3, 2, 16), jnp.float16)}, "k must have k_pages's dtype float32, got float16"),
        ({"v": jnp.zeros((3, 4, 16))}, r"v must be \[num_tokens, 2, 16\] to fit v_pages .*\(3, 4, 16\)"),
        ({"v": jnp.zeros((4, 2, 16))}, "k and v must have the same num_tokens, got 3 and 4"),
        ({"slots": np.arange(4)}, "slots must have k's num_tokens 3, got 4"),
        ({"slots": np.zeros((3, 1), np.int32)}, r"slots must have 1 dimension\(s\), got shape \(3, 1\)"),
        ({"slots": np.array([0.0, 1.0, 2.0])}, "slots must be an integer array, got float64"),
        ({"slots": [4, 7, 4]}, "slots holds slot 4 more than once"),
        ({"kv_layout": "HDN"}, "kv_layout must be one of .*'HDN'"),
        ({"kv_layout": "HND"}, r"k must be \[num_tokens, 4, 16\] to fit k_pages .*HND.*\(3, 2, 16\)"),
        ({"layer": 0}, r"k_pages must be \[num_layers\] \+ .*\(6, 4, 2, 16\)"),
        ({"layer": 0.5}, "layer must be an int32 scalar, got 0.5"),
        (
            {name: jnp.zeros((2, 6, 4, 2, 16)) for name in ("k_pages", "v_pages")},
            r"k_pages must be .*\(2, 6, 4",
        ),
    ],
)
def test_wrong_calls(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
    if "more than once" not in message:
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda: call(**changes))()


def test_skipped_slots_may_repeat() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(slots=[-1, -1, 24])[0].shape == (6, 4, 2, 16)


@pytest.mark.parametrize("layer", [2**32, -(2**32), np.int64(2**32), np.uint64(2**63)])
def test_layers_beyond_int32_are_out_of_range(layer: Any) -> None:
    pool, x = jnp.zeros((1, 6, 4, 2, 16)), jnp.ones((3, 2, 16))
    assert not call(k_pages=pool, v_pages=pool, k=x, v=x, layer=layer)[0].any()
    layout = jaxinfer.paged([0, 3], [0, 1], [0], [3], 4)
    plan = jaxinfer.plan(layout, num_qo_heads=2, num_kv_heads=2, head_dim=16, dtype=np.float32)
    for implementation in (None, "reference"):
        state = jaxinfer.attention(
            x, pool, pool, layout, plan, layer=layer, implementation=implementation, return_lse=True
        )
        assert np.isneginf(state.lse).all()


def test_traced_64_bit_integers_do_not_wrap_around() -> None:
    with jax.enable_x64(True):
        pool, x = jnp.zeros((1, 6, 4, 2, 16), jnp.float32), jnp.ones((3, 2, 16), jnp.float32)
        slots, layer = jnp.array([2**32, -(2**32), 5]), jnp.array(0)
        k = jax.jit(jaxinfer.append_kv)(pool, pool, x, x, slots, layer=layer)[0]
        assert k.sum() == 2 * 16 and (k[0, 1, 1] == 1).all()
        assert not jax.jit(jaxinfer.append_kv)(pool, pool, x, x, slots, layer=layer + 2**32)[0].any()
        layout = jax.jit(lambda ids: jaxinfer.paged([0, 1], [0, 2], ids, [8], 4))(jnp.array([1, 2**32 + 2]))
        assert layout.kv_indices.dtype == jnp.int32 and int(jaxinfer.check(layout, 6)) == 1


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("slots_dtype", [np.int32, np.int64])
def test_the_reference_appends_in_64_bit_mode(kv_layout: str, slots_dtype: Any) -> None:
    shape = (2, 6, 4, 2, 16) if kv_layout == "NHD" else (2, 6, 2, 4, 16)
    pool, x, slots = np.zeros(shape, np.float32), np.ones((3, 2, 16), np.float32), np.array([3, -1, 23])
    want = jaxinfer.append_kv(pool, pool, x, x, slots, layer=1, kv_layout=kv_layout)
    with jax.enable_x64(True):
        append = functools.partial(reference.append_kv, layer=1, kv_layout=kv_layout)
        for run in (append, jax.jit(append)):
            got = run(pool, pool, x, x, slots.astype(slots_dtype))
            assert all((a == b).all() and a.dtype == np.float32 for a, b in zip(got, want, strict=True))


def test_a_program_for_pools_of_any_size() -> None:
    (size,) = export.symbolic_shape("num_pages")
    any_pool = jax.ShapeDtypeStruct((size, 4, 2, 16), np.float32)
    x, checks = jnp.ones((3, 2, 16)), [export.DisabledSafetyCheck.custom_call("jaxinfer_append")]
    for slots in (np.array([5, 2, -1], np.int32), None):  # on the host, and traced
        append = lambda k, v, s, host=slots: jaxinfer.append_kv(k, v, x, x, s if host is None else host)  # noqa: E731
        program = export.export(jax.jit(append), disabled_checks=checks)(
            any_pool, any_pool, np.zeros(3, np.int32)
        )
        for num_pages in (2, 7):
            pool, given = jnp.zeros((num_pages, 4, 2, 16)), np.array([5, 2, 4 * num_pages], np.int32)
            k, _ = program.call(pool, pool, given)
            assert k.sum() == 2 * 2 * 16 and (k[1, 1] == 1).all() and (k[0, 2] == 1).all()
