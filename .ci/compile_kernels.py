"""Compiles what csrc/kernels/instances lists and reports registers.

Needs NVRTC, no GPU and no build: headers are read from csrc/. Fails on an error, on a spill or a use of local
memory, where fewer CTAs than the tile table counts on fit into the register file, and where ptxas says that it
serialised tensor core instructions or the machine code lacks some.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REGISTER_FILE = 65536  # registers of a multiprocessor
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
NATIVE = "jaxinfer._native"
# A user's text that reads of everything that it may read: holes for scores and results, and holes for Q, K and V.
SCORE_HOLES = """
__device__ float logits(float s, const Row& row, const Col& col) const {
  return s + params.slopes[row.qo_head] * (col.kv_pos - row.q_pos) + params.bias[row.token] * params.strength;
}
__device__ bool mask(const Row& row, const Col& col) const {
  return (row.request ^ row.kv_head ^ col.kv_index) % params.keep != 1;
}
template <int kCount> __device__ void output(float (&x)[kCount], int dim, const Row& row) const {
  for (int i = 0; i < kCount; ++i) x[i] = fmaxf(x[i], params.scales[row.qo_head]);
}
"""
INPUT_HOLES = """
template <int kCount> __device__ void query(float (&x)[kCount], int dim, const Row& row) const {
  for (int i = 0; i < kCount; ++i) x[i] *= params.scales[dim + i];
}
template <int kCount> __device__ void key(float (&x)[kCount], int dim, const Row& row, const Col& col) const {
  for (int i = 0; i < kCount; ++i) x[i] *= params.scales[col.kv_pos];
}
template <int kCount> __device__ void value(float (&x)[kCount], int dim, const Row& row, const Col& col) const {
  for (int i = 0; i < kCount; ++i) x[i] += params.scales[row.kv_head];
}
"""


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


RULES = jit("spec").RULES


def expand(line: str) -> list[tuple[str, str]]:
    """(spec, architecture) of one line of the list: `kernel key=a,b key=c ...`, every combination of the values.

    Keys are those of KernelSpec, with head_dim for both head dims (`192x128` for a pair) and rules by the
    names of `jaxinfer.jit.spec.RULES` joined by "+", holes=1 for all holes of a user's text or holes=scores for
    those that leave Q, K and V alone, and arch for the architectures.
    """
    words = line.partition("#")[0].split()
    if not words:
        return []
    choices = [
        [(word.partition("=")[0], value) for value in word.partition("=")[2].split(",")] for word in words[1:]
    ]
    if "arch" not in (choice[0][0] for choice in choices):
        choices.append([("arch", arch) for arch in ARCHS])
    jobs = []
    for combination in itertools.product(*choices):
        arch = ""
        fields: dict[str, Any] = {"kernel": words[0]}
        for key, value in combination:
            if key == "head_dim":
                dims = value.split("x")
                fields |= {"head_dim_qk": int(dims[0]), "head_dim_vo": int(dims[-1])}
                if words[0] == "merge":
                    fields["head_dim_qk"] = 0
            elif key == "rules":
                fields[key] = sum(RULES[rule] for rule in value.split("+") if rule != "0")
            elif key == "holes":
                pointers = tuple((name, "float") for name in ("slopes", "bias", "scales"))
                scalars = (("strength", "float"), ("keep", "int"))
                text = {"1": SCORE_HOLES + INPUT_HOLES, "scores": SCORE_HOLES}[value]
                fields["functor"] = jit("spec").FunctorSource(text, pointers, scalars)
            elif key == "arch":
                arch = value
            elif key == "dtype":
                fields[key] = value
            else:
                fields[key] = bool(int(value)) if key in ("packed", "contiguous") else int(value)
        jobs.append((jit("spec").KernelSpec(**fields).to_json(), arch))
    return jobs


def count_wgmma(cubin: bytes) -> int | None:
    """Warpgroup products in the machine code; None where there is no nvdisasm (the wheel nvidia-cuda-nvdisasm)."""
    wheels = [Path(folder) / "nvidia/cu13/bin/nvdisasm" for folder in sys.path]
    tool = next((str(path) for path in wheels if path.exists()), shutil.which("nvdisasm"))
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout
    return len(re.findall(r"\bHGMMA\.", text))


def compile_one(job: tuple[str, str]) -> tuple[str, str, str]:
    """(status, figures, detail) of one spec on one architecture."""
    text, arch = job
    spec = jit("spec").KernelSpec.from_json(text)
    begin = time.process_time()
    try:
        rendered, cubin, log = jit("registry").compile_spec(spec, arch)
    except NotImplementedError as error:
        return "none", "", str(error)
    except Exception as error:
        return "error", "", str(error)
    seconds = time.process_time() - begin
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    local = sum(int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads|lmem)", log))
    complaint = ""
    if local:
        complaint = f"{local} bytes of stack, spills or local memory"
    # Registers are dealt to warps in units of 256.
    warps = rendered.num_threads // 32 * int(re.findall(r"kMinCtas = (\d+);", rendered.text)[0])
    if not registers or (registers * 32 + 255) // 256 * 256 * warps > REGISTER_FILE:
        complaint = f"{registers} registers per thread do not fit {warps} warps"
    if "serializ" in log.lower() or re.search(r"C75\d\d", log):
        complaint = "tensor core instructions are serialised"
    if rendered.entry == "jaxinfer_attention_wgmma" and (found := count_wgmma(cubin)) is not None:
        block = int(re.findall(r"kBlockKV = (\d+);", rendered.text)[0])
        # Both products stand in the code twice: in the loop, and before or after it. Two consumers have that of P and
        # V for each part of a first block, too.
        values = range(block, 0, -32) if spec.tile == 128 and block % 32 == 0 else [block]
        expected = 2 * (spec.head_dim_qk + sum(values)) // 16
        if found != expected:
            complaint = f"{found} warpgroup products in the code, expected {expected}"
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
    listed = [job for line in args.instances.read_text().splitlines() for job in expand(line)]
    jobs = [
        (spec, arch)
        for spec, arch in dict.fromkeys(listed)
        if arch in args.arch and args.match in str(jit("spec").KernelSpec.from_json(spec))
    ]
    if args.list:
        print("\n".join(f"{arch} {spec}" for spec, arch in jobs))
        return 0
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
