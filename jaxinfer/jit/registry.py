"""The loader: a kernel's string and an architecture in, its cubin and launch geometry out; each compiled once.

An entry of the disk cache is named by what was compiled and by the compiler's version: a new NVRTC compiles anew,
so that its repairs arrive, and environments with different ones share a folder. Where there is no NVRTC, or one
that is too old for the GPU, the entry of the newest version serves.

Called by the GPU handlers before a program's first execution, from any thread. Driver handles are
ffi/kernels.cc's.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field

from . import cache
from .arch import arch_number, usable_archs
from .nvrtc import CompileError, NvrtcNotFoundError, best_arch, compile_cubin, nvrtc
from .render import FUNCTOR_NAME, Rendered, render
from .sources import headers
from .spec import KernelSpec

#: The oldest GPU that the kernels run on.
MIN_ARCH = 80

#: "1": kernels hold the source lines that a profiler shows.
ENV_LINE_INFO = "JAXINFER_LINE_INFO"

#: Seconds after which a compilation is announced on stderr.
_ANNOUNCE_AFTER = 1.0

#: (cubin, kernel name, threads per CTA, bytes of dynamic shared memory, whether it takes tensor maps, KV rows of
#: one copy by them)
Loaded = tuple[bytes, str, int, int, bool, int]


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: Loaded | None = None


_entries: dict[tuple[str, str], _Entry] = {}
_entries_lock = threading.Lock()


def load(spec_json: str, arch: str) -> Loaded:
    """The compiled kernel of a spec: from memory, else from the disk cache, else compiled and stored.

    Args:
      spec_json: what `KernelSpec.to_json` wrote.
      arch: architecture of the device, such as "sm_90a".

    Raises:
      RuntimeError: the GPU is too old, NVRTC is missing, or the text does not compile; says what to do.
      ValueError: the string is no spec of this version.
      NotImplementedError: no kernel for the spec on this architecture.
    """
    # One lock per kernel: two devices that need the same one wait for one compilation, others go on.
    with _entries_lock:
        entry = _entries.setdefault((spec_json, arch), _Entry())
    with entry.lock:
        if entry.loaded is None:
            spec = KernelSpec.from_json(spec_json)
            rendered, cubin = _build(spec, arch)
            entry.loaded = (
                cubin,
                rendered.entry,
                rendered.num_threads,
                rendered.smem_bytes,
                rendered.tensor_maps,
                rendered.kv_box_rows,
            )
        return entry.loaded


def options(arch: str) -> list[str]:
    """NVRTC options for a kernel."""
    return [
        f"-arch={arch}",
        "-std=c++17",
        "--device-as-default-execution-space",  # the parameter structs' member functions carry no __device__
        "--ptxas-options=-v",
        # Source lines for profilers; they double a cubin.
        *(["-lineinfo"] if os.environ.get(ENV_LINE_INFO) == "1" else []),
    ]


def compile_spec(spec: KernelSpec, arch: str) -> tuple[Rendered, bytes, str]:
    """Renders and compiles, without any cache; also returns the compiler's log.

    From CUDA 12.9 on NVRTC has a cache of its own where there is a driver. What comes from there has no report of
    the assembler.
    """
    rendered = render(spec, arch)
    uncached = ["--no-cache"] if nvrtc().version >= (12, 9) else []
    cubin, log = compile_cubin(f"{rendered.entry}.cu", rendered.text, headers(), options(arch) + uncached)
    return rendered, cubin, log


def _build(spec: KernelSpec, device_arch: str) -> tuple[Rendered, bytes]:
    if arch_number(device_arch) < MIN_ARCH:
        raise RuntimeError(
            "jaxinfer's GPU kernels need compute capability 8.0 (Ampere) or newer, "
            f"this GPU has {device_arch}. Use implementation='reference' here, which runs on every platform."
        )
    try:
        arch = best_arch(device_arch)
        version = "{}.{}".format(*nvrtc().version)
    except NvrtcNotFoundError:
        if (stored := _stored(spec, device_arch)) is not None:
            return stored
        raise
    rendered = render(spec, arch)
    name = f"{_source_key(rendered, arch)}.{version}"
    if (cubin := cache.get(name)) is not None:
        return rendered, cubin
    announce = threading.Timer(_ANNOUNCE_AFTER, _announce, (f"jaxinfer: compiling {spec} for {arch} ...",))
    announce.daemon = True
    announce.start()
    try:
        cubin, _ = compile_cubin(f"{rendered.entry}.cu", rendered.text, headers(), options(arch))
    except CompileError as error:
        raise CompileError(_explain(spec, arch, str(error))) from None
    finally:
        announce.cancel()
    cache.put(name, cubin)
    return rendered, cubin


def _source_key(rendered: Rendered, arch: str) -> str:
    """The content hash of all that the compiler reads."""
    texts = (part for item in sorted(headers().items()) for part in item)
    return cache.key([rendered.text, *texts, *options(arch)])


def _stored(spec: KernelSpec, device_arch: str) -> tuple[Rendered, bytes] | None:
    """A kernel in the disk cache that runs on the device, whatever compiled it; the newest NVRTC's first."""
    for arch in usable_archs(device_arch):
        rendered = render(spec, arch)
        for name in cache.versions(_source_key(rendered, arch)):
            if (cubin := cache.get(name)) is not None:
                return rendered, cubin
    return None


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _explain(spec: KernelSpec, arch: str, log: str) -> str:
    if spec.functor is not None and f"{FUNCTOR_NAME}(" in log:
        return (
            f"the CUDA text given to Variant.from_cuda does not compile (lines count from its first):\n{log}"
        )
    return f"jaxinfer's kernel {spec} does not compile for {arch}; please report this:{os.linesep}{log}"
