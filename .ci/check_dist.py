"""Checks a folder with the sdist and wheels of a release: names, sizes, contents. Standard library only.

Usage: check_dist.py DIST
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

MAX_BYTES = 1_000_000


def check(condition: bool, message: str) -> None:
    """Ends the program with the message unless the condition holds."""
    if not condition:
        sys.exit(f"check_dist: {message}")


def check_wheel(path: Path, tag: str) -> None:
    """A wheel holds the package, its typing marker and one library, and nothing that is not installed."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    libraries = [n for n in names if n.endswith(".so")]
    suffix = ".abi3.so" if "abi3" in tag else ".cpython-311-"
    check(
        len(libraries) == 1 and suffix in libraries[0],
        f"{path.name}: libraries {libraries}, expected *{suffix}*",
    )
    for name in (
        "jaxinfer/__init__.py",
        "jaxinfer/py.typed",
        "jaxinfer/models/llama.py",
        "jaxinfer/bench/peers.py",
    ):
        check(name in names, f"{path.name}: lacks {name}")
    for name in names:
        top = name.split("/")[0]
        check(
            top == "jaxinfer" or top.endswith(".dist-info"), f"{path.name}: {name} does not belong in a wheel"
        )
        check(not name.endswith((".cc", ".h", ".cmake")), f"{path.name}: {name} does not belong in a wheel")
    check(any(n.endswith(".dist-info/licenses/LICENSE") for n in names), f"{path.name}: lacks the license")
    check("License-Expression: Apache-2.0" in metadata, f"{path.name}: no License-Expression in the metadata")


def check_sdist(path: Path) -> None:
    """An sdist holds all that a build and the tests need, and no build products."""
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for name in (
        *("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "csrc/params.h", "ffi/module.cc"),
        *("jaxinfer/__init__.py", "tests/conftest.py"),
    ):
        check(name in names, f"{path.name}: lacks {name}")
    for name in names:
        check(not name.endswith((".so", ".pyc", ".o")), f"{path.name}: {name} is a build product")


def main(dist: Path) -> None:
    """Checks everything in the folder."""
    sdists, wheels = sorted(dist.glob("*.tar.gz")), sorted(dist.glob("*.whl"))
    check(len(sdists) == 1, f"{len(sdists)} sdists in {dist}, expected 1")
    check_sdist(sdists[0])
    tags = ("cp311-cp311", "cp312-abi3")
    check(len(wheels) == len(tags), f"{[w.name for w in wheels]}, expected one each of {tags}")
    for tag in tags:
        matching = [w for w in wheels if f"-{tag}-" in w.name]
        check(len(matching) == 1, f"{[w.name for w in wheels]}, expected one {tag}")
        check_wheel(matching[0], tag)
    for path in (*sdists, *wheels):
        size = path.stat().st_size
        check(size < MAX_BYTES, f"{path.name} has {size} bytes, expected below {MAX_BYTES}")
        print(f"{path.name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
