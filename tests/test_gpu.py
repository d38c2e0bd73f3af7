"""The GPU kernels against the float64 oracle: every layout, dtype and tile, on poisoned batches; launches
from loops, exported programs and user rules.

Small shapes that compute-sanitizer can follow. Rules that hold on every platform are tested in the other
files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS
from gpu_cases import TOLERANCE, check, draw_cases, long_case, request_kv, run, run_python
from jax import export
from oracle import append_oracle

import jaxinfer
from jaxinfer import Variant

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout(kind: str, dtype: str) -> None:
    variant = Variant(causal=True)
    for case in draw_cases(
        1, 5, kind=kind, dtype=dtype, variant=variant, custom_mask=False, group_size=4, num_kv_heads=2,
        page_size=5, head_dim=64, kv_layout="NHD",
    ):  # fmt: skip
        check(case)
        check(case, num_ctas=3)  # long queues


@pytest.mark.parametrize("tiles", [(16,), (32,), (64,), (128,), (16, 64), (32, 128)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_tile(tiles: tuple[int, ...], dtype: str) -> None:
    for kind in ("paged", "ragged", "compose2"):
        for case in draw_cases(
            2, 3, kind=kind, dtype=dtype, variant=Variant(), custom_mask=False, group_size=3, num_kv_heads=2,
            page_size=16, head_dim=128, kv_layout="NHD",
        ):  # fmt: skip
            check(case, tiles=tiles)
            check(case, tiles=tiles, num_ctas=2, implementation="mma")


@pytest.mark.parametrize("tile", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 96, 128, 136, 192, 256, (192, 128), (64, 256)])
def test_every_head_dim(tile: int, head_dim: int | tuple[int, int]) -> None:
    head_dim_qk, head_dim_vo = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    for case in draw_cases(
        3, 2, kind="paged", dtype="float32" if tile == 1 else "bfloat16", variant=Variant(causal=True),
        custom_mask=False, group_size=4, num_kv_heads=1, page_size=3, head_dim=head_dim_qk,
        head_dim_vo=head_dim_vo, kv_layout="HND",
    ):  # fmt: skip
        check(case, tiles=(tile,), num_ctas=4)


@pytest.mark.parametrize("group_size", [1, 2, 5, 7, 8, 16, 17, 33, 65, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_group_sizes(group_size: int, dtype: str) -> None:
    for case in draw_cases(
        4, 2, kind="paged", dtype=dtype, variant=Variant(causal=True), custom_mask=False,
        group_size=group_size, num_kv_heads=1, page_size=8, head_dim=64, kv_layout="NHD",
    ):  # fmt: skip
        check(case)


RULES = [
    Variant(window_left=3),
    Variant(causal=True, window_left=0),
    Variant(window_left=5, window_right=2),
    Variant(window_left=2**31 - 1, window_right=2**31 - 1),
    Variant(causal=True, logits_soft_cap=0.7),
    Variant(softmax=False),
    Variant(softmax=False, causal=True, logits_soft_cap=2.0),
]


@pytest.mark.parametrize("variant", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("custom_mask", [False, True])
@pytest.mark.parametrize("tiles", [(1,), (16,), (64,)])
def test_rules(variant: Variant, custom_mask: bool, tiles: tuple[int, ...]) -> None:
    for case in draw_cases(
        5, 3, kind="paged", dtype="float32" if tiles == (1,) else "float16", variant=variant,
        custom_mask=custom_mask, group_size=2, num_kv_heads=2, page_size=7, head_dim=64, kv_layout="NHD",
    ):  # fmt: skip
        check(case, tiles=tiles, num_ctas=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_bad_pages_and_positions(dtype: str) -> None:
    for case in draw_cases(
        6, 6, kind="table", dtype=dtype, variant=Variant(causal=True), custom_mask=False, group_size=2,
        num_kv_heads=2, page_size=4, head_dim=64, kv_layout="HND", num_layers=3, bad_ids=True,
        tree_positions=True,
    ):  # fmt: skip
        check(case)
    for layer in (-1, 3):
        o, lse = run(dataclasses.replace(case, layer=layer))
        assert not o.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["lpt", "runs"])
def test_split_rows_and_repeated_bits(dtype: str, schedule: str) -> None:
    case = long_case([5000, 17, 2100, 0, 900], [1, 1, 1, 1, 1], dtype)
    check(case, schedule=schedule)
    first = run(case, schedule=schedule)
    for _ in range(20):
        again = run(case, schedule=schedule)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


def test_chunked_prefill() -> None:
    check(long_case([700, 333, 64], [300, 77, 64], "bfloat16"))
    check(long_case([700, 333, 64], [300, 77, 64], "bfloat16"), tiles=(64,), batch_invariant=True)


def test_batch_invariant_bits() -> None:
    alone = run(long_case([3000], [1], "bfloat16"), batch_invariant=True)
    case = long_case([3000, 500, 90], [1, 1, 1], "bfloat16")
    # The same request as above in a larger batch: its own pages hold the same rows.
    single = long_case([3000], [1], "bfloat16")
    k, v, q = np.array(case.k), np.array(case.v), np.array(case.q)
    pages = case.layout.kv_indices[: -(-3000 // 16)]
    k[pages], v[pages] = single.k[single.layout.kv_indices], single.v[single.layout.kv_indices]
    q[0] = single.q[0]
    together = run(dataclasses.replace(case, q=q, k=k, v=v), batch_invariant=True)
    assert together[0][0].tobytes() == alone[0][0].tobytes()
    assert together[1][0].tobytes() == alone[1][0].tobytes()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [None, 1, 2])
def test_append(kv_layout: str, dtype: str, layer: int | None) -> None:
    rng = np.random.default_rng(8)
    shape = (5, 4, 3) if kv_layout == "NHD" else (5, 3, 4)
    lead = () if layer is None else (2,)  # layer 2 does not exist
    pools = [rng.normal(size=(*lead, *shape, d)).astype(jnp.dtype(dtype)) for d in (64, 24)]
    rows = [rng.normal(size=(9, 3, d)).astype(jnp.dtype(dtype)) for d in (64, 24)]
    slots = np.array([0, -1, 19, 7, 20, 2**31 - 1, 12, -(2**31), 3], np.int32)
    out = jax.jit(lambda *a: jaxinfer.append_kv(*a, kv_layout=kv_layout, layer=layer))(*pools, *rows, slots)
    expected = append_oracle(*pools, *rows, slots, layer=layer, kv_layout=kv_layout)
    for got, want in zip(out, expected, strict=True):
        assert np.asarray(got).tobytes() == want.tobytes()


def test_loop_of_appends_and_attentions_gives_the_same_bits() -> None:
    """Inside a loop XLA captures the calls as a command buffer; appended pools are updated in place."""
    case = long_case([64, 200], [1, 1], "bfloat16")
    plan = jaxinfer.plan(
        case.layout, num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", variant=case.variant
    )
    slots = case.layout.slots()
    rows = np.random.default_rng(9).normal(size=(2, 2, 128)).astype(jnp.bfloat16)

    def body(q: Any, k: Any, v: Any) -> Any:
        k, v = jaxinfer.append_kv(k, v, rows, q[:, :2], slots)
        return jaxinfer.attention(q, k, v, case.layout, plan, variant=case.variant), k, v

    loop = jax.jit(lambda *a: jax.lax.fori_loop(0, 12, lambda _, c: body(*c), a), donate_argnums=(1, 2))
    step = jax.jit(body)
    unrolled = (jnp.asarray(case.q), jnp.asarray(case.k), jnp.asarray(case.v))
    for _ in range(12):
        unrolled = step(*unrolled)
    looped = loop(jnp.asarray(case.q), jnp.asarray(case.k), jnp.asarray(case.v))
    for a, b in zip(looped, unrolled, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_exported_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    """With an empty kernel cache: all that is needed travels in the program."""
    pytest.importorskip("flatbuffers")
    case = long_case([64, 200], [1, 1], "bfloat16")
    plan = jaxinfer.plan(
        case.layout, num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", variant=case.variant
    )

    def call(q: Any, k: Any, v: Any) -> Any:
        return jaxinfer.attention(q, k, v, case.layout, plan, variant=case.variant).astype(jnp.float32)

    arrays = [np.asarray(x) for x in (case.q, case.k, case.v)]
    checks = [export.DisabledSafetyCheck.custom_call("jaxinfer_attention")]
    exported = export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*arrays)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "arrays.npz", *[a.astype(np.float32) for a in arrays])
    code = (
        "import sys, numpy as np, jax.numpy as jnp, jaxinfer\n"
        "from jax import export\n"
        f"folder = {str(tmp_path)!r}\n"
        "program = export.deserialize(open(folder + '/program', 'rb').read())\n"
        "arrays = [jnp.asarray(a, jnp.bfloat16) for a in np.load(folder + '/arrays.npz').values()]\n"
        "np.save(folder + '/out.npy', np.asarray(program.call(*arrays)))\n"
    )
    run_python(code, JAXINFER_CACHE=str(tmp_path))
    assert np.load(tmp_path / "out.npy").tobytes() == np.asarray(jax.jit(call)(*arrays)).tobytes()
    assert len(list((tmp_path / "kernels").glob("*.cubin"))) >= 1


ALIBI = """
__device__ float logits(float s, const Row& row, const Col& col) const {
  return s + params.strength * params.slopes[row.qo_head] * (col.kv_pos - row.q_pos);
}
__device__ bool mask(const Row& row, const Col& col) const { return col.kv_index % params.keep != 1; }
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rules_of_the_user(dtype: str) -> None:
    case = long_case([300, 40], [3, 1], dtype)
    slopes = np.linspace(0.02, 0.3, 8).astype(np.float32)
    variant = Variant.from_cuda(ALIBI, {"slopes": slopes, "strength": 2.0, "keep": 3}, causal=True)
    o, lse = run(dataclasses.replace(case, variant=variant))
    token = 0
    for r, (q_len, kv_len) in enumerate(((3, 300), (1, 40))):
        k, v = (x.astype(np.float64) for x in request_kv(case, r, kv_len))
        for i in range(q_len):
            distance = np.arange(kv_len) - (kv_len - q_len + i)
            see = (distance <= 0) & (np.arange(kv_len) % 3 != 1)
            for h in range(8):
                s = (
                    case.sm_scale * (k[:, h // 4] @ case.q[token, h].astype(np.float64))
                    + 2.0 * slopes[h] * distance
                )
                w = np.where(see, np.exp(s - s[see].max()), 0.0)
                want = w @ v[:, h // 4] / w.sum()
                error = np.linalg.norm(o[token, h].astype(np.float64) - want)
                assert error < 2 * TOLERANCE[dtype] * np.linalg.norm(want)
                assert abs(lse[token, h] - (s[see].max() + np.log(w.sum()))) < 2e-3
            token += 1


def test_compile_error_of_the_user_reaches_them() -> None:
    case = long_case([30], [1], "bfloat16")
    variant = Variant.from_cuda(
        "__device__ float logits(float s, const Row& row, const Col& col) const {\n return nope;\n}"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)Variant.from_cuda.*from_cuda\(2\).*nope"):
        run(dataclasses.replace(case, variant=variant))


def test_empty_batches() -> None:
    layout = jaxinfer.paged([0, 0, 0], [0, 0, 0], [0, 0], [0, 0], 4, num_tokens=6)
    plan = jaxinfer.plan(layout, num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    pool = jnp.full((2, 4, 2, 64), jnp.nan, jnp.bfloat16)
    state = jaxinfer.attention(
        jnp.full((6, 4, 64), jnp.nan, jnp.bfloat16), pool, pool, layout, plan, return_lse=True
    )
    assert not np.asarray(state.o).astype(np.float32).any() and np.isneginf(np.asarray(state.lse)).all()
