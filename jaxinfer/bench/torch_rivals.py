"""Rivals that live in torch: FlashInfer and cuDNN's scaled dot-product attention. They read JAX's arrays in place.

torch and flashinfer are imported where they are used: they need not be installed.
`python -m jaxinfer.bench.torch_rivals decode|prefill` compiles the FlashInfer kernels of a table, all at once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.burst import Burst
from jaxinfer.bench.cases import CASES, Operands

Variants = dict[str, Callable[[], Burst]]
#: Bytes of scratch that a FlashInfer wrapper gets; skewed batches overflow its documented 128 MB.
WORKSPACE_BYTES = 512 << 20
_BACKENDS = {"decode": ("fa2", "cuda-core", "persistent"), "prefill": ("fa2", "fa3")}


class GraphBurst(Burst):
    """Calls recorded once in a CUDA graph and replayed, so that launches cost the host nothing.

    Args:
      calls: one per set of operands, each returning a tensor [tokens, num_qo_heads, head_dim].
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        import torch

        self.slots = len(calls)
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
    return {name: partial(_flashinfer_burst, ops, name) for name in _BACKENDS[ops.case.kind]}


def _flashinfer_burst(ops: Operands, backend: str) -> Burst:
    import flashinfer as library
    import torch

    case = ops.case
    dtype = getattr(torch, case.dtype)

    def to_gpu(x: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).cuda()

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    qo, kv, indices = (to_gpu(x) for x in (ops.qo_indptr, ops.kv_indptr, ops.kv_indices))
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    sets = _tensors(ops)
    if case.page_size is None:
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        ragged.plan(qo, kv, *heads, causal=True, **dtypes)
        return GraphBurst([partial(ragged.run, *s) for s in sets])
    lengths = np.array(case.kv_len)
    last_page = to_gpu((lengths - 1) % case.page_size + 1)
    if backend == "persistent":
        wrapper: Any = library.BatchAttention(kv_layout="NHD")
        wrapper.plan(
            qo, kv, indices, to_gpu(lengths), *heads, case.head_dim, case.page_size, causal=True, **dtypes
        )
        return GraphBurst([lambda s=s: wrapper.run(s[0], s[1:])[0] for s in sets])  # type: ignore[misc]
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
        wrapper.plan(qo, kv, indices, last_page, *heads, case.page_size, causal=True, **dtypes)
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
                    *operands, is_causal=True, enable_gqa=case.num_qo_heads != case.num_kv_heads
                )
            return o

        class ByHead(GraphBurst):
            def output(self) -> jax.Array:
                o = self._outs[0].transpose(1, 2)
                return self._as_array(o.reshape(-1, *o.shape[2:]))

        return ByHead([partial(call, s) for s in sets])

    return {"": burst}


def compile_flashinfer(kind: str, backend: str, head_dim: int) -> None:
    """Has FlashInfer compile one backend's kernels, which it keeps in its cache folder, by planning a tiny batch."""
    import flashinfer as library
    import torch

    ints = {"dtype": torch.int32, "device": "cuda"}
    indptr, one = torch.tensor([0, 1], **ints), torch.tensor([1], **ints)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    heads, page_size = (8, 2, head_dim), 16
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if backend == "persistent":
        library.BatchAttention(kv_layout="NHD").plan(
            indptr, indptr, indptr[:1], one, *heads, head_dim, page_size, causal=True, **dtypes
        )
    elif kind == "decode":
        library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=backend == "fa2",
            backend="fa2" if backend == "fa2" else "auto",
        ).plan(indptr, indptr[:1], one, *heads, page_size, **dtypes)
    else:
        library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend).plan(
            indptr, indptr, indptr[:1], one, *heads, page_size, causal=True, **dtypes
        )


def compile_all(kinds: Sequence[str]) -> int:
    """Compiles what the tables need, one process per backend and head_dim; returns how many failed."""
    wanted = sorted(
        {
            (case.kind, backend, case.head_dim)
            for case in CASES
            if case.kind in kinds and "gpu" in case.platforms
            for backend in _BACKENDS[case.kind]
        }
    )
    program = "import sys; from jaxinfer.bench.torch_rivals import compile_flashinfer as c; "
    jobs = []
    for kind, backend, head_dim in wanted:
        call = f"c({kind!r}, {backend!r}, {head_dim})"
        jobs.append((call, subprocess.Popen([sys.executable, "-P", "-c", program + call])))
    failed = [call for call, job in jobs if job.wait() != 0]
    print(
        f"FlashInfer: {len(jobs) - len(failed)} of {len(jobs)} kernel sets ready", *failed, sep="\nfailed: "
    )
    return len(failed)


if __name__ == "__main__":
    sys.exit(compile_all(sys.argv[1:] or ("decode", "prefill")) > 0)
