"""From a spec to the CUDA text that instantiates one kernel template, with its launch geometry.

The templates are csrc/kernels/*.cuh; which tile is computed how is tiles.py's choice. Nothing is compiled here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .spec import ELEMENT_SIZE, RULES, FunctorSource, KernelSpec
from .tiles import TileConfig, append_config, merge_config, tile_config, wgmma_config

_DTYPE = {"float32": "DType::kF32", "float16": "DType::kF16", "bfloat16": "DType::kBF16"}

#: Environment variable with a seed: kernels sleep at random before arrivals, barriers and waits. For finding barriers
#: that are missing; results must not change by a bit.
ENV_INJECT_DELAYS = "JAXINFER_INJECT_DELAYS"

#: What compile errors call the user's own text.
FUNCTOR_NAME = "from_cuda"

# How each hole of csrc/kernels/variant.cuh is recognised in a user's text, and how it is forwarded.
_HOLES = {
    "logits": (
        re.compile(r"\bfloat\s+logits\s*\("),
        "__device__ float logits(float s, const Row& row, const Col& col) const {",
        "return Base::logits(holes.logits(s, row, col), row, col);",
    ),
    "mask": (
        re.compile(r"\bbool\s+mask\s*\("),
        "__device__ bool mask(const Row& row, const Col& col) const {",
        "return Base::mask(row, col) && holes.mask(row, col);",
    ),
    **{
        name: (
            re.compile(rf"\bvoid\s+{name}\s*\("),
            "template <int kCount> __device__ void "
            f"{name}(float (&x)[kCount], int dim, const Row& row{more}) const {{",
            f"holes.{name}(x, dim, row{argument});",
        )
        for name, more, argument in (
            ("query", "", ""),
            ("key", ", const Col& col", ", col"),
            ("value", ", const Col& col", ", col"),
            ("output", "", ""),
        )
    },
}


@dataclass(frozen=True)
class Rendered:
    """A kernel's text and how to launch it.

    Attributes:
      text: CUDA C++ to compile.
      entry: name of the kernel in it.
      num_threads: per CTA.
      smem_bytes: dynamic shared memory per CTA.
      tensor_maps: its last parameter is the maps that the tensor copy engine reads Q, K and V by.
      kv_box_rows: KV rows of one copy by those maps; 0 where K and V have none.
    """

    text: str
    entry: str
    num_threads: int
    smem_bytes: int
    tensor_maps: bool = False
    kv_box_rows: int = 0


def holes(functor: FunctorSource) -> frozenset[str]:
    """The holes that a functor's text fills."""
    return frozenset(name for name, (pattern, *_) in _HOLES.items() if pattern.search(functor.text))


def changes_inputs(functor: FunctorSource | None) -> frozenset[str]:
    """The holes of a functor that change Q, K or V before the products."""
    return holes(functor) & {"query", "key", "value"} if functor is not None else frozenset()


def template(spec: KernelSpec, arch: str) -> str:
    """The template that computes `spec` on the architecture.

    Raises:
      NotImplementedError: there is none.
    """
    if spec.kernel not in ("attention", "attention_wgmma"):
        return spec.kernel
    # Tensor copies bring K and V to where the instructions read them, and Q too: nobody could change them between.
    changed = changes_inputs(spec.functor)
    if arch == "sm_90a" and not changed and (spec.tile != 64 or has_single_warpgroup(spec)):
        return "attention_wgmma"
    if spec.kernel == "attention" and spec.tile != 192:
        return "attention_mma"
    reason = f"rules that change {', '.join(sorted(changed))}" if changed else arch
    raise NotImplementedError(
        f"tile {spec.tile} of attention_wgmma for {reason}; it needs compute capability 9.0 and rules that leave "
        "Q, K and V as they are. Plan with tile 128, and leave implementation to jaxinfer."
    )


def has_single_warpgroup(spec: KernelSpec) -> bool:
    """Whether a spec of tile 64 (a few tokens to verify) runs on one consumer warpgroup: on pages that the copy
    engine reads, at the width that was measured.
    """
    dims = (spec.head_dim_qk, spec.head_dim_vo)
    return spec.packed and spec.page_box > 0 and dims == (128, 128) and spec.functor is None


def render(spec: KernelSpec, arch: str) -> Rendered:
    """The text of the kernel that `spec` describes, for the architecture `arch` ("sm_90a").

    Raises:
      NotImplementedError: no template computes the spec on this architecture.
    """
    if spec.kernel == "append":
        return _render_append(spec)
    kernel = template(spec, arch)
    config = merge_config() if kernel == "merge" else _tile(spec, kernel, arch)
    constants = [
        f"static constexpr DType kDType = {_DTYPE[spec.dtype]};",
        f"static constexpr int kHeadDimQk = {spec.head_dim_qk};",
        f"static constexpr int kHeadDimVo = {spec.head_dim_vo};",
        f"static constexpr int kTile = {spec.tile};",
        f"static constexpr bool kPacked = {_bool(spec.packed)};",
        f"static constexpr bool kContiguous = {_bool(spec.contiguous)};",
        f"static constexpr uint32_t kRules = {spec.rules}u;",
        *_geometry(config),
    ]
    entry = f"jaxinfer_{kernel}"
    is_wgmma = kernel == "attention_wgmma"
    cls = "" if kernel == "merge" else ", int cls"
    maps = ", const __grid_constant__ jaxinfer::TensorMaps maps" if is_wgmma else ""
    arguments = "params, operands" if kernel == "merge" else "params, cls, operands"
    seed = os.environ.get(ENV_INJECT_DELAYS)
    text = "\n".join(
        [
            *([f"#define JAXINFER_INJECT_DELAYS {int(seed)}"] if seed else []),
            '#include "params.h"',
            *_operands(spec.functor),
            f'#include "kernels/{kernel}.cuh"',
            "namespace jaxinfer {",
            *_struct("Config", constants),
            *_variant(spec.functor),
            "}  // namespace jaxinfer",
            f'extern "C" __global__ void __launch_bounds__({config.num_threads}, {config.min_ctas})',
            f"{entry}(const __grid_constant__ jaxinfer::AttentionParams params{cls},",
            f"    const __grid_constant__ jaxinfer::VariantOperands operands{maps}) {{",
            f"  jaxinfer::{kernel}<jaxinfer::Config, jaxinfer::Variant>({arguments}{', maps' if maps else ''});",
            "}",
            "",
        ]
    )
    rows = config.constant("kBlockKV") if spec.contiguous else spec.page_box
    return Rendered(text, entry, config.num_threads, config.smem_bytes, is_wgmma, rows if is_wgmma else 0)


def _tile(spec: KernelSpec, kernel: str, arch: str) -> TileConfig:
    unmasked_softmax = spec.rules & (RULES["mask"] | RULES["softmax"]) == RULES["softmax"]
    plain = spec.functor is None and unmasked_softmax
    if kernel == "attention_wgmma":
        return wgmma_config(
            head_dim_qk=spec.head_dim_qk,
            head_dim_vo=spec.head_dim_vo,
            tile=spec.tile,
            contiguous=spec.contiguous,
            page_box=spec.page_box,
            plain=plain,
            capped=spec.rules & RULES["logits_soft_cap"] != 0,
            functor=spec.functor is not None,
        )
    return tile_config(
        kernel=kernel,
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        tile=spec.tile,
        plain=plain,
        arch=arch,
    )


def _render_append(spec: KernelSpec) -> Rendered:
    config = append_config()
    element_size = f"static constexpr int kElementSize = {ELEMENT_SIZE[spec.dtype]};"
    text = "\n".join(
        [
            '#include "kernels/append.cuh"',
            "namespace jaxinfer {",
            *_struct("Config", [element_size, *_geometry(config)]),
            "}  // namespace jaxinfer",
            f'extern "C" __global__ void __launch_bounds__({config.num_threads}, {config.min_ctas})',
            "jaxinfer_append(const __grid_constant__ jaxinfer::AppendParams params) {",
            "  jaxinfer::append<jaxinfer::Config>(params);",
            "}",
            "",
        ]
    )
    return Rendered(text, "jaxinfer_append", config.num_threads, config.smem_bytes)


def _geometry(config: TileConfig) -> list[str]:
    return [
        f"static constexpr int kNumThreads = {config.num_threads};",
        f"static constexpr int kMinCtas = {config.min_ctas};",
        f"static constexpr int kSmemBytes = {config.smem_bytes};",
        *(f"static constexpr int {name} = {value};" for name, value in config.constants),
    ]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _struct(name: str, members: list[str]) -> list[str]:
    return [f"struct {name} {{", *(f"  {member}" for member in members), "};"]


def _operands(functor: FunctorSource | None) -> list[str]:
    """VariantOperands: pointers in field order, then scalars; the order in which the handler packs them."""
    if functor is None:
        members = ["int unused;"]
    else:
        members = [f"const {kind}* {name};" for name, kind in functor.pointers]
        members += [f"{kind} {name};" for name, kind in functor.scalars]
    return [
        "namespace jaxinfer {",
        *_struct("VariantOperands", members or ["int unused;"]),
        "}  // namespace jaxinfer",
    ]


def _variant(functor: FunctorSource | None) -> list[str]:
    """The variant: the built-in rules, around the user's holes where there are any.

    The user's logits come before the soft cap, as bias does, and the user's mask is combined by AND.
    """
    if functor is None:
        return ["using Variant = BuiltinVariant<Config>;"]
    filled = holes(functor)
    lines = [
        "struct UserHoles {",
        "  const VariantOperands& params;",
        f'#line 1 "{FUNCTOR_NAME}"',
        functor.text,
        '#line 1 "jaxinfer"',
        "};",
        "struct Variant : BuiltinVariant<Config> {",
        "  using Base = BuiltinVariant<Config>;",
        "  UserHoles holes;",
        "  __device__ Variant(const AttentionParams& params, const VariantOperands& operands,",
        "                     const Row& row)",
        "      : Base(params, operands, row), holes{operands} {}",
    ]
    for name, (_, signature, body) in _HOLES.items():
        if name in filled:
            lines += [
                f"  static constexpr bool k{name.capitalize()} = true;",
                f"  {signature}",
                f"    {body}",
                "  }",
            ]
    return [*lines, "};"]
