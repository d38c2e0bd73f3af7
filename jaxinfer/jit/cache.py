"""The disk cache of compiled kernels: one file per content hash, written atomically, checked when read.

A cache that cannot be read or written costs time, never an error. What goes into the hash is registry.py's
choice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jaxinfer._cache_folder import cache_folder

_MAGIC = b"jaxinfer cubin 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size


def folder() -> Path:
    """Where compiled kernels are kept; it need not exist."""
    return cache_folder() / "kernels"


def key(parts: Iterable[str]) -> str:
    """The content hash of the parts; their boundaries count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def get(name: str) -> bytes | None:
    """The kernel stored under `name`, or None when there is none, or only a damaged one."""
    try:
        data = (folder() / f"{name}.cubin").read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) + _DIGEST_SIZE :]
    whole = (
        data.startswith(_MAGIC)
        and data[len(_MAGIC) : len(_MAGIC) + _DIGEST_SIZE] == hashlib.sha256(body).digest()
    )
    return body if whole else None


def versions(prefix: str) -> list[str]:
    """The names `PREFIX.MAJOR.MINOR` that are stored, highest version first."""
    try:
        stored = [path.stem.removeprefix(prefix + ".") for path in folder().glob(f"{prefix}.*.cubin")]
    except OSError:
        return []
    numbers = [tuple(map(int, v.split("."))) for v in stored if re.fullmatch(r"\d+\.\d+", v)]
    return [".".join((prefix, *map(str, v))) for v in sorted(numbers, reverse=True)]


def put(name: str, cubin: bytes) -> bool:
    """Stores a kernel; whether that worked. A reader sees the old file, the new one or none, never a part."""
    temporary = None
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name[:16]}.", dir=folder())
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, folder() / f"{name}.cubin")
        return True
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False


def count() -> int:
    """How many kernels are stored."""
    try:
        return sum(1 for _ in folder().glob("*.cubin"))
    except OSError:
        return 0
