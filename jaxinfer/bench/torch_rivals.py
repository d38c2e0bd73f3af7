"""Rivals that live in torch: FlashInfer and cuDNN's scaled dot-product attention. They read JAX's arrays in place.

torch and flashinfer are imported where they are used: they need not be installed.
`python -m jaxinfer.bench.torch_rivals [decode] [prefill]` compiles the FlashInfer kernels of tables beforehand.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.burst import Burst
from jaxinfer.bench.cases import Case, Operands, make_operands, select

Variants = dict[str, Callable[[], Burst]]
#: Bytes of scratch that a FlashInfer wrapper gets; skewed batches overflow its documented 128 MB.
WORKSPACE_BYTES = 512 << 20


def _backends(case: Case) -> tuple[str, ...]:
    """What to choose from. A set of kernels compiles for 10 to 100 seconds, so fa2 prefill, 0.6 of fa3's speed where
    measured, takes part at head_dim 128 alone.
    """
    if case.kind == "decode":
        return ("fa2", "cuda-core", "persistent")
    return ("fa3", "fa2") if case.head_dims == (128, 128) else ("fa3",)


class GraphBurst(Burst):
    """Calls recorded once in a CUDA graph and replayed, so that launches cost the host nothing.

    Args:
      calls: one per set of operands, each returning a tensor [tokens, num_qo_heads, head_dim]. The graph reads what
        they hold (operands, page tables, workspaces) by address, so they are kept as long as the graph.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        import torch

        self.slots = len(calls)
        self._calls = calls  # else torch gives the memory that the graph reads to the next who asks
        self._torch = torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # lazy initialisation must not happen while recording
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outs = [call() for call in calls]

    def prepare(self, loops: int) -> Callable[[], Any]:
        def run() -> None:
            for _ in range(loops):
                self._graph.replay()
            self._torch.cuda.synchronize()

        run()
        return run

    def output(self) -> jax.Array:
        return self._as_array(self._outs[0])

    def _as_array(self, tensor: Any) -> jax.Array:
        tensor = tensor.contiguous()
        self._torch.cuda.synchronize()  # JAX reads on another stream
        return jnp.from_dlpack(tensor)


def _tensors(ops: Operands) -> list[tuple[Any, Any, Any]]:
    """The operands as tensors that share JAX's memory."""
    import torch

    jax.block_until_ready(ops.sets)
    q, k, v = zip(*[map(torch.from_dlpack, operands) for operands in ops.sets], strict=True)
    return list(zip(q, k, v, strict=True))


def flashinfer(ops: Operands) -> Variants:
    """FlashInfer's wrappers over the same pages (contiguous cases: its ragged wrapper), one variant per backend."""
    return {name: partial(_flashinfer_burst, ops, name) for name in _backends(ops.case)}


def _flashinfer_burst(ops: Operands, backend: str) -> Burst:
    import flashinfer as library
    import torch

    case = ops.case
    dtype = getattr(torch, case.dtype)

    def to_gpu(x: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).cuda()

    qo, kv, indices = (to_gpu(x) for x in (ops.qo_indptr, ops.kv_indptr, ops.kv_indices))
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    sets = _tensors(ops)
    if backend == "persistent":  # the only one that brings its workspace
        wrapper: Any = library.BatchAttention(kv_layout="NHD")
        wrapper.plan(
            qo,
            kv,
            indices,
            to_gpu(case.kv_len),
            *heads,
            case.head_dim,
            case.page_size,
            causal=True,
            **dtypes,
        )
        return GraphBurst([lambda s=s: wrapper.run(s[0], s[1:])[0] for s in sets])  # type: ignore[misc]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    if case.page_size is None:
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        ragged.plan(qo, kv, *heads, head_dim_vo=case.head_dims[1], causal=case.causal, **dtypes)
        return GraphBurst([partial(ragged.run, *s) for s in sets])
    last_page = to_gpu((np.array(case.kv_len) - 1) % case.page_size + 1)
    if case.kind == "decode":
        tensor_cores = backend == "fa2"
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto",
        )
        wrapper.plan(kv, indices, last_page, *heads, case.page_size, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(qo, kv, indices, last_page, *heads, case.page_size, causal=case.causal, **dtypes)
    return GraphBurst([partial(wrapper.run, s[0], s[1:]) for s in sets])


def cudnn_sdpa(ops: Operands) -> Variants:
    """torch's scaled_dot_product_attention on cuDNN, operands copied to [batch, heads, tokens, head_dim]."""

    def burst() -> Burst:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        case = ops.case

        def by_head(x: Any) -> Any:
            return x.reshape(case.batch, -1, *x.shape[-2:]).transpose(1, 2).contiguous()

        sets = [tuple(by_head(x) for x in tensors) for tensors in _tensors(ops)]

        def call(operands: Any) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                o = scaled_dot_product_attention(
                    *operands, is_causal=case.causal, enable_gqa=case.num_qo_heads != case.num_kv_heads
                )
            return o

        class ByHead(GraphBurst):
            def output(self) -> jax.Array:
                o = self._outs[0].transpose(1, 2)
                return self._as_array(o.reshape(-1, *o.shape[2:]))

        return ByHead([partial(call, s) for s in sets])

    return {"": burst}


def compile_flashinfer(cases: Sequence[Case]) -> None:
    """Has FlashInfer compile the kernels of all cases, which it keeps in its cache folder; waits to the end.

    One process per backend and head dims, all at once: FlashInfer itself compiles one after another.
    """
    wanted = {_compile_key(case, backend): (case, backend) for case in cases for backend in _backends(case)}
    notes = _compiled_folder()
    waiting = {name: job for name, job in wanted.items() if not (notes / name).exists()}
    program = "import sys; from jaxinfer.bench import torch_rivals; torch_rivals.compile_one(*sys.argv[1:])"
    begin = time.monotonic()
    jobs = {
        name: subprocess.Popen([sys.executable, "-P", "-c", program, *_compile_options(case, backend)])
        for name, (case, backend) in waiting.items()
    }
    total = len(jobs)
    while jobs:
        time.sleep(0.1)
        for name in [name for name, job in jobs.items() if job.poll() is not None]:
            state = "ready" if jobs.pop(name).returncode == 0 else "FAILED"
            what = f"FlashInfer kernels {total - len(jobs)}/{total}: {name} {state}"
            print(f"{what}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def compile_one(kind: str, backend: str, head_dim: str, head_dim_vo: str, form: str) -> None:
    """Runs one backend on a tiny case, and notes in FlashInfer's cache folder that it did."""
    case = Case(
        "tiny",
        kind,
        (1,) if kind == "decode" else (16,),
        (16,),
        page_size=16 if form == "paged" else None,
        head_dim=int(head_dim),
        head_dim_vo=int(head_dim_vo),
    )
    ops = make_operands(case)
    _flashinfer_burst(dataclasses.replace(ops, sets=ops.sets[:1]), backend).output()
    (_compiled_folder() / _compile_key(case, backend)).touch()


def _compile_options(case: Case, backend: str) -> tuple[str, ...]:
    """What FlashInfer's kernels depend on: the arguments of compile_one."""
    form = "contiguous" if case.page_size is None else "paged"
    return (case.kind, backend, *map(str, case.head_dims), form)


def _compile_key(case: Case, backend: str) -> str:
    """The name of the note that kernels are there."""
    return "-".join(_compile_options(case, backend))


def _compiled_folder() -> Path:
    """Inside the folder of FlashInfer's kernels, so that whoever removes those removes the notes."""
    from flashinfer.jit import env

    folder = Path(env.FLASHINFER_JIT_DIR) / "jaxinfer-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    chosen = [c for kind in sys.argv[1:] or ("decode", "prefill") for c in select(kind, "gpu")]
    compile_flashinfer(chosen)
