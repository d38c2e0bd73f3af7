"""Compiling kernels ahead of the first request: which ones a model needs, and a line of progress for each.

Kernels are compiled when they are first needed anyway; a server that wants its first step fast runs this once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jaxinfer import _native
from jaxinfer._heads import check_head_dim, check_heads

from . import cache, registry, select
from .arch import arch_of
from .render import changes_inputs, template
from .spec import RULES, KernelSpec

if TYPE_CHECKING:
    from jaxinfer.variant import Variant


class Heads(Protocol):
    """What is read of a model's configuration; `jaxinfer.models.LlamaConfig` has it."""

    @property
    def num_qo_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class AttentionHeads:
    """The least that `model_kernels` reads, without a model."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


def local_archs() -> list[str]:
    """The architectures of the GPUs of this machine, each once.

    Raises:
      RuntimeError: no driver or no GPU; says what to do.
    """
    driver = _native.driver_info()
    if driver["error"]:
        raise RuntimeError(driver["error"])
    if not driver["devices"]:
        raise RuntimeError(
            "the NVIDIA driver shows no GPU; in a container give it access (for example --gpus all)"
        )
    return list(dict.fromkeys(arch_of(device["compute_capability"]) for device in driver["devices"]))


def model_kernels(
    config: Heads, variants: Sequence[Variant], dtype: str = "bfloat16", page_size: int = 16
) -> list[str]:
    """Specs of every kernel that serving a model from pages can ask for: all tiles that plans may choose there.

    Raises:
      ValueError, NotImplementedError: heads or a head_dim that no plan can be made for.
    """
    from jaxinfer.attention import rules

    group_size = check_heads(config.num_qo_heads, config.num_kv_heads)
    check_head_dim(config.head_dim)
    specs = [select.append_kernels(dtype=dtype)]
    for variant in variants:
        functor = None if variant.functor is None else variant.functor.source
        tiles = [t for t in (16, 32, 64, 128) if t >= group_size]
        if config.head_dim <= 64 and not changes_inputs(functor):
            tiles.append(192)
        if dtype == "float32":
            tiles = [1]
        specs += select.attention_kernels(
            dtype=dtype,
            head_dim_qk=config.head_dim,
            head_dim_vo=config.head_dim,
            classes=[(tile, True) for tile in tiles],
            merges=True,
            contiguous=False,
            page_size=page_size,
            rules=sum(RULES[rule] for rule in rules(variant)),
            functor=functor,
            implementation=None,
        ).splitlines()
    return list(dict.fromkeys(specs))


def _runs_on(spec: KernelSpec, arch: str) -> bool:
    try:
        template(spec, arch)
    except NotImplementedError:
        return False
    return True


def warmup(
    specs: Iterable[str],
    archs: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Compiles kernels into the disk cache.

    Args:
      specs: strings of `KernelSpec.to_json`, for example from `model_kernels`.
      archs: architectures such as "sm_90a"; None: those of this machine's GPUs. Kernels that an
        architecture cannot run are left out for it.
      progress: gets one line per kernel.

    Returns:
      How many kernels were made ready.

    Raises:
      RuntimeError: no NVRTC, no GPU (with archs None), or a kernel does not compile.
    """
    parsed = [(text, KernelSpec.from_json(text)) for text in specs]
    jobs = [
        (text, spec, arch)
        for arch in (local_archs() if archs is None else archs)
        for text, spec in parsed
        if _runs_on(spec, arch)
    ]
    for number, (text, spec, arch) in enumerate(jobs, 1):
        begin = time.perf_counter()
        registry.load(text, arch)
        seconds = time.perf_counter() - begin
        progress(f"[{number}/{len(jobs)}] {spec} {arch}: {seconds:.1f} s")
    progress(f"{len(jobs)} kernels ready in {cache.folder()}")
    return len(jobs)
