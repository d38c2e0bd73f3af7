"""Where jaxinfer keeps what it fetches and compiles. What lies there is the business of jit/ and models/."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$JAXINFER_CACHE`, else `$XDG_CACHE_HOME/jaxinfer`, else `~/.cache/jaxinfer`; it need not exist.

    Users without a home (a container's, with an id that no file lists) have "/", which they can hardly write to.
    """
    if own := os.environ.get("JAXINFER_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    return (Path(xdg) if xdg else Path("/" if home == "~" else home) / ".cache") / "jaxinfer"
