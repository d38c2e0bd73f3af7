"""The kernels' headers as NVRTC takes them: names as they are included, and their text.

They travel inside the compiled library, so that an installed package needs no folder of sources.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer import _native

# NVRTC has no standard headers; this is what the kernels use of them.
_CSTDINT = """
#pragma once
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
"""


@functools.cache
def headers() -> Mapping[str, str]:
    """Header text by the name that `#include` uses, such as "params.h", "kernels/merge.cuh", "cstdint"."""
    return MappingProxyType({"cstdint": _CSTDINT, **_native.kernel_sources()})
