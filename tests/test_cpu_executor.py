"""The CPU executor through the public operator: every dtype, head dim, group size, tile, page size, storage
against the float64 oracle, every instruction set and thread count, and bits that must not change.

Inputs come from cases.py (poisoned), expected values from oracle.py or by hand.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backend import bounds, cpu_only, expect_accurate
from batches import attend, same_bits
from cases import KINDS, Case, make_case
from oracle import append_oracle, attention_oracle

import jaxinfer
from jaxinfer import Variant, _native

pytestmark = cpu_only("its executor")

DTYPES = tuple(bounds())
RULES = (
    Variant(causal=True),
    Variant(causal=True, window_left=5, logits_soft_cap=2.0),
    Variant(window_left=3, window_right=2**31 - 1),
    Variant(softmax=False, window_right=4),
)


def run(case: Case, **plan_options: Any) -> tuple[Any, Any]:
    """o and lse (None without softmax) of the engine, as numpy."""
    the_plan = jaxinfer.plan(
        case.layout,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.q.dtype,
        variant=case.variant,
        **plan_options,
    )
    layer = None if case.layer is None else jnp.int32(case.layer)
    out = attend(
        *case.args,
        the_plan,
        case.variant,
        layer,
        sm_scale=case.sm_scale,
        kv_layout=case.kv_layout,
        return_lse=case.variant.softmax,
    )
    return (np.asarray(out.o), np.asarray(out.lse)) if case.variant.softmax else (np.asarray(out), None)


def check(case: Case, o: Any, lse: Any) -> None:
    """Judges a result by the oracle."""
    expect_accurate(o, lse, *attention_oracle(*case.args, **case.oracle_kwargs), case.q.dtype)


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_head_dims(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    dtype = DTYPES[head_dim // 8 % 3]
    other = int(rng.integers(2, 33)) * 8 if head_dim % 3 == 0 else head_dim
    case = make_case(
        rng,
        "paged",
        dtype=dtype,
        head_dim=head_dim,
        head_dim_vo=other,
        group_size=1 + head_dim // 8 % 5,
        num_kv_heads=2,
        page_size=5,
        max_kv_len=150,
        variant=RULES[head_dim // 8 % len(RULES)],
    )
    check(case, *run(case))


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33, 64, 128])
def test_group_sizes_in_every_tile(group_size: int) -> None:
    rng = np.random.default_rng(group_size)
    case = make_case(
        rng,
        "paged",
        dtype=DTYPES[group_size % 3],
        group_size=group_size,
        num_kv_heads=2 if group_size < 16 else 1,
        head_dim=24,
        page_size=3,
        max_kv_len=130,
        variant=RULES[group_size % 3],
        fixed=True,
    )
    for tile in (1, 16, 32, 64, 128, 192):
        if tile == 1 or tile >= group_size:
            check(case, *run(case, tiles=(tile,)))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 64, 256])
def test_page_sizes_and_cuts(page_size: int) -> None:
    """Rows cut into many items, so that partial states are merged."""
    rng = np.random.default_rng(page_size)
    for dtype in DTYPES:
        case = make_case(
            rng,
            "paged",
            dtype=dtype,
            group_size=3,
            num_kv_heads=3,
            head_dim=64,
            page_size=page_size,
            max_kv_len=400,
            variant=RULES[page_size % len(RULES)],
        )
        check(case, *run(case))
        check(case, *run(case, batch_invariant=True, split_tokens=16))


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str) -> None:
    """Every constructor, both page layouts, pools with and without layers, bad page ids, custom masks."""
    rng = np.random.default_rng(KINDS.index(kind))
    for i in range(12):
        case = make_case(
            rng,
            kind,
            dtype=DTYPES[i % 3],
            group_size=3,
            num_kv_heads=2,
            head_dim=32,
            head_dim_vo=16,
            page_size=4,
            variant=RULES[i // 3],
            custom_mask=i % 2 == 0,
            bad_ids=i % 4 == 0,
            kv_layout=("NHD", "HND")[i % 2],
            num_layers=3 if i % 3 == 0 else None,
            fixed=True,
        )
        check(case, *run(case))


def pooled(rng: np.random.Generator, q_len: list[int], kv_len: list[int], **options: Any) -> Case:
    """Full control of lengths: a paged fp32 case of random numbers (page_size 16, 9 and 3 heads of 64)."""
    page_size, dim = options.get("page_size", 16), options.get("head_dim", 64)
    blocks = [-(-n // page_size) for n in kv_len]
    table = rng.permutation(sum(blocks) + 1)[: sum(blocks)].astype(np.int32)
    layout = jaxinfer.paged(
        np.cumsum([0, *q_len]).astype(np.int32),
        np.cumsum([0, *blocks]).astype(np.int32),
        table,
        np.array(kv_len, np.int32),
        page_size,
    )
    num_qo_heads, num_kv_heads = options.get("heads", (9, 3))
    shape = (sum(blocks) + 1, page_size, num_kv_heads, dim)
    dtype = jnp.dtype(options.get("dtype", "float32"))
    return Case(
        kind="paged",
        q=rng.normal(size=(sum(q_len), num_qo_heads, dim)).astype(dtype),
        k=rng.normal(size=shape).astype(dtype),
        v=rng.normal(size=shape).astype(dtype),
        layout=layout,
        variant=options.get("variant", Variant(causal=True)),
        sm_scale=0.125,
        layer=None,
        kv_layout="NHD",
        num_pages=shape[0],
    )


def slot(case: Case, row: int, j: int) -> tuple[int, int]:
    """Page and offset of KV token j of a row."""
    block = int(case.layout.kv_start[row]) + j // case.layout.page_size
    return int(case.layout.kv_indices[block]), j % case.layout.page_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 77.0])
def test_masked_slots_change_no_bit(dtype: str, poison: float) -> None:
    """K and V that a token may not see, while its tile-mates may: not even 0 * NaN comes through."""
    rng = np.random.default_rng(3)
    case = pooled(rng, [40, 1], [100, 70], dtype=dtype)
    o, lse = run(case)
    for last in (99, 83):  # seen by the last token only, by the last seventeen
        page, offset = slot(case, 0, last)
        case.k[page, offset] = case.v[page, offset] = poison
        changed_o, changed_lse = run(case)
        blind = np.r_[0 : last - 60, 40]
        assert same_bits(o[blind], changed_o[blind])
        assert same_bits(lse[blind], changed_lse[blind])
        if not np.isfinite(poison):
            assert not np.isfinite(changed_o[39]).any()


def test_columns_masked_for_all_change_no_bit() -> None:
    rng = np.random.default_rng(4)
    case = pooled(rng, [3, 1], [90, 70])
    masks = [rng.random((3, 90)) < 0.7, rng.random((1, 70)) < 0.7]
    masks[0][:, 20:30] = False
    bits, indptr = jaxinfer.pack_masks(masks, case.layout)
    case = dataclasses.replace(case, variant=Variant(causal=True, mask_bits=bits, mask_indptr=indptr))
    before = run(case)
    check(case, *before)
    for j in range(20, 30):
        case.k[slot(case, 0, j)] = case.v[slot(case, 0, j)] = np.nan
    assert all(same_bits(a, b) for a, b in zip(before, run(case), strict=True))


@pytest.mark.parametrize("kv_len", [1, 1000, 65536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_are_exact(kv_len: int, dtype: str) -> None:
    """Equal weights and v = 1 give exactly 1; v = +1, -1, ... over an even length gives exactly 0."""
    rng = np.random.default_rng(0)
    case = pooled(rng, [1], [kv_len], dtype=dtype, heads=(2, 1), head_dim=16)
    case.q[...] = 0
    case.v[...] = 1
    o, lse = run(case)
    assert (o == 1).all()
    np.testing.assert_allclose(lse, np.log(kv_len), rtol=1e-6)
    if kv_len % 2 == 0:
        case.v[:, 1::2] = -1
        assert (run(case)[0] == 0).all()


@pytest.mark.parametrize(("most", "top"), [(-150.0, 150.0), (-150.0, -149.0), (149.0, 150.0)])
def test_huge_logits_are_still_softmax(most: float, top: float) -> None:
    """Two keys stand out of logits near +-3e4, so far that the others weigh nothing."""
    case = pooled(np.random.default_rng(0), [1], [80], heads=(1, 1), head_dim=16, variant=Variant())
    case.q[...] = 100.0
    case.k[...] = most
    first, second = slot(case, 0, 7), slot(case, 0, 70)
    case.k[first] = case.k[second] = top
    o, lse = run(case)
    np.testing.assert_allclose(o[0, 0], (case.v[first] + case.v[second])[0] / 2, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], 16 * 100.0 * top * case.sm_scale + np.log(2), rtol=1e-6)


def test_windows_near_the_largest_integer_are_no_windows() -> None:
    rng = np.random.default_rng(5)
    case = pooled(rng, [20], [150])
    plain = run(case)
    wide = Variant(causal=True, window_left=2**31 - 1, window_right=2**31 - 1)
    unlimited = run(dataclasses.replace(case, variant=wide))
    assert all(same_bits(a, b) for a, b in zip(plain, unlimited, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_tile_mates(dtype: str) -> None:
    """batch_invariant plans: the last tokens of a prefill, alone or in tiles beside another request."""
    rng = np.random.default_rng(6)
    case = pooled(rng, [70, 5], [200, 333], dtype=dtype)
    whole = run(case, batch_invariant=True)
    for q_len in (1, 2, 7):
        table = np.asarray(case.layout.kv_indices)[:13]
        alone = jaxinfer.paged(
            np.array([0, q_len], np.int32), np.array([0, 13], np.int32), table, np.array([200], np.int32), 16
        )
        part = dataclasses.replace(case, layout=alone, q=case.q[70 - q_len : 70])
        small = run(part, batch_invariant=True, tiles=(16,))
        assert all(same_bits(a[70 - q_len : 70], b) for a, b in zip(whole, small, strict=True))


def test_append_of_many_tokens() -> None:
    """Large enough to be dealt to threads; slots and layers out of range write nothing."""
    rng = np.random.default_rng(7)
    for kv_layout in ("NHD", "HND"):
        shape = (2, 120, 16, 3, 64) if kv_layout == "NHD" else (2, 120, 3, 16, 64)
        k_pages, v_pages = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
        k, v = (rng.normal(size=(1500, 3, 64)).astype(np.float32) for _ in range(2))
        slots = rng.permutation(120 * 16)[:1500].astype(np.int32)
        slots[::50] = rng.choice([-1, 120 * 16, 2**31 - 1, -(2**31)], 30)
        for layer in (1, 2, -1):
            got = jaxinfer.append_kv(
                *map(jnp.asarray, (k_pages, v_pages, k, v, slots)),
                layer=jnp.int32(layer),
                kv_layout=kv_layout,
            )
            want = append_oracle(k_pages, v_pages, k, v, slots, layer, kv_layout)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def battery() -> list[Case]:
    """Cases that together take every path of the inner code; some are large enough to be dealt to threads."""
    cases = []
    for i, dtype in enumerate(DTYPES):
        rng = np.random.default_rng(100 + i)
        cases.append(pooled(rng, [1, 1, 1, 1], [700, 64, 1, 300], dtype=dtype))
        cases.append(pooled(rng, [130, 3], [200, 90], dtype=dtype, heads=(8, 2), head_dim=72))
        cases.append(pooled(rng, [6, 1], [90, 700], dtype=dtype, heads=(8, 8), head_dim=128))
        for rules in RULES:
            cases.append(
                make_case(rng, dtype=dtype, group_size=5, variant=rules, head_dim=40, max_kv_len=140)
            )
    return cases


def battery_elsewhere(path: Path, *, isa: str | None = None, one_cpu: bool = False) -> list[tuple[Any, Any]]:
    """The battery's results in another process."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    )
    if isa is not None:
        environment["JAXINFER_CPU_ISA"] = isa
    affinity = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" if one_cpu else ""
    program = f"{affinity}import test_cpu_executor as t; t.save_battery({str(path)!r}, {isa!r})"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    with np.load(path) as saved:
        return [(saved[f"o{i}"].view(case.q.dtype), saved.get(f"lse{i}")) for i, case in enumerate(battery())]


def save_battery(path: str, isa: str | None) -> None:
    """Runs in the other process."""
    assert isa is None or _native.cpu_isa() == isa
    arrays = {}
    for i, case in enumerate(battery()):
        o, lse = run(case)
        arrays[f"o{i}"] = o.view(np.uint8)
        if lse is not None:
            arrays[f"lse{i}"] = lse
    np.savez(path, **arrays)


def lesser_instruction_sets() -> list[str]:
    names = ["scalar", "avx2", "avx512"]
    return names[: names.index(_native.cpu_isa())]


@pytest.mark.parametrize("isa", lesser_instruction_sets())
def test_lesser_instruction_sets(isa: str, tmp_path: Path) -> None:
    for case, (o, lse) in zip(battery(), battery_elsewhere(tmp_path / "out.npz", isa=isa), strict=True):
        check(case, o, lse)


def test_bits_do_not_depend_on_threads(tmp_path: Path) -> None:
    """One processor gives one thread, and other groups of heads that run together."""
    elsewhere = battery_elsewhere(tmp_path / "out.npz", one_cpu=True)
    for case, (o, lse) in zip(battery(), elsewhere, strict=True):
        here_o, here_lse = run(case)
        check(case, here_o, here_lse)
        assert same_bits(o, here_o)
        assert (lse is None) == (here_lse is None)
        assert lse is None or same_bits(lse, here_lse)
