"""Where jaxinfer keeps what it fetches and compiles. What lies there is the business of jit/ and models/."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$JAXINFER_CACHE`, else `$XDG_CACHE_HOME/jaxinfer`, else `~/.cache/jaxinfer`; it need not exist."""
    if own := os.environ.get("JAXINFER_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "jaxinfer"
