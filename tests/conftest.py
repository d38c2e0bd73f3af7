"""Settings of the whole suite: checked array annotations, hypothesis profiles, skipping without a GPU, shares.

Test data and oracles live in their own modules beside the tests.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import jaxtyping
import pytest


def shape_checked_modules() -> list[str]:
    """Modules of jaxinfer that annotate arrays with shapes, which is what they import `_typing` for.

    The others are left alone: public functions answer wrong arguments with messages of their own, which must
    come before a type checker's, and JAX rebuilds pytree classes with leaves that are no arrays.
    """
    root = Path(importlib.util.find_spec("jaxinfer").origin).parent
    using = (path for path in root.rglob("*.py") if "_typing import" in path.read_text())
    return sorted("jaxinfer." + ".".join(path.relative_to(root).with_suffix("").parts) for path in using)


jaxtyping.install_import_hook(shape_checked_modules(), "beartype.beartype")

hypothesis.settings.register_profile("local", deadline=None)
# The same examples in every run: what fails in CI fails again at home.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run the I-th of N shares of the tests, from 0 on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a share of the tests, neighbours together because they share compiled programs; skips those marked
    `gpu` where there is none."""
    if config.option.share is not None:
        share, shares = map(int, config.option.share.split("/"))
        items[:] = items[len(items) * share // shares : len(items) * (share + 1) // shares]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import jax

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU; the default backend is {jax.default_backend()}")
        for item in marked:
            item.add_marker(skip)
