"""The disk cache of compiled kernels: hits, damage, compilers that come and go, races, folders that fail.

The compiler is a stand-in, so nothing here needs NVRTC. With a GPU test_gpu_kernel_cache.py does the same for real.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxinfer.cli import main
from jaxinfer.jit import cache, nvrtc, registry
from jaxinfer.jit.spec import KernelSpec
from jaxinfer.jit.warmup import warmup

APPEND = KernelSpec("append", "bfloat16")


def use_nvrtc(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None, archs: tuple[int, ...] = (80, 90, 120)
) -> None:
    """Installs an NVRTC of this version, or removes it, as a new process would find it."""
    found = "no NVRTC here" if version is None else nvrtc.Nvrtc(None, "/nvrtc", version, archs)
    monkeypatch.setattr(nvrtc, "find", lambda: found)
    monkeypatch.setattr(registry, "_entries", {})


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache and a loader that remembers nothing."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    use_nvrtc(monkeypatch, (13, 0))
    return tmp_path / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled; every compilation gives another cubin."""
    names: list[str] = []

    def compile_cubin(name: str, *args: object) -> tuple[bytes, str]:
        names.append(name)
        return f"cubin {name} of NVRTC {nvrtc.nvrtc().version}".encode(), ""

    monkeypatch.setattr(registry, "compile_cubin", compile_cubin)
    return names


def test_compiled_once_then_found(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.load(APPEND.to_json(), "sm_90a")
    assert registry.load(APPEND.to_json(), "sm_90a") is first
    monkeypatch.setattr(registry, "_entries", {})  # as a new process would
    assert registry.load(APPEND.to_json(), "sm_90a") == first
    assert len(compilations) == 1 and len(list(fresh.glob("*.cubin"))) == 1
    registry.load(APPEND.to_json(), "sm_80")  # another architecture is another kernel
    assert len(compilations) == 2 and cache.count() == 2


def test_a_missing_folder_is_made(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh / "not" / "there"
    monkeypatch.setenv("JAXINFER_CACHE", str(folder))
    registry.load(APPEND.to_json(), "sm_90a")
    assert len(list((folder / "kernels").glob("*.cubin"))) == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_damaged_entry_is_rebuilt(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    first = registry.load(APPEND.to_json(), "sm_90a")
    (path,) = fresh.glob("*.cubin")
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-3],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "foreign": b"\x7fELF" + data,
        }[damage]
    )
    monkeypatch.setattr(registry, "_entries", {})
    assert registry.load(APPEND.to_json(), "sm_90a") == first
    assert len(compilations) == 2
    assert path.read_bytes() == data


def test_folder_that_cannot_be_written_costs_time_only(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.parent.mkdir(exist_ok=True)
    fresh.write_text("a file where the folder should be")
    cubin, entry, *_ = registry.load(APPEND.to_json(), "sm_90a")
    assert cubin and entry == "jaxinfer_append" and len(compilations) == 1
    assert cache.count() == 0


def test_a_slow_compilation_is_announced(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announced = threading.Event()

    def announce(line: str) -> None:
        print(line, file=sys.stderr)
        announced.set()

    def slow(*args: object) -> tuple[bytes, str]:
        assert announced.wait(timeout=60)
        return b"cubin", ""

    monkeypatch.setattr(registry, "_announce", announce)
    monkeypatch.setattr(registry, "_ANNOUNCE_AFTER", 0.01)
    monkeypatch.setattr(registry, "compile_cubin", slow)
    registry.load(APPEND.to_json(), "sm_90a")
    assert capsys.readouterr().err == "jaxinfer: compiling append bfloat16 for sm_90a ...\n"
    monkeypatch.setattr(registry, "_entries", {})
    registry.load(APPEND.to_json(), "sm_90a")  # from the disk, without a word
    assert capsys.readouterr().err == ""


def test_the_warmup_command_fills_the_cache(
    fresh: Path, compilations: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["warmup", "--heads", "8/2", "--head-dim", "128", "--arch", "sm_80", "sm_90a"]
    assert main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    count = len(compilations)
    assert count == cache.count() > 8 and len(lines) == count + 1
    assert lines[0].startswith(f"[1/{count}] append bfloat16 sm_80: ")
    assert lines[-1] == f"{count} kernels ready in {fresh}"
    assert main(argv) == 0 and len(compilations) == count


def test_warmup_compiles_an_iterators_specs_for_every_architecture(
    fresh: Path, compilations: list[str]
) -> None:
    assert warmup(iter([APPEND.to_json()]), ["sm_80", "sm_90a"], progress=lambda line: None) == 2
    assert len(compilations) == 2


def test_the_warmup_command_takes_the_architectures_that_gpus_load(
    fresh: Path, compilations: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU of capability 9.0 loads what is compiled for sm_90a."""
    assert main(["warmup", "--heads", "8/2", "--arch", "sm_90"]) == 0
    assert " sm_90a: " in capsys.readouterr().err.splitlines()[0]
    for wrong in ("hopper", "90", "sm_9x"):
        with pytest.raises(SystemExit):
            main(["warmup", "--heads", "8/2", "--arch", wrong])
        assert f"{wrong!r} is not an architecture such as sm_80 or sm_90a" in capsys.readouterr().err


def test_the_warmup_command_takes_the_page_size(fresh: Path, compilations: list[str]) -> None:
    """Hopper's kernels differ by what a page's rows are a multiple of; the others are there already."""
    counts = []
    for page_size in ("32", "16", "8", "1"):
        assert main(["warmup", "--heads", "8/2", "--arch", "sm_90a", "--page-size", page_size]) == 0
        counts.append(len(compilations))
    assert counts[0] == counts[1] < counts[2] < counts[3]


def test_threads_compile_a_kernel_once(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[registry.Loaded] = []
    threads = [
        threading.Thread(target=lambda: results.append(registry.load(APPEND.to_json(), "sm_90a")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1 and len({id(r) for r in results}) == 1


def test_processes_share_a_folder(fresh: Path) -> None:
    code = (
        "import sys; from jaxinfer.jit import cache\n"
        "for i in range(200):\n"
        "    cache.put('k', b'x' * 100_000); assert cache.get('k') == b'x' * 100_000\n"
    )
    processes = [subprocess.Popen([sys.executable, "-P", "-c", code]) for _ in range(2)]
    assert [p.wait(timeout=120) for p in processes] == [0, 0]
    assert [p.name for p in fresh.iterdir()] == ["k.cubin"]  # no temporary file is left


def test_hash_depends_on_every_part_and_boundary() -> None:
    keys = [cache.key(p) for p in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["abd"])]
    assert len(set(keys)) == len(keys)


# --- compilers that come and go


def test_a_warm_cache_serves_without_nvrtc(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.load(APPEND.to_json(), "sm_90a")
    use_nvrtc(monkeypatch, None)
    assert registry.load(APPEND.to_json(), "sm_90a") == first
    assert len(compilations) == 1
    with pytest.raises(nvrtc.NvrtcNotFoundError, match="no NVRTC here"):
        registry.load(KernelSpec("append", "float32").to_json(), "sm_90a")


def test_another_nvrtc_compiles_anew_and_the_newest_serves_without_one(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins = {}
    for version in ((13, 5), (13, 10), (12, 9), (13, 5)):
        use_nvrtc(monkeypatch, version)
        cubins[version] = registry.load(APPEND.to_json(), "sm_90a")[0]
    assert len(compilations) == cache.count() == 3  # the fourth was found
    use_nvrtc(monkeypatch, None)
    assert registry.load(APPEND.to_json(), "sm_90a")[0] == cubins[13, 10]
    (path,) = fresh.glob("*.13.10.cubin")
    path.write_bytes(path.read_bytes()[:-3])
    use_nvrtc(monkeypatch, None)
    assert registry.load(APPEND.to_json(), "sm_90a")[0] == cubins[13, 5]


def test_an_nvrtc_too_old_for_the_gpu_serves_what_another_compiled(
    fresh: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.load(APPEND.to_json(), "sm_121")  # this NVRTC knows sm_120, whose cubins run there
    for version, archs in ((None, ()), ((12, 0), (80, 90))):
        use_nvrtc(monkeypatch, version, archs)
        assert registry.load(APPEND.to_json(), "sm_121") == first
    assert len(compilations) == 1
    with pytest.raises(nvrtc.NvrtcNotFoundError, match=r"NVRTC 12\.0 .* cannot compile for sm_103"):
        registry.load(APPEND.to_json(), "sm_103")
