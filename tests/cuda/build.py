"""Builds the kernels' test programs, and a cubin for every kernel that their cases and benchmarks need.

    python3 tests/cuda/build.py FOLDER [ARCH [PROGRAM...]]

How the programs are called is written in the first lines of test_kernels.cc and test_prefill.cc.
Kernel texts are rendered by jaxinfer.jit, which is loaded without the rest of the package: no JAX is needed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


PROGRAMS = {
    "test_kernels": ["tests/cuda/test_kernels.cc", "tests/cuda/bench.cc", "tests/cuda/bench_decode.cc"],
    "test_prefill": [
        "tests/cuda/test_prefill.cc",
        "tests/cuda/prefill_bench.cc",
        "tests/cuda/bench.cc",
        "ffi/driver.cc",
        "ffi/tensor_maps.cc",
    ],
}


def build_program(name: str, folder: Path, jobs: ThreadPoolExecutor) -> Path:
    """The planner, the CPU executor and a test, linked with the static CUDA runtime."""
    host = ["-ccbin", "gcc-12"] if os.path.exists("/usr/bin/gcc-12") else []
    lines = (ROOT / "csrc/cpu/isa_flags").read_text().splitlines()
    flags = dict(line.split(maxsplit=1) for line in lines if line.startswith("isa_"))
    sources = [
        *(ROOT / "csrc/plan").glob("*.cc"),
        *(ROOT / "csrc/cpu").glob("*.cc"),
        *(ROOT / source for source in PROGRAMS[name]),
    ]

    def compile_one(source: Path) -> str:
        out = folder / f"{source.parent.name}_{source.stem}.o"
        newest = max(
            f.stat().st_mtime for f in [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("tests/cuda/*.h"), source]
        )
        if out.exists() and out.stat().st_mtime > newest:
            return str(out)
        extra = "".join(f",{flag}" for flag in flags.get(source.name, "").split())
        command = [
            "nvcc",
            "-std=c++17",
            "-O2",
            *host,
            f"-Xcompiler=-Wall{extra}",
            f"-I{ROOT}/csrc",
            f"-I{ROOT}/ffi",
        ]
        run(*command, "-c", str(source), "-o", str(out))
        return str(out)

    objects = list(jobs.map(compile_one, sources))
    program = folder / name
    run("nvcc", *host, "-cudart", "static", *objects, "-lstdc++", "-lm", "-ldl", "-o", str(program))
    return program


def build_kernel(folder: Path, line: str, arch: str, headers: bytes) -> str:
    """Compiles one spec, unless its text and the headers are those of a cubin that is there; returns its line of the
    manifest and reports registers and spills."""
    spec = import_module("jit.spec").KernelSpec.from_json(line)
    rendered = import_module("jit.render").render(spec, arch)
    key = hashlib.sha256(rendered.text.encode() + headers + arch.encode()).hexdigest()[:16]
    source, cubin = folder / f"{key}.cu", f"{key}.cubin"
    launch = (rendered.num_threads, rendered.smem_bytes, int(rendered.tensor_maps), rendered.kv_box_rows)
    entry = "\t".join([line, cubin, rendered.entry, *map(str, launch)])
    if (folder / cubin).exists():
        return entry
    source.write_text(rendered.text)
    host = ["-ccbin", "gcc-12"] if os.path.exists("/usr/bin/gcc-12") else []
    log = run(
        "nvcc",
        "-std=c++17",
        f"-arch={arch}",
        "-cubin",
        *host,
        f"-I{ROOT}/csrc",
        "--expt-relaxed-constexpr",  # as NVRTC compiles: host code is device code, too
        "-lineinfo",
        "-Xptxas=-v",
        "-diag-suppress=20012",
        "-o",
        str(folder / cubin),
        str(source),
    )
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    print(
        f"{spec}: {registers.group(1) if registers else '?'} registers, {rendered.smem_bytes} bytes of shared memory"
        + (f", SPILLS {spills.group(1)} bytes" if spills and spills.group(1) != "0" else ""),
        flush=True,
    )
    return entry


def main() -> None:
    folder = Path(sys.argv[1])
    arch = sys.argv[2] if len(sys.argv) > 2 else "sm_90a"
    # The prefill test is for Hopper alone.
    names = sys.argv[3:] or [name for name in PROGRAMS if arch == "sm_90a" or name != "test_prefill"]
    folder.mkdir(parents=True, exist_ok=True)
    package = types.ModuleType("jit")
    package.__path__ = [str(ROOT / "jaxinfer/jit")]
    sys.modules["jit"] = package
    with ThreadPoolExecutor(os.cpu_count()) as jobs:
        programs = [build_program(name, folder, jobs) for name in names]
        specs = [line for program in programs for line in run(str(program), "--list").split("\n")]
        specs = list(dict.fromkeys(line for line in specs if line))
        headers = b"".join(f.read_bytes() for f in sorted(ROOT.glob("csrc/**/*.*h")))
        lines = list(jobs.map(lambda line: build_kernel(folder, line, arch, headers), specs))
    (folder / "manifest.tsv").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} kernels in {folder}")


if __name__ == "__main__":
    main()
