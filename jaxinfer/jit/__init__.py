"""The run-time compiler: from a kernel's spec to CUDA text, to a cubin by NVRTC, to a file in the disk cache.

Importing this package registers the loader that GPU programs call before their first execution. Which specs a
call needs is attention.py's and cache.py's business; loading cubins into the driver and launching them is
ffi/'s.
"""

from __future__ import annotations

from .functor import Functor, from_cuda
from .info import info
from .registry import load
from .spec import KernelSpec

__all__ = ["Functor", "KernelSpec", "from_cuda", "info", "load"]
