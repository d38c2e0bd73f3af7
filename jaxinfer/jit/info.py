"""What the run-time compiler finds on this machine, for `python -m jaxinfer info` and for error reports.

Nothing is compiled or printed here.
"""

from __future__ import annotations

import os
from typing import Any

from jaxinfer import _native

from . import cache
from .nvrtc import NvrtcNotFoundError, nvrtc


def info() -> dict[str, Any]:
    """Driver, devices, NVRTC and cache as plain values; a thing that is missing is told by an "error".

    Returns:
      "driver": {"version"} or {"error"}; "devices": [{"name", "compute_capability", "multiprocessors"}];
      "nvrtc": {"path", "version"} or {"error"}; "cache": {"folder", "kernels", "writable"}.
    """
    folder = cache.folder()
    existing = next((f for f in (folder, *folder.parents) if f.exists()), folder)
    try:
        found = nvrtc()
        compiler: dict[str, Any] = {"path": found.path, "version": "{}.{}".format(*found.version)}
    except NvrtcNotFoundError as error:
        compiler = {"error": str(error)}
    driver = _native.driver_info()
    return {
        "driver": {"error": driver["error"]} if driver["error"] else {"version": driver["version"]},
        "devices": driver["devices"],
        "nvrtc": compiler,
        "cache": {"folder": str(folder), "kernels": cache.count(), "writable": os.access(existing, os.W_OK)},
    }
