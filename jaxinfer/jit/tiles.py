"""How each tile is computed: warps, KV blocks, stages and registers, by dtype, head dims and GPU.

The one table of such choices; `Config` of the kernels in csrc/kernels gets them as constants. Rendering is
render.py's business, which tile a plan uses is the planner's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .arch import arch_number
from .spec import ELEMENT_SIZE


@dataclass(frozen=True)
class TileConfig:
    """Geometry of one kernel.

    Attributes:
      num_threads: per CTA.
      smem_bytes: dynamic shared memory per CTA.
      min_ctas: CTAs per multiprocessor that the compiler must leave registers for.
      constants: what else the template's Config holds, by name.
    """

    num_threads: int
    smem_bytes: int = 0
    min_ctas: int = 1
    constants: tuple[tuple[str, int], ...] = ()

    def constant(self, name: str) -> int:
        """The value of one of `constants`."""
        return dict(self.constants)[name]


@dataclass(frozen=True)
class _Shape:
    """One row of the table: `streams` groups of `warps_m` warps.

    The warps of a stream split the query rows and share a ring of `stages` blocks of `block_kv` KV tokens;
    streams split the blocks of an item. `query_in_registers`: else read again from shared memory at every block.
    """

    warps_m: int
    streams: int
    block_kv: int
    stages: int
    min_ctas: int
    query_in_registers: bool


# Tile 16 and 32 read K and V once and are limited by that: 64 KB in flight per multiprocessor saturate an H200, and
# eight warps hide each other's latency better than four, so two CTAs wherever their rings fit. Tile 64 and 128 are
# for longer queries: 32 rows per warp halve the shared memory reads of K and V, as long as o fits into registers.
_MMA: dict[int, dict[tuple[int, int], _Shape]] = {
    16: {
        (64, 64): _Shape(1, 4, 32, 2, 2, True),
        (96, 96): _Shape(1, 4, 32, 2, 2, True),  # 64 x 8192: 375 us; one CTA 392, blocks of 16 378
        (128, 128): _Shape(1, 4, 16, 2, 2, True),
        (192, 192): _Shape(1, 4, 16, 3, 1, True),
        (256, 256): _Shape(1, 4, 16, 3, 1, False),
    },
    32: {
        (64, 64): _Shape(2, 2, 64, 2, 2, True),
        (96, 96): _Shape(2, 2, 32, 3, 2, True),
        (128, 128): _Shape(2, 2, 32, 2, 2, True),
        (192, 192): _Shape(2, 2, 32, 3, 1, True),
        (256, 256): _Shape(2, 2, 32, 2, 1, False),
    },
    64: {
        (64, 64): _Shape(4, 1, 64, 2, 3, True),
        (96, 96): _Shape(4, 1, 64, 2, 2, True),
        (128, 128): _Shape(4, 1, 64, 2, 2, True),
        (192, 128): _Shape(4, 1, 64, 2, 2, False),
        (192, 192): _Shape(4, 1, 32, 2, 2, False),
        (256, 256): _Shape(4, 1, 32, 2, 2, False),
    },
    128: {
        (64, 64): _Shape(4, 1, 64, 2, 2, False),
        (96, 96): _Shape(4, 1, 64, 2, 2, False),
        (128, 128): _Shape(4, 1, 64, 2, 2, False),
        (192, 128): _Shape(4, 1, 32, 2, 2, False),
        (192, 192): _Shape(8, 1, 64, 2, 1, False),
        (256, 256): _Shape(8, 1, 64, 2, 1, False),
    },
}

# Tile 1: every warp a stream of eight KV tokens at a time.
_SIMT = _Shape(1, 4, 8, 3, 2, False)
_SIMT_ROWS = 8  # kSimtMaxRows of attention_simt.cuh

# sizeof(WarpState) of work.cuh.
_WARP_STATE = 136

# Of a consumer thread of the warpgroup kernel, by tile: registers for the accumulators of o and scores and the
# packed weights, and what loaders that know pages, and masks and users' rules, take from that. The rest of the 224 or
# 232 (two consumers), 152 or 160 (three) is for addresses and what is in flight between the products. All found by
# compiling.
_WGMMA_REGISTERS = {128: (188, 0, 12, 36), 192: (128, 12, 24, 36)}
# sizeof of ItemSlot and CursorState of the kernel, and how many items it has slots for.
_ITEM_SLOT = 76
_ITEM_SLOTS = 4
_CURSOR_STATE = 52

_KB = 1024
# Shared memory of a multiprocessor; one CTA can have 1 KB less, and each CTA costs 1 KB more than it asks for.
_SMEM_PER_MULTIPROCESSOR = {
    80: 164 * _KB,
    86: 100 * _KB,
    87: 164 * _KB,
    89: 100 * _KB,
    90: 228 * _KB,
    100: 228 * _KB,
}
_SMEM_RESERVED = 1 * _KB


def tile_config(
    *,
    kernel: str,
    dtype: str,
    head_dim_qk: int,
    head_dim_vo: int,
    tile: int,
    plain: bool,
    arch: str,
) -> TileConfig:
    """Geometry of a tile of `attention_mma` or `attention_simt`; head dims are padded ones, `plain` says that
    the rules are softmax, positions and soft cap alone.

    Raises:
      NotImplementedError: the kernel has no such tile or dtype.
    """
    dims = (head_dim_qk, head_dim_vo)
    if kernel == "attention_simt":
        if tile != 1:
            raise NotImplementedError(f"tile {tile} on CUDA cores; supported: tile 1")
        shape = _fit(_SIMT, dims, tile, ELEMENT_SIZE[dtype], arch)
    else:
        if tile not in _MMA or dtype not in ("float16", "bfloat16"):
            raise NotImplementedError(
                f"tile {tile} in {dtype} on tensor cores; supported: tiles {sorted(_MMA)} in float16 and bfloat16"
            )
        rows = _MMA[tile]
        # A pair without a row of its own is no wider than the square of its larger side.
        shape = rows.get(dims) or rows[max(dims), max(dims)]
        if tile > 16 * shape.warps_m:
            shape = _fit_two(shape, dims, tile, plain, arch)
        elif tile == 32 and max(dims) > 128 and arch_number(arch) >= 100:
            shape = replace(shape, block_kv=16)  # for registers, as in _fit_two
        elif not plain and arch_number(arch) >= 100:
            shape = replace(shape, block_kv=min(shape.block_kv, 32))  # for registers, as in _fit_two
        shape = _fit(shape, dims, tile, 2, arch)
    smem = _smem_bytes(shape, dims, tile, ELEMENT_SIZE[dtype])
    room = _smem_per_multiprocessor(arch) // (smem + _SMEM_RESERVED)
    return TileConfig(
        num_threads=32 * shape.warps_m * shape.streams,
        smem_bytes=smem,
        min_ctas=max(1, min(shape.min_ctas, room)),
        constants=(
            ("kWarpsM", shape.warps_m),
            ("kStreams", shape.streams),
            ("kBlockKV", shape.block_kv),
            ("kStages", shape.stages),
            ("kQueryInRegisters", int(shape.query_in_registers)),
        ),
    )


def wgmma_config(
    *,
    head_dim_qk: int,
    head_dim_vo: int,
    tile: int,
    contiguous: bool,
    page_box: int,
    plain: bool,
    capped: bool,
    functor: bool,
) -> TileConfig:
    """Geometry of a tile of `attention_wgmma`; arguments as for `tile_config`, `page_box` as in KernelSpec;
    `capped`: with a soft cap, `functor`: there are a user's rules.

    Raises:
      NotImplementedError: the output of the tile does not fit into registers.
    """
    if tile == 64:
        return _single_warpgroup_config(head_dim_qk, head_dim_vo, page_box)
    gather = not contiguous and page_box == 0
    consumers = tile // 64
    room, for_pages, for_rules, for_functor = _WGMMA_REGISTERS[tile]
    if tile == 128 and page_box > 0 and head_dim_qk > head_dim_vo:
        for_pages += 30  # a whole block of K in three panels spills four bytes
    if tile == 192 and page_box == 16:
        for_pages = 0  # 6% faster with whole blocks, whose registers the producers can spare
    room -= head_dim_vo // 2 + (0 if contiguous else for_pages)
    room -= for_functor if functor else 0 if plain else for_rules
    stages = 2  # three measured the same
    for block_kv in (128, 112, 96, 80, 64, 32):
        smem = _wgmma_smem_bytes(head_dim_qk, head_dim_vo, tile, block_kv, stages)
        if block_kv * 3 // 4 <= room and smem <= _SMEM_PER_MULTIPROCESSOR[90] - _SMEM_RESERVED:
            break
    else:
        raise NotImplementedError(
            f"head_dim_vo {head_dim_vo} in tile {tile} does not fit into registers; plan with tiles up to 128"
        )
    # A producer's and a consumer's. A CTA holds what it was launched with, whole eights per thread (168 for 384
    # threads): a warpgroup that asks for more than is left of that waits for ever.
    registers = (56, 224) if gather else (40, 232)
    if consumers == 3:
        registers = (32, 160) if contiguous or page_box == 16 else (56, 152)
    return TileConfig(
        num_threads=128 * (consumers + 1),
        smem_bytes=smem,
        constants=(
            ("kBlockKV", block_kv),
            ("kStages", stages),
            ("kPageBox", page_box),
            # Half of them bring K, half V. With pages of 16 two of each are 1.5% slower (page_box 16, head dim 128):
            # consumers wait for their instructions, not for the copies.
            ("kProducerWarps", 2 if contiguous or page_box == 16 else 4),
            ("kProducerRegisters", registers[0]),
            ("kConsumerRegisters", registers[1]),
            # Taking turns brings 14% at (192, 128), costs 6% at 256.
            ("kPingPong", int(head_dim_vo <= 128)),
            # Half a block's softmax beside the product before brings 5% at 128 and 7% at (192, 128), three quarters
            # no more (1% fewer cycles, 1% slower at the power limit). Three consumers have no registers for it. With
            # a cap 16 columns are best (4 x 4096 and 1 x 16384 tokens: 568, 611 TFLOP/s; half a block: 560, 601).
            ("kEarlyColumns", 0 if consumers == 3 else 16 if capped else block_kv // 16 * 8),
        ),
    )


def _single_warpgroup_config(head_dim_qk: int, head_dim_vo: int, page_box: int) -> TileConfig:
    """Tile 64 on one consumer: two CTAs per multiprocessor, which hide each other's softmax.

    64 requests of 8 tokens in groups of 8 over 2048 KV tokens: 135 us on an H200, with the portable kernel 150 (one
    token each: 126); with blocks of 64 136, of 32 in four stages 137, of 128 in a CTA alone 136.
    """
    block_kv, stages = 80, 2
    return TileConfig(
        num_threads=256,
        smem_bytes=_wgmma_smem_bytes(head_dim_qk, head_dim_vo, 64, block_kv, stages),
        min_ctas=2,
        constants=(
            ("kBlockKV", block_kv),
            ("kStages", stages),
            ("kPageBox", page_box),
            ("kProducerWarps", 4),
            ("kProducerRegisters", 48),
            ("kConsumerRegisters", 208),
            ("kPingPong", 0),
            ("kEarlyColumns", 0),  # the other CTA's products run beside this one's softmax
        ),
    )


def _wgmma_smem_bytes(head_dim_qk: int, head_dim_vo: int, tile: int, block_kv: int, stages: int) -> int:
    """The sum that WgmmaShared makes in the kernel, which checks that they agree."""
    panels_qk, panels_vo = -(-head_dim_qk // 64), -(-head_dim_vo // 64)
    consumers = tile // 64
    data = panels_qk * tile * 128 + stages * (panels_qk + panels_vo) * block_kv * 128
    flags = tile * 8 + stages * (24 + block_kv * 4) + (2 * consumers + 4 * stages) * 8
    states = _ITEM_SLOTS * _ITEM_SLOT + 4 * consumers * 4 + 4 * _CURSOR_STATE
    return data + -(-(flags + states) // 16) * 16


def merge_config() -> TileConfig:
    """Geometry of the merge: one warp per (merge entry, query head, 128 columns).

    Two warps: such a CTA finds registers beside two attention CTAs, which it waits for.
    """
    return TileConfig(num_threads=64)


def append_config() -> TileConfig:
    """Geometry of the append."""
    return TileConfig(num_threads=128)


def _smem_per_multiprocessor(arch: str) -> int:
    """Of `arch` ("sm_90a"). Newer ones than the table knows are taken as consumer parts, which have the least."""
    return _SMEM_PER_MULTIPROCESSOR.get(arch_number(arch), 100 * _KB)


def _smem_bytes(shape: _Shape, dims: tuple[int, int], tile: int, element_size: int) -> int:
    """The sum that MmaSharedMemory and SimtSharedMemory make in the kernels, which check that they agree."""
    head_dim_qk, head_dim_vo = dims
    stages = shape.streams * shape.stages
    ring = stages * shape.block_kv * (head_dim_qk + head_dim_vo) * element_size
    flags = stages * (shape.block_kv * 4 + shape.warps_m * 4)
    bookkeeping = 0
    if tile not in (16, 32):
        bookkeeping = shape.streams * shape.warps_m * _WARP_STATE
    if tile == 1:
        query = _SIMT_ROWS * head_dim_qk * 4
        states = shape.streams * _SIMT_ROWS * (head_dim_vo * 4 + 8)
    else:
        query = tile * head_dim_qk * 2
        states = tile * 8 + (shape.streams * tile * 8 + 16 if shape.streams > 1 else shape.block_kv * 4)
    return query + ring + states + flags + bookkeeping


def _fit_two(shape: _Shape, dims: tuple[int, int], tile: int, plain: bool, arch: str) -> _Shape:
    """Four warps of 32 rows need a second CTA beside them: else smaller blocks, and last eight warps of 16 rows."""
    limit = _smem_per_multiprocessor(arch) // 2 - _SMEM_RESERVED
    small = replace(shape, block_kv=min(shape.block_kv, 32))
    # What masks and users' rules know of every row has no registers beside the scores of 64 columns; from 10.0 on the
    # assembler needs more of them for everything.
    for candidate in [shape, small] if plain and arch_number(arch) < 100 else [small]:
        if _smem_bytes(candidate, dims, tile, 2) <= limit:
            return candidate
    return replace(shape, warps_m=2 * shape.warps_m)


def _fit(shape: _Shape, dims: tuple[int, int], tile: int, element_size: int, arch: str) -> _Shape:
    """The nearest shape whose shared memory a CTA can have: fewer stages, then smaller blocks, then fewer streams."""
    limit = _smem_per_multiprocessor(arch) - _SMEM_RESERVED
    while _smem_bytes(shape, dims, tile, element_size) > limit:
        if shape.stages > 2:
            shape = replace(shape, stages=shape.stages - 1)
        elif shape.block_kv > 16:
            shape = replace(shape, block_kv=shape.block_kv // 2)
        elif shape.streams > 1:
            shape = replace(shape, streams=shape.streams // 2)
        else:
            raise NotImplementedError(
                f"head dims {dims} in tile {tile} do not fit into the shared memory of {arch}"
            )
    return shape
