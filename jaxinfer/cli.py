"""The command line: parses arguments, runs a command, turns errors into one line and an exit status.

What the commands do lives elsewhere: models/ generates, bench/ measures. Results go to standard output, all
else to standard error. Exit status: 0 done, 1 the command failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from jaxinfer import __version__

_EXTRAS = {
    "gguf": "models",
    "jinja2": "models",
    "safetensors": "models",
    "tokenizers": "models",
    "matplotlib": "bench",
    "rich": "bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; `argv=None` takes the process's arguments."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is not None:
            return _fail(f"this needs the package {error.name}: pip install 'jaxinfer[{extra}]'")
        if "pip install 'jaxinfer[" in str(error):  # said by the code that needs it
            return _fail(str(error))
        raise
    except BrokenPipeError:
        # The reader has gone (`... | head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        if os.environ.get("JAXINFER_TRACEBACK"):
            raise
        return _fail(str(error))


def _fail(message: str, status: int = 1) -> int:
    print(f"jaxinfer: error: {message}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m jaxinfer",
        description="jaxinfer, the attention engine for serving language models from JAX.",
        epilog="Set JAXINFER_TRACEBACK=1 to see where an error came from.",
    )
    top.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    info = commands.add_parser(
        "info",
        help="versions, devices, FFI targets, CPU instruction set, cache folder",
        description="Versions, devices, FFI targets, the CPU instruction set in use and the cache folder.",
    )
    info.set_defaults(run=_info)
    _add_bench(commands)
    _add_warmup(commands)
    return top


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  python -m jaxinfer {line}" for line in lines)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a language model",
        description="Continues prompts with a Llama-like model; several prompts run in one batch.",
        epilog=_examples(
            'generate "The capital of France is"',
            'generate --chat "What is a page table?" --max-tokens 200',
            'generate "One" "Two" "Three" --temperature 0.8 --top-p 0.95 --seed 7',
            'generate --model ./Llama-3.2-1B --dtype bfloat16 "Hello"',
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue; quote it")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a .gguf file or a Hugging Face folder; default: SmolLM2-135M-Instruct, fetched once (93 MB)",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--max-tokens", type=_positive, default=64, metavar="N", help="tokens per prompt (default 64)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="draw from softmax(logits / T); default: always the most likely token",
    )
    parser.add_argument(
        "--top-k", type=_positive, metavar="K", help="draw from the K most likely tokens (with --temperature)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the most likely tokens of total probability P (with --temperature)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the first prompt's draws; each further prompt counts on by one (default 0)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights, activations and cache (default float32)",
    )
    parser.add_argument(
        "--implementation",
        choices=("reference",),
        help="'reference': attention in plain JAX instead of the compiled kernels (slow)",
    )
    parser.add_argument(
        "--max-batch",
        type=_positive,
        default=8,
        metavar="N",
        help="prompts that run at once; the others wait (default 8)",
    )
    parser.add_argument(
        "--page-size", type=_positive, default=16, metavar="N", help="tokens of a KV cache page (default 16)"
    )
    parser.set_defaults(run=_generate)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure planning, decode, prefill, a whole step and mixed batches",
        description="Measures jaxinfer on this machine.",
        epilog=_examples(
            "bench plan",
            "bench decode",
            "bench decode --batch 1 8 --kv 2048 --heads 32/8 --output decode.png",
            "bench prefill --rows B4x4096 --seconds 60 --json prefill.json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    plan = what.add_parser(
        "plan",
        help="time to build a step's layout and plan on the host",
        description="Times a step's host work: the layout, jaxinfer.plan, and the C++ planner alone.",
    )
    plan.add_argument(
        "--requests", type=_positive, nargs="+", metavar="N", help="batch sizes (default 128 2048)"
    )
    plan.add_argument(
        "--rounds", type=_positive, default=200, metavar="N", help="timed rounds per case (default 200)"
    )
    plan.set_defaults(run=_bench_plan)
    decode = what.add_parser(
        "decode",
        help="one decode step against other libraries",
        description="Times attention of one decode step over a paged KV cache (shuffled pages, random data), "
        "interleaved with the others; results are checked first. On CPU: --batch times --kv, against "
        "jax.nn.dot_product_attention on gathered pages. On a GPU: named rows, bfloat16, 32/8 heads of 128, "
        "against FlashInfer, flash-attn3-jax and Pallas where they are installed.",
    )
    cpu = decode.add_argument_group("on CPU")
    cpu.add_argument("--batch", type=_positive, nargs="+", metavar="B", help="requests (default 1 4 16)")
    cpu.add_argument(
        "--kv",
        type=_positive,
        nargs="+",
        metavar="N",
        help="cached KV tokens per request (default 64 1024 4096)",
    )
    cpu.add_argument("--heads", type=_heads, metavar="QO/KV", help="query and KV heads (default 9/3)")
    cpu.add_argument("--head-dim", type=_positive, metavar="D", help="head dimension (default 64)")
    cpu.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of q, K and V (default float32)"
    )
    cpu.add_argument("--rounds", type=_positive, metavar="N", help="timed rounds per case (default 100)")
    cpu.add_argument("--pin-one-core", action="store_true", help="run on one CPU core only")
    _add_row_options(decode)
    decode.set_defaults(run=_bench_decode)
    prefill = what.add_parser(
        "prefill",
        help="causal prefill against other libraries",
        description="Times causal prefill on named rows (contiguous and paged K and V, random data), interleaved "
        "with the others, where they are installed: FlashInfer, flash-attn3-jax, jax.nn and torch on cuDNN.",
    )
    _add_row_options(prefill)
    prefill.set_defaults(run=_bench_prefill)

    step = what.add_parser(
        "step",
        help="a whole decode step of a Llama of 8B shape",
        description="Times a decode step (projections, append, attention, MLP, sampling; random weights) with "
        "and without attention, against reading its weights and KV cache once. Needs a GPU with 80 GB.",
    )
    step.set_defaults(run=_bench_step)
    mixed = what.add_parser(
        "mixed",
        help="decode rows and prefill chunks in one call",
        description="Times attention of batches in which some requests decode and others prefill a chunk, against a "
        "call for each of the two (bfloat16, 32/8 heads of 128, pages of 16). Needs a GPU.",
    )
    mixed.set_defaults(run=_bench_mixed)


def _add_row_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-size",
        type=_positive,
        metavar="N",
        help="KV tokens of a page (default 16; contiguous rows stay)",
    )
    parser.add_argument("--output", metavar="PNG", help="also draw the results into this file")
    rows = parser.add_argument_group("named rows")
    rows.add_argument("--rows", nargs="+", metavar="ROW", help="rows to measure (default all)")
    rows.add_argument("--peers", nargs="*", metavar="NAME", help="libraries to compare with (default all)")
    rows.add_argument(
        "--seconds", type=_positive, metavar="S", help="time for the whole table, about (default 150)"
    )
    rows.add_argument("--json", metavar="PATH", help="also write all numbers into this file")


def _add_warmup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile a model's GPU kernels into the cache ahead of the first request",
        description="Compiles the attention kernels that serving a model can need. Otherwise they are "
        "compiled when first needed, a few seconds each. Needs NVRTC; a GPU only without --arch.",
        epilog=_examples(
            "warmup --heads 32/8 --head-dim 128", "warmup --heads 32/8 --window 4096 --arch sm_90a"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=_heads, required=True, metavar="QO/KV", help="query and KV heads")
    parser.add_argument(
        "--head-dim", type=_positive, default=128, metavar="D", help="head dimension (default 128)"
    )
    parser.add_argument(
        "--window",
        type=_positive,
        nargs="*",
        default=(),
        metavar="N",
        help="layers also attend to N tokens only",
    )
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--page-size", type=_positive, default=16, metavar="N", help="tokens of a KV cache page (default 16)"
    )
    parser.add_argument(
        "--arch",
        type=_arch,
        nargs="+",
        metavar="SM",
        help="architectures such as sm_90a (default: this machine's GPUs)",
    )
    parser.set_defaults(run=_warmup)


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _heads(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form QO/KV, such as 9/3")
    qo, kv = (_positive(part) for part in parts)
    if qo % kv:
        raise argparse.ArgumentTypeError(f"{qo} query heads are not a multiple of {kv} KV heads")
    return qo, kv


def _arch(text: str) -> str:
    from jaxinfer.jit.arch import arch_of

    if not re.fullmatch(r"sm_\d{2,3}[a-z]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as sm_80 or sm_90a")
    return arch_of(text.removeprefix("sm_"))


def _generate(args: argparse.Namespace) -> int:
    from jaxinfer.models.command import generate

    return generate(args)


def _info(args: argparse.Namespace) -> int:
    import jax

    from jaxinfer import _native
    from jaxinfer._cache_folder import cache_folder
    from jaxinfer.ffi import TARGETS
    from jaxinfer.jit import info as gpu_info

    rows = [("jaxinfer", __version__), ("Python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(name, metadata.version(name)) for name in ("jax", "jaxlib", "numpy")]
    rows.append(("devices", ", ".join(f"{d} ({d.device_kind})" for d in jax.devices())))
    rows += [(f"FFI targets, {name}", ", ".join(sorted(targets))) for name, targets in TARGETS.items()]
    rows += [("CPU instructions", _native.cpu_isa()), ("cache folder", str(cache_folder()))]
    gpu = gpu_info()
    rows.append(("NVIDIA driver", gpu["driver"].get("error") or f"CUDA {gpu['driver']['version']}"))
    rows += [("GPU", f"{d['name']}, compute capability {d['compute_capability']}") for d in gpu["devices"]]
    nvrtc = gpu["nvrtc"]
    rows.append(("NVRTC", "not found" if "error" in nvrtc else f"{nvrtc['version']} ({nvrtc['path']})"))
    kernels = gpu["cache"]
    readonly = "" if kernels["writable"] else " (cannot be written)"
    rows.append(("GPU kernels", f"{kernels['kernels']} compiled in {kernels['folder']}{readonly}"))
    for label, value in rows:
        print(f"{label + ':':<19}{value}")
    return 0


def _warmup(args: argparse.Namespace) -> int:
    from jaxinfer import Variant
    from jaxinfer.jit.warmup import AttentionHeads, model_kernels, warmup

    windows = dict.fromkeys((None, *(n - 1 for n in args.window)))  # N tokens reach back N - 1 positions
    variants = [Variant(causal=True, window_left=window) for window in windows]
    qo, kv = args.heads
    specs = model_kernels(AttentionHeads(qo, kv, args.head_dim), variants, args.dtype, args.page_size)
    warmup(specs, args.arch)
    return 0


def _bench_plan(args: argparse.Namespace) -> int:
    from jaxinfer.bench.plan import bench_plan

    bench_plan(requests=args.requests, rounds=args.rounds)
    return 0


def _bench_decode(args: argparse.Namespace) -> int:
    if args.pin_one_core:
        # XLA sizes its thread pool by the affinity when the backend starts, which is later than this.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    on_cpu = {
        name: getattr(args, name)
        for name in ("batch", "kv", "heads", "head_dim", "dtype", "rounds")
        if getattr(args, name) is not None
    }
    if _platform() != "cpu":
        if on_cpu:
            option = next(iter(on_cpu)).replace("_", "-")
            raise ValueError(f"--{option} is for the CPU (JAX_PLATFORMS=cpu); on a GPU choose --rows")
        return _bench_rows("decode", args)
    for name in ("rows", "peers", "seconds", "json"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}: decode has named rows on a GPU only; on CPU choose --batch and --kv")
    from jaxinfer.bench.decode import bench_decode
    from jaxinfer.bench.workloads import DECODE_BATCHES, DECODE_KV_LENS, DecodeShape

    given = {name: getattr(args, name) for name in ("head_dim", "page_size", "dtype")}
    given |= dict(zip(("num_qo_heads", "num_kv_heads"), args.heads or (), strict=False))
    given = {name: value for name, value in given.items() if value is not None}
    shapes = [
        DecodeShape(batch, kv_len, **given)
        for batch in args.batch or DECODE_BATCHES
        for kv_len in args.kv or DECODE_KV_LENS
    ]
    bench_decode(shapes, rounds=args.rounds or 100, output=args.output)
    return 0


def _bench_prefill(args: argparse.Namespace) -> int:
    return _bench_rows("prefill", args)


def _bench_step(args: argparse.Namespace) -> int:
    from jaxinfer.bench.step import bench_step

    if _platform() == "cpu":
        raise ValueError("bench step: the model is too large for a CPU; it needs a GPU")
    bench_step()
    return 0


def _bench_mixed(args: argparse.Namespace) -> int:
    from jaxinfer.bench.mixed import bench_mixed

    if _platform() == "cpu":
        raise ValueError("bench mixed: the batches are too large for a CPU; they need a GPU")
    bench_mixed()
    return 0


def _bench_rows(kind: str, args: argparse.Namespace) -> int:
    from jaxinfer.bench.cases import select
    from jaxinfer.bench.versus import bench_versus

    cases = select(kind, _platform(), args.rows, args.page_size)
    bench_versus(
        cases, seconds=args.seconds or 150, output=args.output, json_path=args.json, rivals=args.peers
    )
    return 0


def _platform() -> str:
    # Other libraries need memory on the same GPU. Read when the backend starts, which is now.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax.default_backend()
