"""The border between JAX and the compiled library: FFI targets, primitives, exact attribute types.

The only file that lowers to FFI custom calls and the only one that casts attributes to the widths that the handlers
in ffi/ read. What the operations mean and how their arguments are checked lives in attention.py and cache.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        "jaxinfer's compiled library (jaxinfer._native) is missing: the package was imported from a source folder "
        "in which it was not installed. Run `python -m pip install -e .` there, or import jaxinfer from elsewhere."
    ) from error

from ._mesh import vary, varying_axes
from .jit.arch import arch_of
from .jit.registry import load
from .jit.select import append_kernels, attention_kernels
from .jit.spec import RULES, FunctorSource

Attributes = Mapping[str, Any]

#: Stands for an operand that a call does not have; an attribute says so. It has an element because jaxlib 0.11.2
#: crashes when it compiles an empty constant for several devices.
ABSENT = np.zeros(1, np.int32)


def check_api(built: tuple[int, int], header: Path) -> None:
    """Refuses a jaxlib whose XLA is older than the headers that the compiled library was built with.

    XLA itself refuses them when its backends start, so that no program runs, and names no package.

    Args:
      built: `_native.xla_ffi_api`.
      header: the running jaxlib's c_api.h; one that is not there says nothing.

    Raises:
      ImportError: names both versions and how to install again.
    """
    if not header.is_file():
        return
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8")))
    runs = int(found.get("MAJOR", built[0])), int(found.get("MINOR", built[1]))
    if built > runs:
        raise ImportError(
            f"jaxinfer's compiled library was built with headers of XLA's FFI {built[0]}.{built[1]}, jaxlib "
            f"{metadata.version('jaxlib')} has {runs[0]}.{runs[1]}. Install jaxinfer again, without "
            "--no-build-isolation: it is then built with the headers of jaxlib 0.10.2, which every later jaxlib "
            "takes. Or install a newer jaxlib."
        )


def _register_targets() -> dict[str, frozenset[str]]:
    """Registers every handler with XLA; returns the targets of each platform."""
    check_api(_native.xla_ffi_api, Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h"))
    targets = {}
    for platform, handlers in _native.registrations().items():
        for name, capsule in handlers.items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
        targets[platform.lower()] = frozenset(handlers)  # XLA says "CUDA" where JAX says "cuda"
    # GPU handlers compile what they find in a program's `kernels` attribute, wherever the program came from.
    _native.set_kernel_loader(lambda spec, capability: load(spec, arch_of(capability)))
    return targets


#: FFI targets by JAX platform.
TARGETS = _register_targets()


def attention_attributes(
    *,
    rules: Sequence[str],
    sm_scale: float,
    logits_soft_cap: float | None,
    window_left: int | None,
    window_right: int | None,
    kv_layout: str,
    contiguous: bool,
    has_layer: bool,
    has_block_pos: bool,
    plan_classes: Sequence[Sequence[int]],
    merge_capacity: int,
    slot_capacity: int,
    **params: Any,
) -> Attributes:
    """The attribute of `jaxinfer_attention`, one dictionary with the members of AttentionAttributes in ffi/checks.h.

    A value whose rule is off is zero and never read.
    """
    members = {
        "rules": np.int32(sum(RULES[rule] for rule in rules)),
        "sm_scale": np.float32(sm_scale),
        "logits_soft_cap": np.float32(logits_soft_cap or 0.0),
        "window_left": np.int32(window_left or 0),
        "window_right": np.int32(window_right or 0),
        "hnd": np.bool_(kv_layout == "HND"),
        "contiguous": np.bool_(contiguous),
        "has_layer": np.bool_(has_layer),
        "has_block_pos": np.bool_(has_block_pos),
        "plan_classes": np.asarray(plan_classes, np.int32).reshape(-1),
        "merge_capacity": np.int32(merge_capacity),
        "slot_capacity": np.int32(slot_capacity),
    }
    return {"attention": members}


def append_attributes(*, kv_layout: str, has_layer: bool) -> Attributes:
    """Attributes of `jaxinfer_append`."""
    return {"hnd": np.bool_(kv_layout == "HND"), "has_layer": np.bool_(has_layer)}


def attention_kernel_attributes(
    avals: Sequence[Any],
    *,
    rules: Sequence[str],
    contiguous: bool,
    kv_layout: str,
    plan_classes: Sequence[Sequence[int]],
    merge_capacity: int,
    slot_capacity: int,
    functor: FunctorSource | None,
    scalars: bytes,
    implementation: str | None,
    **params: Any,
) -> Attributes:
    """What a GPU call of `jaxinfer_attention` carries besides: its kernels, and the numbers of a user's rules."""
    q, k, v = avals[:3]
    kernels = attention_kernels(
        dtype=str(q.dtype),
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[-1],
        classes=[(tile, bool(packed)) for tile, packed, *_ in plan_classes],
        merges=merge_capacity > 0 and slot_capacity > 0,
        contiguous=contiguous,
        page_size=1 if contiguous else k.shape[-2 if kv_layout == "HND" else -3],
        rules=sum(RULES[rule] for rule in rules),
        functor=functor,
        implementation=implementation,
    )
    return {"kernels": kernels, "scalars": scalars}


def append_kernel_attributes(avals: Sequence[Any], **params: Any) -> Attributes:
    """What a GPU call of `jaxinfer_append` carries besides."""
    return {"kernels": append_kernels(dtype=str(avals[0].dtype))}


def bind(primitive: Primitive, *operands: Any, **params: Any) -> list[Any]:
    """`primitive.bind` with operands that all vary over the same manual mesh axes.

    Inside `jax.shard_map` the results take the axes of q or of the pools, but they vary over an axis as soon as any
    operand does: queries that are equal on every device over KV tokens that are not, a fresh pool, a plan per device.
    """
    axes = varying_axes(*operands)
    return primitive.bind(*(vary(x, axes) for x in operands), **params)  # type: ignore[no-any-return]


def make_primitive(
    target: str,
    abstract_eval: Callable[..., Sequence[Any]],
    attributes: Callable[..., Attributes],
    kernel_attributes: Callable[..., Attributes],
    *,
    aliases: Mapping[int, int] | None = None,
    num_scratch: int = 0,
    instead: str,
) -> Primitive:
    """A JAX primitive that lowers to the FFI target of the same name on every platform that has one.

    Args:
      target: FFI target, which is also the primitive's name.
      abstract_eval: result avals from operand avals and the primitive's static parameters.
      attributes: the static parameters, cast to what the handlers of every platform read.
      kernel_attributes: from operand avals and static parameters, what the GPU's handler reads besides.
      aliases: operand index -> index of the result that is updated in place.
      num_scratch: how many of the last results are memory to work in, which nobody reads.
      instead: what a caller can do where the primitive has no kernel or no rule, one sentence.
    """
    primitive = Primitive(target)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_eval)

    @functools.lru_cache(maxsize=1024)
    def program(**params: Any) -> Callable[..., list[Any]]:
        return jax.jit(lambda *args: primitive.bind(*args, **params)[: -num_scratch or None])

    def run(*args: Any, **params: Any) -> list[Any]:
        with jax.disable_jit(False):  # else the program would bind the primitive outside jit again
            results = program(**params)(*args)
        # Outside jit a result is looked at: jax_debug_nans would find NaN in scratch that was never written.
        return [*results, *[None] * num_scratch]

    primitive.def_impl(run)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        gpu_only = {
            "functor": "rules written as CUDA text need a GPU kernel",
            "implementation": f"implementation={params.get('implementation')!r} is a GPU kernel",
        }
        for name, why in gpu_only.items():
            if params.get(name) is not None:
                platforms = "/".join(ctx.module_context.platforms)
                raise NotImplementedError(f"{target}: {why}; this program is for {platforms}. {instead}")
        rule = jax.ffi.ffi_lowering(target, operand_output_aliases=dict(aliases or {}))
        return rule(ctx, *operands, **attributes(**params))

    def lower_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        rule = jax.ffi.ffi_lowering(target, operand_output_aliases=dict(aliases or {}))
        return rule(ctx, *operands, **attributes(**params), **kernel_attributes(ctx.avals_in, **params))

    def refuse_platform(ctx: Any, *operands: Any, **params: Any) -> Any:
        raise NotImplementedError(
            f"{target} has no kernel for platform {ctx.module_context.platforms}; it runs on "
            f"{sorted(platform for platform, names in TARGETS.items() if target in names)}. {instead}"
        )

    mlir.register_lowering(primitive, refuse_platform)
    for platform, names in TARGETS.items():
        if target in names:
            mlir.register_lowering(primitive, lower_cuda if platform == "cuda" else lower, platform=platform)

    def refuse(what: str) -> Callable[..., Any]:
        def rule(*args: Any, **params: Any) -> Any:
            raise NotImplementedError(f"{target} does not support {what}. {instead}")

        return rule

    ad.primitive_jvps[primitive] = refuse("differentiation (it serves models)")
    batching.primitive_batchers[primitive] = refuse("jax.vmap (requests of a batch are rows of one layout)")
    return primitive
