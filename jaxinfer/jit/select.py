"""Which kernels a GPU call needs: from the static facts of the call to specs, in the order that handlers expect.

Choices that depend on the architecture are not made here: a program may be lowered on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from .render import holes, render
from .spec import RULES, FunctorSource, KernelSpec, join, padded_head_dim

_MMA_TILES = (16, 32, 64, 128)
_SINGLE_WARPGROUP_TILE = 64
#: Tiles of the warpgroup kernel whose CTAs fill a multiprocessor. It has tile 64 too, for pages at one width
#: (render.template), which only implementation=None chooses.
WGMMA_TILES = (128, 192)


def attention_kernels(
    *,
    dtype: str,
    head_dim_qk: int,
    head_dim_vo: int,
    classes: Sequence[tuple[int, bool]],
    merges: bool,
    contiguous: bool,
    page_size: int,
    rules: int,
    functor: FunctorSource | None,
    implementation: str | None,
) -> str:
    """The `kernels` attribute of an attention call: one spec per tile class, then the merge's if the plan can merge.

    Args:
      dtype: of q, K and V.
      head_dim_qk, head_dim_vo: true ones.
      classes: (tile, packed) of every tile class.
      merges: whether the plan has room for partial states.
      contiguous: K and V are not paged.
      page_size: of the pages; 1 when contiguous.
      rules: OR of the bits of RULES.
      functor: the user's rules.
      implementation: None, "mma" (the portable tensor-core kernel) or "wgmma".

    Raises:
      ValueError: the plan's tiles do not fit the dtype or the implementation; names both.
      NotImplementedError: no kernel is wide enough.
    """
    dims = {"head_dim_qk": padded_head_dim(head_dim_qk), "head_dim_vo": padded_head_dim(head_dim_vo)}
    specs = []
    for tile, packed in classes:
        kernel = _kernel(dtype, tile, implementation)
        spec = KernelSpec(
            kernel=kernel,
            dtype=dtype,
            tile=tile,
            packed=packed,
            contiguous=contiguous,
            page_box=0 if kernel == "attention_mma" else _page_box(tile, contiguous, page_size),
            rules=rules,
            functor=functor,
            **dims,
        )
        if tile == 192:  # Hopper's alone, so whether it can be built is known now
            render(spec, "sm_90a")
        specs.append(spec)
    if merges:
        specs.append(
            KernelSpec(
                kernel="merge",
                dtype=dtype,
                head_dim_vo=dims["head_dim_vo"],
                rules=rules & RULES["softmax"],  # all that the merge needs to know
                # The final output is written by the merge too; nothing else of a user's rules is.
                functor=functor if functor is not None and "output" in holes(functor) else None,
            )
        )
    return join(specs)


def append_kernels(*, dtype: str) -> str:
    """The `kernels` attribute of an append."""
    # Rows are copied as bytes, so that one kernel serves both 16-bit types.
    return join([KernelSpec(kernel="append", dtype="float32" if dtype == "float32" else "bfloat16")])


def _kernel(dtype: str, tile: int, implementation: str | None) -> str:
    tiles = {None: (1, *_MMA_TILES, 192), "mma": _MMA_TILES, "wgmma": WGMMA_TILES}[implementation]
    if tile not in tiles:
        raise ValueError(
            f"implementation={implementation!r} has no tile {tile}; plan with tiles from {tiles}"
        )
    if tile == 1:
        return "attention_simt"
    if dtype == "float32":
        raise ValueError(
            f"the plan has tile {tile}, dtype is float32: on a GPU float32 runs on tile 1 alone. "
            "Plan with tiles=(1,), which is the default when a GPU is JAX's default backend."
        )
    if implementation == "wgmma":
        return "attention_wgmma"
    if implementation == "mma" or tile not in (_SINGLE_WARPGROUP_TILE, *WGMMA_TILES):
        return "attention_mma"
    # Which template a large tile becomes is decided where the GPU is known.
    return "attention"


def _page_box(tile: int, contiguous: bool, page_size: int) -> int:
    """Rows that one copy of the tensor engine brings: whole patterns of eight rows inside one page, 16 where
    they fit because twice as many copies need twice as many warps; 0: pages are gathered row by row.
    """
    if contiguous or tile not in (_SINGLE_WARPGROUP_TILE, *WGMMA_TILES):
        return 0
    return next((rows for rows in (16, 8) if page_size % rows == 0), 0)
