"""Compiles what csrc/kernels/instances lists, for every supported architecture, and reports registers.

Needs NVRTC, no GPU and no build: headers are read from csrc/. Fails on an error, on a spill, and where ptxas
says that it serialised tensor core instructions.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RULES = {"causal": 1, "window_left": 2, "window_right": 4, "logits_soft_cap": 8, "mask": 16, "softmax": 32}
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
NATIVE = "jaxinfer._native"


def read_headers() -> dict[str, str]:
    paths = [
        ROOT / "csrc/params.h",
        ROOT / "csrc/plan/format.h",
        *sorted((ROOT / "csrc/kernels").glob("*.cuh")),
    ]
    return {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in paths}


def jit(name: str) -> types.ModuleType:
    """A module of jaxinfer.jit from the source tree; the compiled library is stood in for by the folder's
    headers.
    """
    if NATIVE not in sys.modules:
        package = types.ModuleType("jaxinfer")
        package.__path__ = [str(ROOT / "jaxinfer")]
        folder = types.ModuleType("jaxinfer.jit")
        folder.__path__ = [str(ROOT / "jaxinfer/jit")]
        native = types.ModuleType(NATIVE)
        native.kernel_sources = read_headers  # type: ignore[attr-defined]
        package._native = native  # type: ignore[attr-defined]
        sys.modules |= {"jaxinfer": package, "jaxinfer.jit": folder, NATIVE: native}
    return importlib.import_module(f"jaxinfer.jit.{name}")


def expand(line: str) -> list[str]:
    """The specs of one line of the list: `kernel key=a,b key=c ...`, every combination of the values.

    Keys are those of KernelSpec, with head_dim for both head dims (`192x128` for a pair) and rules by the
    names of `jaxinfer.ffi.RULES` joined by "+".
    """
    words = line.partition("#")[0].split()
    if not words:
        return []
    choices = [
        [(word.partition("=")[0], value) for value in word.partition("=")[2].split(",")] for word in words[1:]
    ]
    specs = []
    for combination in itertools.product(*choices):
        fields: dict[str, Any] = {"kernel": words[0]}
        for key, value in combination:
            if key == "head_dim":
                dims = value.split("x")
                fields |= {"head_dim_qk": int(dims[0]), "head_dim_vo": int(dims[-1])}
            elif key == "rules":
                fields[key] = sum(RULES[rule] for rule in value.split("+"))
            elif key == "dtype":
                fields[key] = value
            else:
                fields[key] = bool(int(value)) if key in ("packed", "contiguous") else int(value)
        specs.append(jit("spec").KernelSpec(**fields).to_json())
    return specs


def compile_one(job: tuple[str, str]) -> tuple[str, str, str]:
    """(status, figures, detail) of one spec on one architecture."""
    text, arch = job
    spec = jit("spec").KernelSpec.from_json(text)
    begin = time.perf_counter()
    try:
        rendered, cubin, log = jit("registry").compile_spec(spec, arch)
    except NotImplementedError as error:
        return "none", "", str(error)
    except Exception as error:
        return "error", "", str(error)
    seconds = time.perf_counter() - begin
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    complaint = ""
    if spills:
        complaint = f"{spills} bytes spilled"
    if "serializ" in log.lower() or re.search(r"C75\d\d", log):
        complaint = "tensor core instructions are serialised"
    figures = f"{registers:4d} reg {rendered.num_threads:4d} thr {rendered.smem_bytes:7d} smem"
    figures += f" {len(cubin):7d} B {seconds:5.2f} s"
    return ("bad" if complaint else "ok"), figures, complaint and f"{complaint}\n{log}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the specs and stop")
    parser.add_argument("--arch", nargs="*", default=list(ARCHS))
    parser.add_argument("--instances", type=Path, default=ROOT / "csrc/kernels/instances")
    parser.add_argument("--match", default="", help="only specs whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    specs = [spec for line in args.instances.read_text().splitlines() for spec in expand(line)]
    specs = [
        spec for spec in dict.fromkeys(specs) if args.match in str(jit("spec").KernelSpec.from_json(spec))
    ]
    if args.list:
        print("\n".join(specs))
        return 0
    jobs = [(spec, arch) for spec in specs for arch in args.arch]
    begin, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for (text, arch), (status, figures, detail) in zip(jobs, pool.map(compile_one, jobs), strict=True):
            name = str(jit("spec").KernelSpec.from_json(text))
            print(f"{status:5} {arch:7} {name:60} {figures}", flush=True)
            if status in ("bad", "error"):
                failed += 1
                print(detail, flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - begin:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
