"""`plan`: one step's lengths to a packed integer array that says which CTA does which piece of the work.

Arguments and static facts live here; capacities and the scheduling itself in csrc/plan/. A plan holds no page
ids and no heads: one plan serves every layer of a step that clips alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from . import _native, _pytree
from ._args import one_of, positive, static_int
from ._heads import check_head_dim, check_heads
from .jit import render, select
from .jit.spec import ELEMENT_SIZE
from .layout import BlockSparse
from .variant import Variant

#: Query rows that a tile can have. 1 holds one token; 192 is three consumer warpgroups, `wgmma` only.
TILES = (1, 16, 32, 64, 128, 192)
SCHEDULES = ("lpt", "runs")
#: KV tokens between the cuts of a tile with `batch_invariant`, per tile of the row.
SPLIT_TOKENS = 512
#: CTAs of a class on the CPU, whatever the number of threads, so that bits do not depend on the machine.
CPU_CTAS = 32
MAX_CTAS = 65535


@dataclasses.dataclass(frozen=True)
class TileClass:
    """Static facts of one tile class, one kernel launch.

    Attributes:
      tile: query rows of a tile.
      packed: rows are tokens x group_size heads of one KV head; False: rows are tokens of one query head.
      num_queues: queues of items; workers are queues x heads.
      num_ctas: CTAs of the launch.
      item_capacity: most items of the class.
    """

    tile: int
    packed: bool
    num_queues: int
    num_ctas: int
    item_capacity: int


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """Static facts of a plan: what was known when it was made and what a compiled program relies on.

    Those of the layout and of the variant are named as there; capacities are what the planner counts.
    """

    num_tokens: int
    num_rows: int
    num_layouts: int
    kv_capacity: int
    page_size: int
    contiguous: bool
    has_block_pos: bool
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: str
    classes: tuple[TileClass, ...]
    merge_capacity: int  # tokens that may have partial states to merge
    slot_capacity: int  # partial states of one token, all its heads
    num_words: int  # of the array
    causal: bool
    window_left: int | None
    window_right: int | None
    softmax: bool
    schedule: str
    side_by_side: bool  # the kernels of two classes run at the same time
    batch_invariant: bool
    split_tokens: int  # KV tokens between cuts; read with batch_invariant only

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned step: an operand of the compiled step, and its static facts."""

    data: Any  # int32 [spec.num_words]; numpy as `plan` makes it, traced inside jit
    spec: PlanSpec


def _saved_spec(name: str, spec: dict[str, Any]) -> PlanSpec:
    return PlanSpec(**{**spec, "classes": tuple(TileClass(**c) for c in spec["classes"])})


_pytree.register(
    Plan, data_fields=("data",), meta_fields=("spec",), encode=dataclasses.asdict, decode=_saved_spec
)


def plan(
    layout: BlockSparse,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    dtype: DTypeLike | None = None,
    variant: Variant | None = None,
    num_pages: int | None = None,
    tiles: Sequence[int] | None = None,
    num_ctas: int | Sequence[int] | None = None,
    schedule: str = "runs",
    split_tokens: int | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """Plans one step on the host: balanced work items and the list of partial results to merge.

    Algorithm 1 of FlashInfer (arXiv 2501.01005, section 3.3.1), with every cut fitted to what the queue still
    has to take instead of one chunk size. Once per step for all layers; the result is an operand of the
    jitted step, and everything static about it follows from the layout's capacities, never from its lengths.

    Args:
      layout: on the host (numpy).
      num_qo_heads, num_kv_heads: local heads (those of one shard); group size 1 to 128.
      head_dim: int or (head_dim_qk, head_dim_vo), multiples of 8 from 16 to 256.
      dtype: of q, K and V; None: bfloat16 on a GPU backend, float32 on CPU.
      variant: what the KV ranges are clipped with (causal, windows); None: `Variant()`.
      num_pages: pages of the pool (contiguous: KV tokens); given, page ids in the used range are checked.
      tiles: query rows of the one or two tile classes, ascending, from {1, 16, 32, 64, 128, 192}; None:
        chosen from the capacities, heads, dtype, head_dim, variant and the GPU. On GPUs 192 is for Hopper alone.
      num_ctas: CTAs per class, an int for all or one each; None: 32 on CPU; on a GPU twice the multiprocessors,
        once for tiles of two or three of Hopper's warpgroups.
      schedule: "runs" (classes limited by reading K and V get contiguous equal runs per queue; on an H200 level with
        the other on equal lengths and up to 6% faster on others) or "lpt" (longest tiles first, to the least
        loaded queue). Classes limited by arithmetic are scheduled the second way.
      split_tokens: with batch_invariant, KV tokens between cuts (a multiple of 16); None: 512.
      batch_invariant: cut a row where its own lengths say, so that its bits do not depend on the rest of the
        batch.

    Returns:
      Plan with `data` a numpy array. Equal lengths, starts and positions give equal bytes.

    Raises:
      TypeError: the layout is traced or on a device, or an argument is something of another kind.
      ValueError: an option is wrong, or a value of the layout is outside its arrays, capacities or pool.
      NotImplementedError: head_dim, group size, dtype, or a mask or batch_invariant with a composed layout.
    """
    variant = Variant() if variant is None else variant
    if not isinstance(layout, BlockSparse):
        raise TypeError(f"layout must be a jaxinfer.BlockSparse, got {type(layout).__name__}")
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be a jaxinfer.Variant, got {type(variant).__name__}")
    arrays = host_arrays(layout)
    dtype_key: Any = dtype  # hashable: a name, a scalar type or a numpy dtype
    facts = (
        layout.num_tokens,
        layout.num_rows,
        layout.num_layouts,
        layout.kv_capacity,
        layout.page_size,
        layout.contiguous,
        layout.block_pos is not None,
        num_qo_heads,
        num_kv_heads,
        _as_key(head_dim),
        dtype_key,
        variant.causal,
        variant.window_left,
        variant.window_right,
        variant.softmax,
        variant.mask_bits is not None,
        variant.functor is not None,
        bool(render.changes_inputs(None if variant.functor is None else variant.functor.source)),
        _as_key(tiles),
        _as_key(num_ctas),
        schedule,
        split_tokens,
        batch_invariant,
    )
    make: Callable[..., tuple[PlanSpec, Any]] = _static_plan
    try:
        hash(facts)
    except TypeError:  # a list, a jax.Array: nothing to look up, and the checks say which argument it is
        make = _static_plan.__wrapped__
    spec, planner = make(*facts)
    if num_pages is not None:
        num_pages = static_int("num_pages", num_pages)
    data = np.empty(spec.num_words, np.int32)
    planner(*arrays, num_pages=num_pages, out=data)
    return Plan(data, spec)


def host_arrays(layout: BlockSparse) -> list[Any]:
    """The layout's arrays in the planner's order, int32 and contiguous."""
    arrays: list[Any] = []
    for name in ("q_start", "q_len", "kv_start", "kv_indices", "kv_len", "kv_offset", "q_pos", "block_pos"):
        array = getattr(layout, name)
        if isinstance(array, np.ndarray):
            if array.dtype != np.int32 or array.ndim != 1:
                raise TypeError(
                    f"layout.{name} must be int32 of rank 1, got {array.dtype} of shape {array.shape}"
                )
            arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        elif array is None and name == "block_pos":
            arrays.append(None)
        else:
            raise TypeError(
                f"layout.{name} must be a numpy array, got {type(array).__name__}: plan runs on the host. "
                "Build the layout from numpy arrays, plan on the host, and pass layout and plan into the "
                "jitted step as operands."
            )
    return arrays


def _as_key(value: Any) -> Any:
    """Lists as tuples, so that they can be looked up."""
    is_list = isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return tuple(value) if is_list else value


@lru_cache(maxsize=1024, typed=True)  # 4.0 is no number of heads, though it equals 4
def _static_plan(
    num_tokens: int,
    num_rows: int,
    num_layouts: int,
    kv_capacity: int,
    page_size: int,
    contiguous: bool,
    has_block_pos: bool,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    dtype: Hashable,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    softmax: bool,
    masked: bool,
    has_functor: bool,
    changes_inputs: bool,
    tiles: tuple[int, ...] | None,
    num_ctas: int | tuple[int, ...] | None,
    schedule: str,
    split_tokens: int | None,
    batch_invariant: bool,
) -> tuple[PlanSpec, Any]:
    """What does not depend on lengths: a plan's spec and the planner that makes its array."""
    group_size = check_heads(num_qo_heads, num_kv_heads)
    head_dim_qk, head_dim_vo = check_head_dim(head_dim)
    on_gpu = jax.default_backend() in ("gpu", "cuda")
    dtype_name = _check_dtype(dtype, on_gpu)
    split_tokens = _check_cuts(schedule, split_tokens, batch_invariant)
    if num_layouts > 1 and batch_invariant:
        raise NotImplementedError(
            "batch_invariant=True with a composed layout; supported: layouts of one level"
        )
    if num_layouts > 1 and masked:
        raise NotImplementedError("a custom mask with a composed layout; supported: layouts of one level")
    plain = softmax and not masked and not has_functor
    warpgroups = on_gpu and dtype_name != "float32" and not changes_inputs and _has_warpgroups()
    if tiles is None:
        tiles = choose_tiles(
            None if batch_invariant else (num_tokens, num_rows, num_layouts),
            group_size,
            dtype_name,
            head_dim_qk,
            head_dim_vo,
            on_gpu,
            warpgroups,
            # Measured for these alone; and a request's tiles may not depend on the rows of others.
            wide_tiles=warpgroups
            and contiguous
            and plain
            and not batch_invariant
            and _fills_wide_tiles(num_tokens * num_qo_heads, group_size),
        )
    tiles = _check_tiles(tiles, group_size)
    ctas = _check_num_ctas(num_ctas, tiles, on_gpu, warpgroups)
    classes = [
        (tile, True, _native.choose_num_queues(n, num_kv_heads), n)
        for tile, n in zip(tiles, ctas, strict=True)
    ]
    given = PlanSpec(  # all but what the planner counts
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_layouts=num_layouts,
        kv_capacity=kv_capacity,
        page_size=page_size,
        contiguous=contiguous,
        has_block_pos=has_block_pos,
        num_qo_heads=int(num_qo_heads),
        num_kv_heads=int(num_kv_heads),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype=dtype_name,
        classes=tuple(TileClass(*c, 0) for c in classes),
        merge_capacity=0,
        slot_capacity=0,
        num_words=0,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softmax=softmax,
        schedule=schedule,
        side_by_side=len(tiles) > 1 and on_gpu and _side_by_side(),
        batch_invariant=bool(batch_invariant),
        split_tokens=split_tokens,
    )
    planner = planner_of(given)
    spec = dataclasses.replace(
        given,
        classes=tuple(TileClass(*c, items) for c, items in zip(classes, planner.item_capacity, strict=True)),
        merge_capacity=planner.merge_capacity,
        slot_capacity=planner.slot_capacity,
        num_words=planner.num_words,
    )
    return spec, planner


def planner_of(spec: PlanSpec) -> _native.Planner:
    """The compiled planner for the static facts of a plan; capacities are what it counts, not what it is told."""
    return _native.Planner(
        classes=[(c.tile, c.packed, c.num_queues, c.num_ctas) for c in spec.classes],
        num_tokens=spec.num_tokens,
        num_rows=spec.num_rows,
        num_layouts=spec.num_layouts,
        kv_capacity=spec.kv_capacity,
        page_size=spec.page_size,
        contiguous=spec.contiguous,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        element_size=ELEMENT_SIZE[spec.dtype],
        causal=spec.causal,
        window_left=spec.window_left,
        window_right=spec.window_right,
        runs=spec.schedule == "runs",
        side_by_side=spec.side_by_side,
        batch_invariant=spec.batch_invariant,
        split_tokens=spec.split_tokens,
    )


def choose_tiles(
    capacity: tuple[int, int, int] | None,
    group_size: int,
    dtype: str,
    head_dim_qk: int,
    head_dim_vo: int,
    on_gpu: bool,
    warpgroups: bool = False,
    wide_tiles: bool = False,
) -> tuple[int, ...]:
    """Tiles from what is static: a small class for single tokens, a large one where a row can have more.

    Args:
      capacity: (num_tokens, num_rows, num_layouts); None leaves it out, as batch_invariant must: the rest is
        the model's.
      group_size, dtype, head_dim_qk, head_dim_vo: of the model.
      on_gpu: float32 has CUDA-core kernels only there, which means tile 1.
      warpgroups: large tiles run on Hopper's warpgroup instructions.
      wide_tiles: three of them pay for up to 96 columns, too.
    """
    if on_gpu and dtype == "float32":
        return (1,)
    small = next(t for t in (16, 32, 64, 128) if t >= group_size)
    widest = max(head_dim_qk, head_dim_vo)
    # A tile keeps its output in registers: of three warpgroups 64 columns fit, and 96 where nothing else needs
    # registers, of two 256; of the portable kernel's 128 rows 128 columns.
    large = max(small, 64 if widest > 128 else 128)
    if warpgroups:
        large = 192 if widest <= (96 if wide_tiles else 64) else 128
    if capacity is not None:
        num_tokens, num_rows, num_layouts = capacity
        # The most tokens of a row: what is left when every other row has one; all, where rows share tokens (a
        # common prefix is read once for all tokens that fit one tile).
        most = num_tokens if num_layouts > 1 else num_tokens - num_rows + 1
        if most <= 1:
            return (small,)
        large = next((t for t in (16, 32, 64) if t // group_size >= most and t >= small), large)
        if num_rows <= 1:
            return (large,)
    return (small,) if large // group_size <= small // group_size else (small, large)


def _check_dtype(dtype: Any, on_gpu: bool) -> str:
    if dtype is None:
        return "bfloat16" if on_gpu else "float32"
    try:
        name = str(np.dtype(dtype).name)
    except (TypeError, ValueError):
        raise ValueError(f"dtype must be one of {', '.join(ELEMENT_SIZE)}, got {dtype!r}") from None
    if name not in ELEMENT_SIZE:
        raise NotImplementedError(f"dtype {name}; supported: {', '.join(ELEMENT_SIZE)}")
    return name


def _check_cuts(schedule: str, split_tokens: int | None, batch_invariant: bool) -> int:
    """split_tokens, or its default."""
    if not isinstance(batch_invariant, (bool, np.bool_)):
        raise TypeError(f"batch_invariant must be a bool, got {batch_invariant!r}")
    one_of("schedule", schedule, SCHEDULES)
    if split_tokens is None:
        return SPLIT_TOKENS
    if positive("split_tokens", split_tokens) % 16 != 0:
        raise ValueError(f"split_tokens must be a multiple of 16, got {split_tokens}")
    if not batch_invariant:
        raise ValueError(f"split_tokens {split_tokens} cuts rows with batch_invariant=True only")
    return int(split_tokens)


def _check_tiles(tiles: Any, group_size: int) -> tuple[int, ...]:
    if not isinstance(tiles, tuple) or not 1 <= len(tiles) <= 2:
        raise ValueError(f"tiles must be one or two of {TILES}, ascending, got {tiles!r}")
    for tile in tiles:
        if isinstance(tile, bool) or not isinstance(tile, (int, np.integer)) or tile not in TILES:
            raise ValueError(f"tiles must be one or two of {TILES}, ascending, got {tiles!r}")
        if 1 < tile < group_size:
            raise ValueError(f"tiles: a tile of {tile} rows is smaller than the group size {group_size}")
    tokens = [_tokens_per_tile(tile, group_size) for tile in tiles]
    if len(tiles) == 2 and tokens[0] >= tokens[1]:
        raise ValueError(
            f"tiles {tiles} must hold an ascending number of tokens, got {tokens} (group size {group_size})"
        )
    return tuple(int(tile) for tile in tiles)


def _has_warpgroups() -> bool:
    """Whether large tiles run on Hopper's warpgroup instructions where nobody asks for a kernel."""
    return str(jax.devices()[0].compute_capability) == "9.0"


def _fills_wide_tiles(num_rows: int, group_size: int) -> bool:
    """Whether `num_rows` rows of Q are work for tiles of three warpgroups with 65 to 96 columns.

    These read K and V a third less often, and hide each other's softmax better; but there are fewer of them to deal
    out, and more of a request's last one is empty: a single head's covers 192 tokens. H200, bf16, contiguous, causal,
    32/8 heads of 96, TFLOP/s with tile 128 -> 192 in one run: 4 x 4096 500 -> 563, 16 x 1024 377 -> 388. With 128
    columns, whose tile of two warpgroups leaves out what a first block does not see: 4 x 4096 628 -> 597, 1 x 16384
    681 -> 660, not causal 692 -> 667, 8 x 1024 485 -> 445, 16 x 512 of 8192 655 -> 604. Few rows, single heads and
    pages gain nothing or lose at 128 columns (before that: 1 x 512 -12%, 32/32 heads -6%, pages of 16 rows -2%); at
    96 they were not measured.
    """
    return 2 <= group_size <= 96 and num_rows >= 8 * 192 * int(jax.devices()[0].core_count)


def _side_by_side() -> bool:
    """Whether the kernels of two classes run at the same time."""
    major, _, _ = str(jax.devices()[0].compute_capability).partition(".")
    return _native.can_start_early(int(major))


def _check_num_ctas(num_ctas: Any, tiles: tuple[int, ...], on_gpu: bool, warpgroups: bool) -> tuple[int, ...]:
    if num_ctas is None:
        if not on_gpu:
            return (CPU_CTAS,) * len(tiles)
        # A CTA of several warpgroups fills a multiprocessor; the other kernels leave room for two.
        multiprocessors = int(jax.devices()[0].core_count)
        alone = select.WGMMA_TILES if warpgroups else ()
        return tuple(multiprocessors * (1 if tile in alone else 2) for tile in tiles)
    counts = num_ctas if isinstance(num_ctas, tuple) else (num_ctas,) * len(tiles)
    if len(counts) != len(tiles):
        raise ValueError(f"num_ctas must be an int or one per tile class ({len(tiles)}), got {num_ctas!r}")
    counts = tuple(positive("num_ctas", n) for n in counts)
    if max(counts) > MAX_CTAS:
        raise ValueError(f"num_ctas must be in [1, {MAX_CTAS}], got {num_ctas!r}")
    return counts


def _tokens_per_tile(tile: int, group_size: int) -> int:
    return 1 if tile == 1 else tile // group_size
