"""300 random calls of the compiled engine against the float64 oracle, within the promised accuracy.

Points share static shapes in groups, so that few programs compile. Exact values: test_regressions*.py; the
reference against the same oracle: test_reference.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close, bounds, expect_accurate, usable
from batches import ENGINE, Stored, Way, attend, every_way, make_plan, random_requests, run, store
from cases import KINDS, Case, make_case
from oracle import attention_oracle
from plan_executor import unpack_plan

import jaxinfer
from jaxinfer import Variant

DTYPES = tuple(bounds())
HEAD_DIMS = ((16, 16), (64, 64), (128, 128), (192, 128), (256, 256), (24, 40), (72, 72), (96, 96), (128, 16))
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64, 65, 100, 127, 128)
TILES = (None, (1,), (16,), (32,), (64,), (128,), (192,), (16, 64), (1, 32), (64, 128), (32, 192))
VARIANTS = (
    Variant(),
    Variant(causal=True),
    Variant(causal=True, window_left=5),
    Variant(causal=True, logits_soft_cap=2.0),
    Variant(window_left=17, window_right=0),
    Variant(window_right=9),
    Variant(causal=True, softmax=False),
    Variant(window_left=0, logits_soft_cap=30.0),
)
NUM_GROUPS, POINTS_PER_GROUP = 60, 5


@dataclass(frozen=True)
class Group:
    """Static facts that the points of a group share."""

    seed: int
    kind: str
    dtype: str
    group_size: int
    num_kv_heads: int
    head_dim: tuple[int, int]
    page_size: int
    kv_layout: str
    num_layers: int | None
    variant: Variant
    custom_mask: bool
    tiles: tuple[int, ...] | None
    schedule: str
    batch_invariant: bool
    num_ctas: int | None

    def __str__(self) -> str:
        tiles = "auto" if self.tiles is None else "+".join(map(str, self.tiles))
        return f"{self.seed}-{self.kind}-{self.dtype}-g{self.group_size}-d{self.head_dim[0]}-t{tiles}"


def make_group(seed: int) -> Group:
    """Every dtype, kind, head_dim pair and group size comes up in turn, the rest at random."""
    rng = np.random.default_rng(seed)
    group_size = GROUP_SIZES[seed % len(GROUP_SIZES)]
    kind = KINDS[seed % len(KINDS)]
    composed = kind.startswith("compose")
    tiles = [t for t in TILES if t is None or tiles_hold(t, group_size)]
    return Group(
        seed=seed,
        kind=kind,
        dtype=DTYPES[(seed // 2) % 3],
        group_size=group_size,
        num_kv_heads=int(rng.integers(1, 4)) if group_size <= 9 else 1,
        head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)] if group_size <= 16 else HEAD_DIMS[seed % 2],
        page_size=int(rng.choice([1, 2, 3, 5, 8, 16, 17])),
        kv_layout=str(rng.choice(["NHD", "HND"])),
        num_layers=int(rng.integers(1, 4)) if rng.random() < 0.3 else None,
        variant=VARIANTS[int(rng.integers(len(VARIANTS)))],
        custom_mask=not composed and rng.random() < 0.3,
        tiles=tiles[int(rng.integers(len(tiles)))],
        schedule=str(rng.choice(["lpt", "runs"])),
        batch_invariant=not composed and rng.random() < 0.3,
        num_ctas=int(rng.choice([1, 3, 7, 64])) if rng.random() < 0.4 else None,
    )


def tiles_hold(tiles: tuple[int, ...], group_size: int) -> bool:
    tokens = [1 if t == 1 else t // group_size for t in tiles]
    return tokens[0] > 0 and all(a < b for a, b in itertools.pairwise(tokens))


GROUPS = [make_group(seed) for seed in range(NUM_GROUPS)]


def call(case: Case, group: Group) -> tuple[Any, Any]:
    """o and lse, None without softmax."""
    layer = None if case.layer is None else jnp.int32(case.layer)
    plan = jaxinfer.plan(
        case.layout,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=jnp.dtype(group.dtype),
        variant=case.variant,
        schedule=group.schedule,
        batch_invariant=group.batch_invariant,
        **usable(group.dtype, tiles=group.tiles, num_ctas=group.num_ctas),
    )
    result = attend(
        *case.args,
        plan,
        case.variant,
        layer,
        sm_scale=case.sm_scale,
        kv_layout=case.kv_layout,
        return_lse=case.variant.softmax,
    )
    return (result.o, result.lse) if case.variant.softmax else (result, None)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_random_calls(group: Group) -> None:
    for point in range(POINTS_PER_GROUP):
        case = make_case(
            np.random.default_rng([group.seed, point]),
            group.kind,
            dtype=group.dtype,
            group_size=group.group_size,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim[0],
            head_dim_vo=group.head_dim[1],
            page_size=group.page_size,
            variant=group.variant,
            custom_mask=group.custom_mask,
            kv_layout=group.kv_layout,
            num_layers=group.num_layers,
            fixed=True,
        )
        o, lse = attention_oracle(*case.args, **case.oracle_kwargs)
        expect_accurate(*call(case, group), o, lse, case.q.dtype)


def test_the_points_cover_what_they_should() -> None:
    def values(name: str) -> set[Any]:
        return {getattr(g, name) for g in GROUPS}

    assert NUM_GROUPS * POINTS_PER_GROUP == 300
    assert values("group_size") == set(GROUP_SIZES)
    assert values("kind") == set(KINDS)
    assert values("dtype") == set(DTYPES)
    assert values("head_dim") == set(HEAD_DIMS)
    assert values("schedule") == {"lpt", "runs"}
    assert values("kv_layout") == {"NHD", "HND"}
    assert values("batch_invariant") == values("custom_mask") == {False, True}
    assert len(values("tiles")) >= 9
    assert len(values("variant")) == len(VARIANTS)


# ---- long rows: cut, and merged from partial results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ENGINE, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "runs"},
        {"batch_invariant": True},
        {"batch_invariant": True, "split_tokens": 16},
        {"tiles": (16, 64), "num_ctas": (64, 7)},
        {"tiles": (1,), "num_ctas": 200},
    ],
    ids=str,
)
def test_long_rows(way: Way, dtype: str, options: dict[str, Any]) -> None:
    stored, variant = long_batch(way, dtype), Variant(causal=True)
    options = usable(dtype, **options)
    plan = make_plan(way, stored, variant, **options)
    assert unpack_plan(plan).num_merge > 0, "no token is merged from parts"
    state = run(way, stored, variant=variant, **options)
    o, lse = attention_oracle(stored.q, stored.k, stored.v, stored.layout, variant, kv_layout=way.kv_layout)
    expect_accurate(state.o, state.lse, o, lse, jnp.dtype(dtype))


def long_batch(way: Way, dtype: str) -> Stored:
    requests = random_requests([1, 1, 21, 2, 0], [1500, 2900, 700, 33, 40], 4, 2, 32)
    return store(way, *requests, page_size=16, num_tokens=28, dtype=jnp.dtype(dtype))


# ---- hugely negative or positive logits are exact softmax: no finite stand-in for -inf


def offset_error(way: Way, offset: float, **options: Any) -> None:
    """Logits x + offset, x in multiples of 1 / 64, are exact in float32."""
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, 700) / 64
    q = np.zeros((1, 1, 16), np.float32)
    q[..., :2] = 1.0
    k = np.zeros((700, 1, 16), np.float32)
    k[:, 0, 0], k[:, 0, 1] = x, offset
    v = rng.standard_normal((700, 1, 16)).astype(np.float32)
    state = run(way, store(way, [q], [k], [v], page_size=16), sm_scale=1.0, **options)
    w = np.exp(x)
    o = (w / w.sum()) @ v[:, 0].astype(np.float64)
    lse = np.array([[offset + math.log(w.sum())]])
    expect_accurate(state.o, state.lse, o[None, None], lse, np.float32)


@every_way
@pytest.mark.parametrize("offset", [-(2.0**15), 2.0**15])
def test_a_common_offset_of_the_logits_changes_nothing(way: Way, offset: float) -> None:
    offset_error(way, offset, num_ctas=1)


@pytest.mark.parametrize("offset", [-(2.0**15), 2.0**15])
def test_a_common_offset_changes_nothing_where_a_row_is_cut(offset: float) -> None:
    offset_error(ENGINE[0], offset)


@every_way
@pytest.mark.parametrize("logit", [-3e38, -1e30, 1e30, 3e38])
def test_equal_logits_of_any_size_give_the_mean(way: Way, logit: float) -> None:
    q = np.zeros((2, 1, 16), np.float32)
    q[..., 0] = 1.0
    k = np.zeros((4, 1, 16), np.float32)
    k[..., 0] = logit
    v = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((1, 1, 16), np.float32)
    state = run(way, store(way, [q], [k], [v]), sm_scale=1.0, variant=Variant(causal=True))
    assert_close(state.o[:, 0, 0], [1.0, 1.5], rtol=1e-6)
    assert_close(state.lse[:, 0], np.float32(logit), rtol=1e-6)


def test_the_layer_axis_reads_one_layer_only() -> None:
    """Other layers are poison; the layer is an operand of one program."""
    group = dataclasses.replace(GROUPS[0], kind="paged", num_layers=3, tiles=None)
    layers = set()
    for seed in range(6):
        case = make_case(
            np.random.default_rng(seed),
            "paged",
            group_size=3,
            num_kv_heads=2,
            page_size=4,
            variant=group.variant,
            custom_mask=False,
            num_layers=3,
            kv_layout="NHD",
            fixed=True,
        )
        layers.add(case.layer)
        o, lse = attention_oracle(*case.args, **case.oracle_kwargs)
        expect_accurate(*call(case, dataclasses.replace(group, dtype="float32")), o, lse, np.float32)
    assert len(layers) > 1
