"""The CUDA driver layer without a GPU: declarations, messages where there is no driver, loading by a fake one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from backend import has_nvrtc

from jaxinfer import _native
from jaxinfer.jit import info, warmup
from jaxinfer.jit.spec import KernelSpec, join

ROOT = Path(__file__).resolve().parent.parent
APPEND = KernelSpec("append", "bfloat16")


def test_missing_driver_is_told_in_words() -> None:
    facts = info()
    if "version" in facts["driver"]:
        pytest.skip("a driver is there")
    assert re.match(r"no NVIDIA driver: libcuda\.so\.1.*Install the driver", facts["driver"]["error"])
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        _native.load_kernels(0, APPEND.to_json())
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        warmup.local_archs()


def test_driver_declarations_match_cuda_h() -> None:
    folders = [Path(p) / "nvidia/cu13/include" for p in sys.path]
    folders += [Path(nvcc).resolve().parent.parent / "include" for nvcc in [shutil.which("nvcc")] if nvcc]
    folder = next((f for f in folders if (f / "cuda.h").exists()), None)
    compiler = shutil.which("g++") or shutil.which("c++")
    if folder is None or compiler is None:
        pytest.skip("needs cuda.h and a C++ compiler")
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        f"-I{ROOT / 'ffi'}",
        f"-I{folder}",
        str(ROOT / "tests/cuda/driver_abi.cc"),
    ]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that only counts."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None or not has_nvrtc():
        pytest.skip("needs a C++ compiler and NVRTC")
    folder = tmp_path_factory.mktemp("driver")
    source, library = ROOT / "tests/cuda/fake_driver.cc", folder / "libcuda.so.1"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return folder


def _with_fake_driver(
    folder: Path, code: str, tmp_path: Path, arch: str = "90"
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_ARCH": arch,
        "JAXINFER_CACHE": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, timeout=300, capture_output=True, text=True
    )


def test_kernels_are_loaded_once_per_device_from_many_threads(fake_driver: Path, tmp_path: Path) -> None:
    specs = join([APPEND, KernelSpec("append", "float32")])
    code = f"""
import ctypes, threading
import jaxinfer
from jaxinfer import _native
from jaxinfer.jit import info, warmup
errors = []
def load(device):
    try: _native.load_kernels(device, {specs!r})
    except RuntimeError as error: errors.append(error)
threads = [threading.Thread(target=load, args=(i % 2,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not errors, errors
print(ctypes.CDLL("libcuda.so.1").fake_loaded_modules(), warmup.local_archs(), info()["devices"])
"""
    done = _with_fake_driver(fake_driver, code, tmp_path)
    assert done.returncode == 0, done.stderr
    # An editable installation prints what it builds before.
    line = done.stdout.splitlines()[-1]
    assert line.startswith("4 ['sm_90a'] [{'name': 'Fake', 'compute_capability': '9.0'"), done.stdout
    assert len(list(tmp_path.glob("kernels/*.cubin"))) == 2


def test_loader_errors_reach_the_caller(fake_driver: Path, tmp_path: Path) -> None:
    code = f"""
import jaxinfer
from jaxinfer import _native
for device, spec in ((0, {APPEND.to_json()!r}), (0, "nonsense"), (7, {APPEND.to_json()!r})):
    try: _native.load_kernels(device, spec)
    except RuntimeError as error: print(error)
"""
    lines = _with_fake_driver(fake_driver, code, tmp_path, arch="75").stdout.splitlines()[-3:]
    assert "need compute capability 8.0" in lines[0]
    assert "not a kernel spec of this version" in lines[1]
    assert lines[2].startswith("cuDeviceGet failed: FAKE_ERROR")
