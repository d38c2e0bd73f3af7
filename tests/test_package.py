"""The installed package: version, typing marker, what importing needs and what it leaves alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

import jaxinfer
from jaxinfer import _native
from jaxinfer.ffi import check_api

SOURCE = Path(jaxinfer.__file__).parent


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_version_is_that_of_the_distribution():
    assert jaxinfer.__version__ == metadata.version("jaxinfer")


def test_typing_marker():
    assert (SOURCE / "py.typed").is_file()


def test_metadata():
    about = metadata.metadata("jaxinfer")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    needs = [text for text in metadata.requires("jaxinfer") or [] if "extra ==" not in text]
    assert {re.split(r"[<>=!~ ]", text)[0] for text in needs} == {"jax", "numpy"}
    assert {"models", "bench", "test"} <= set(about.get_all("Provides-Extra"))


def test_all_public_names_exist():
    assert sorted(jaxinfer.__all__) == jaxinfer.__all__
    for name in jaxinfer.__all__:
        assert getattr(jaxinfer, name).__doc__, name


def test_nothing_but_jax_and_numpy_is_needed_to_run():
    # Models and benchmarks too: their extras are imported where they are used.
    blocked = "beartype gguf hypothesis jaxtyping jinja2 matplotlib pytest rich safetensors tokenizers"
    done = run(f"""
import sys
for name in "{blocked}".split():
    sys.modules[name] = None
import jaxinfer, jaxinfer.cli, jaxinfer.bench.decode, jaxinfer.bench.plan, jaxinfer.models.command
assert jaxinfer.cli.main(["info"]) == 0
""")
    assert done.returncode == 0, done.stderr


def test_import_neither_starts_a_backend_nor_loads_models():
    done = run("""
import sys, jaxinfer
from jax._src import xla_bridge
assert not xla_bridge._backends, "a JAX backend was started"
for name in ("jaxinfer.models", "jaxinfer.bench", "jaxinfer.cli"):
    assert name not in sys.modules, name
""")
    assert done.returncode == 0, done.stderr


def test_missing_library_says_what_to_do():
    done = run("""
import sys
sys.modules["jaxinfer._native"] = None
import jaxinfer
""")
    assert done.returncode != 0
    assert "jaxinfer's compiled library (jaxinfer._native) is missing" in done.stderr
    assert "python -m pip install -e ." in done.stderr


def test_a_jaxlib_older_than_the_headers_is_refused_by_name(tmp_path: Path):
    """XLA's own refusal comes when its backends start, and stops every program, whatever it does."""
    header = tmp_path / "c_api.h"
    check_api((0, 5), header)  # no header, no verdict
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 4\n", encoding="utf-8")
    check_api((0, 3), header)
    check_api((0, 4), header)
    with pytest.raises(ImportError, match=r"XLA's FFI 0\.5, jaxlib .* has 0\.4\. .*--no-build-isolation"):
        check_api((0, 5), header)
    check_api(_native.xla_ffi_api, Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h"))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_house_rules(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    if text:
        assert ast.get_docstring(ast.parse(text)), "the first lines say what lives in a file"
    assert "jaxtyping" not in text or path.name == "_typing.py"


def test_one_file_lowers_to_custom_calls():
    users = [
        p.name for p in SOURCE.rglob("*.py") if re.search(r"ffi_call\(|ffi_lowering\(", p.read_text("utf-8"))
    ]
    assert users == ["ffi.py"]
