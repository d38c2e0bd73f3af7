"""NVRTC, NVIDIA's run-time compiler, through ctypes: finding the library, compiling text to a cubin, its log.

Knows nothing of kernels. The library comes with `jax[cuda13]` (or `jax[cuda12]`); no toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib
import os
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arch import arch_number, usable_archs

#: Path of an NVRTC library to use instead of the one that is found.
ENV_LIBRARY = "JAXINFER_NVRTC"

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_COMPILATION_ERROR = 6


class NvrtcNotFoundError(RuntimeError):
    """There is no NVRTC library here; the message says how to get one."""


class CompileError(RuntimeError):
    """NVRTC refused a text; the message holds its log."""


@dataclass(frozen=True)
class Nvrtc:
    """A loaded library."""

    library: Any
    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]  # compute capabilities that it knows, such as 90


def _in_wheels() -> list[str]:
    """Libraries of installed NVIDIA wheels, newest major first."""
    roots = dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path])
    return [
        path
        for folder, soname in (("cu13", _SONAMES[0]), ("cuda_nvrtc", _SONAMES[1]))
        for root in roots
        for path in glob.glob(os.path.join(root, "nvidia", folder, "lib", soname))
    ]


def _by_pathfinder() -> list[str]:
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")  # a package that need not be there
    except ImportError:
        return []
    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception:  # it raises several kinds when it finds nothing, and the next place is tried then
        return []
    return [path] if path else []


def _open(path: str) -> Any:
    # The 13.0 library has no run path and looks its builtins up by name: they must be loaded before it.
    for builtins in sorted(glob.glob(os.path.join(os.path.dirname(path) or ".", "libnvrtc-builtins.so.*"))):
        if os.path.dirname(path) and ".alt." not in builtins:
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def nvrtc() -> Nvrtc:
    """The library, looked for once: by JAXINFER_NVRTC, cuda.pathfinder, installed wheels, or the system.

    Raises:
      NvrtcNotFoundError: none could be loaded.
    """
    found = find()
    if isinstance(found, str):
        raise NvrtcNotFoundError(found)
    return found


@functools.cache
def find() -> Nvrtc | str:
    """The library, or why there is none. Kept either way: where kernels come from the disk cache, every one of them
    asks again.
    """
    override = os.environ.get(ENV_LIBRARY)
    toolkits = [p for name in _SONAMES for p in glob.glob(f"/usr/local/cuda*/lib64/{name}")]
    candidates = [override] if override else [*_by_pathfinder(), *_in_wheels(), *_SONAMES, *toolkits]
    failures = []
    for path in dict.fromkeys(candidates):
        try:
            library = _open(path)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return Nvrtc(library, path, _version(library), _archs(library))
        except (OSError, AttributeError) as error:
            failures.append(f"  {path}: {error}")
    return (
        "GPU kernels are compiled when first needed, by NVRTC, and no NVRTC library could be loaded. "
        'Install it with `pip install "jax[cuda13]"` or `pip install nvidia-cuda-nvrtc` (CUDA 12: '
        f"nvidia-cuda-nvrtc-cu12), or set {ENV_LIBRARY} to the path of libnvrtc.so. Tried:\n"
        + "\n".join(failures)
    )


def _version(library: Any) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _archs(library: Any) -> tuple[int, ...]:
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return tuple(archs)


def best_arch(arch: str) -> str:
    """`arch`, or where NVRTC is too old to know it, the newest of the same major whose cubins run on it.

    Raises:
      NvrtcNotFoundError: this NVRTC knows none.
    """
    lib = nvrtc()
    for usable in usable_archs(arch):
        if arch_number(usable) in lib.archs:
            return usable
    raise NvrtcNotFoundError(
        f"NVRTC {lib.version[0]}.{lib.version[1]} ({lib.path}) cannot compile for {arch}, only for "
        f'{list(lib.archs)}. Install a newer one, for example with `pip install -U "jax[cuda13]"`.'
    )


def compile_cubin(
    name: str, text: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Compiles CUDA text to a cubin.

    Args:
      name: what the log calls the text.
      text: CUDA C++.
      headers: contents of the headers by the exact name that `#include` uses.
      options: NVRTC options; `-arch=sm_XX` must be among them, so that the result is machine code.

    Returns:
      The cubin and the log (registers and spills when ptxas is asked for them).

    Raises:
      CompileError: with the log.
      NvrtcNotFoundError: no library.
    """
    lib = nvrtc().library
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(headers)
    names = strings(*(n.encode() for n in headers))
    contents = strings(*(c.encode() for c in headers.values()))

    def check(status: int, what: str) -> None:
        if status != 0:
            raise CompileError(f"NVRTC: {what} failed: {lib.nvrtcGetErrorString(status).decode()}")

    check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), len(headers), contents, names
        ),
        "creating the program",
    )
    try:
        args = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = lib.nvrtcCompileProgram(program, len(options), args)
        size = ctypes.c_size_t()
        check(lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "reading the log's size")
        buffer = ctypes.create_string_buffer(size.value)
        check(lib.nvrtcGetProgramLog(program, buffer), "reading the log")
        log = buffer.value.decode(errors="replace")
        if status == _COMPILATION_ERROR:
            raise CompileError(log)
        check(status, "compiling")
        check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "reading the cubin's size")
        cubin = ctypes.create_string_buffer(size.value)
        check(lib.nvrtcGetCUBIN(program, cubin), "reading the cubin")
        return cubin.raw, log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
