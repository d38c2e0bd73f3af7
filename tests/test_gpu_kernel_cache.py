"""The disk cache and the compiler as a GPU program meets them: damage, races, no writable folder, no NVRTC.

Without a GPU the same is tested in test_jit_cache.py, with a stand-in for the compiler; here the kernels really run.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu_cases import run_python, start_python

from jaxinfer import Variant
from jaxinfer.jit import registry, warmup
from jaxinfer.jit.spec import KernelSpec

pytestmark = pytest.mark.gpu

#: Prints a digest of results that need three kernels, and what each call raised.
CODE = """
import hashlib, jax, numpy as np
import gpu_cases
case = gpu_cases.long_case([2000, 17], [1, 1], "bfloat16")
o, lse = gpu_cases.run(case)
gpu_cases.expect_close(case, o, lse)
slots = np.array([1, 5], np.int32)
import jaxinfer
k, v = jax.jit(jaxinfer.append_kv)(case.k, case.v, case.k[0, :2], case.v[0, :2], slots)
assert np.asarray(k)[0, 5].tobytes() == case.k[0, 1].tobytes()
print(hashlib.sha256(o.tobytes() + lse.tobytes()).hexdigest())
"""


def digest(**environment: str) -> str:
    return run_python(CODE, **environment)[0].split()[-1]


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    processes = [start_python(CODE, JAXINFER_CACHE=str(tmp_path)) for _ in range(2)]
    ends = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert len({out.split()[-1] for out, _ in ends}) == 1
    names = [path.name for path in (tmp_path / "kernels").iterdir()]
    assert len(names) >= 3 and all(name.endswith(".cubin") for name in names)  # no temporary file is left


def test_truncated_entries_are_compiled_again(tmp_path: Path) -> None:
    first = digest(JAXINFER_CACHE=str(tmp_path))
    whole = {path: path.read_bytes() for path in (tmp_path / "kernels").glob("*.cubin")}
    for number, (path, data) in enumerate(whole.items()):
        path.write_bytes(data[: (len(data) // 2, 0, len(data) - 1)[number % 3]])
    assert digest(JAXINFER_CACHE=str(tmp_path)) == first
    for path, data in whole.items():
        assert len(path.read_bytes()) == len(data)


@pytest.mark.parametrize("kind", ["read-only", "impossible"])
def test_a_folder_that_cannot_be_written_costs_time_only(kind: str, tmp_path: Path) -> None:
    folder = tmp_path if kind == "read-only" else Path("/proc/jaxinfer")  # root may write to the first
    tmp_path.chmod(0o555)
    try:
        assert len(digest(JAXINFER_CACHE=str(folder))) == 64
    finally:
        tmp_path.chmod(0o755)


def test_without_nvrtc_the_message_says_what_to_install(tmp_path: Path) -> None:
    code = """
import jax, numpy as np
import gpu_cases
case = gpu_cases.long_case([20], [1], "bfloat16")
try:
    gpu_cases.run(case)
except jax.errors.JaxRuntimeError as error:
    print(error)
o, lse = gpu_cases.run(case, implementation="reference")  # the process goes on
gpu_cases.expect_close(case, o, lse)
"""
    out, _ = run_python(code, JAXINFER_CACHE=str(tmp_path), JAXINFER_NVRTC="/nowhere/libnvrtc.so")
    assert "no NVRTC library could be loaded" in out
    assert 'pip install "jax[cuda13]"' in out and "/nowhere/libnvrtc.so" in out


def test_a_warm_cache_serves_without_nvrtc(tmp_path: Path) -> None:
    first = digest(JAXINFER_CACHE=str(tmp_path))
    assert digest(JAXINFER_CACHE=str(tmp_path), JAXINFER_NVRTC="/nowhere/libnvrtc.so") == first


def test_times_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds to compile each kernel of a model and to read it back, printed; nothing is asserted of them."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")  # NVRTC has a cache of its own
    (arch, *_) = warmup.local_archs()
    heads = warmup.AttentionHeads(32, 8, 128)
    rules = [Variant(causal=True), Variant(causal=True, window_left=64, logits_soft_cap=30.0)]
    specs = [s for dtype in ("bfloat16", "float32") for s in warmup.model_kernels(heads, rules, dtype)]
    seconds: dict[str, list[float]] = {spec: [] for spec in specs}
    loaded = []
    for _ in ("compiled", "from the disk"):
        monkeypatch.setattr(registry, "_entries", {})
        for spec in specs:
            begin = time.perf_counter()
            loaded.append(registry.load(spec, arch))
            seconds[spec].append(time.perf_counter() - begin)
    assert loaded[: len(specs)] == loaded[len(specs) :]
    with capsys.disabled():
        print(f"\n{'kernel':56s} {'compiled':>10s} {'from disk':>10s} {'cubin':>9s}")
        for spec, entry in zip(specs, loaded, strict=False):
            compiled, read = seconds[spec]
            print(
                f"{KernelSpec.from_json(spec)!s:56s} {compiled:8.2f} s {read * 1e3:7.2f} ms {len(entry[0]):9d}"
            )
        total, again = (sum(s[i] for s in seconds.values()) for i in range(2))
        print(f"{'all':56s} {total:8.2f} s {again * 1e3:7.2f} ms")
