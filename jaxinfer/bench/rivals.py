"""Who takes part in the tables of cases.py: one `Rival` per library, each with the variants of which the best counts.

Those that need torch are prepared in torch_rivals.py; timing is in burst.py. A new rival is one entry in RIVALS. Who
takes part in `bench decode` on a CPU is in peers.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.attention import attention_p
from jaxinfer.bench import torch_rivals
from jaxinfer.bench.burst import Burst, JaxBurst
from jaxinfer.bench.cases import Case, Operands, make_layout
from jaxinfer.bench.peers import OURS
from jaxinfer.ffi import attention_kernel_attributes
from jaxinfer.jit.registry import load
from jaxinfer.jit.warmup import local_archs
from jaxinfer.layout import BlockSparse

#: Variants by label; each is prepared on its own, so that one may fail alone.
Variants = dict[str, Callable[[], Burst]]


@dataclass(frozen=True)
class Rival:
    """One library's way to compute a case. Its functions are named in modules: they are sent to other processes.

    Attributes:
      kinds, platforms, needs: tables and platforms it takes part in, modules that must be installed.
      variants: settings to choose from; the fastest represents the library.
      refuses: why it cannot run a case, None where it can.
      prepare: compiles to the end what the library would compile when first called, for all cases.
    """

    name: str
    kinds: tuple[str, ...]
    platforms: tuple[str, ...]
    needs: tuple[str, ...]
    variants: Callable[[Operands], Variants]
    refuses: Callable[[Case], str | None]
    note: str = ""
    prepare: Callable[[Sequence[Case]], None] | None = None

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.needs if _absent(name)]


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # a parent package is missing
        return True


def _accepts_all(case: Case) -> str | None:
    return None


def _plan(case: Case, layout: BlockSparse) -> jaxinfer.Plan:
    return jaxinfer.plan(
        layout,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dims,
        dtype=case.dtype,
        variant=jaxinfer.Variant(causal=case.causal),
    )


def _our_call(case: Case) -> Callable[..., Any]:
    variant = jaxinfer.Variant(causal=case.causal)
    return lambda q, k, v, layout, plan: jaxinfer.attention(q, k, v, layout, plan, variant=variant)


def _ours(ops: Operands) -> Variants:
    return {"": lambda: JaxBurst(_our_call(ops.case), ops.sets, (ops.layout, _plan(ops.case, ops.layout)))}


def kernel_specs(case: Case) -> list[str]:
    """What the kernels of our call are compiled from on a GPU; needs neither a GPU nor operands."""
    layout = make_layout(case)
    operands = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    jaxpr = jax.make_jaxpr(_our_call(case))(*operands, layout, _plan(case, layout))
    call = next(eqn for eqn in jaxpr.eqns if eqn.primitive is attention_p)
    avals = [operand.aval for operand in call.invars]
    kernels: str = attention_kernel_attributes(avals, **call.params)["kernels"]
    return kernels.splitlines()


def _compile_ours(cases: Sequence[Case]) -> None:
    """The kernels of all cases at once; their programs would compile them one after another."""
    if jax.default_backend() == "gpu":
        specs = dict.fromkeys(spec for case in cases for spec in kernel_specs(case))
        jobs = [(spec, arch) for spec in specs for arch in local_archs()]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda job: load(*job), jobs))


def _dense(case: Case, x: Any) -> Any:
    """Tokens to [batch, tokens per request, heads, head_dim]."""
    return x.reshape(case.batch, -1, *x.shape[-2:])


def _needs_dense(case: Case) -> str | None:
    if case.page_size is not None:
        return "no pages"
    return None if case.whole else "equal lengths, all tokens queries"


def _dot_product(implementation: Literal["xla", "cudnn"], ops: Operands) -> Variants:
    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (_dense(ops.case, x) for x in (q, k, v))
        o = jax.nn.dot_product_attention(q, k, v, is_causal=ops.case.causal, implementation=implementation)
        return o.reshape(-1, *o.shape[2:])

    return {"": lambda: JaxBurst(call, ops.sets)}


def _flash_attn3(ops: Operands) -> Variants:
    from flash_attn3_jax import flash_mha, flash_mha_with_kvcache

    case = ops.case
    if case.page_size is None:

        def dense(q: Any, k: Any, v: Any) -> Any:
            o = flash_mha(*(_dense(case, x) for x in (q, k, v)), is_causal=case.causal)
            return o.reshape(-1, *o.shape[2:])

        return {"": lambda: JaxBurst(dense, ops.sets)}
    shared = (jnp.asarray(ops.block_table()), jnp.asarray(case.kv_len, jnp.int32))

    def with_splits(num_splits: int) -> Callable[[], Burst]:
        def call(q: Any, k: Any, v: Any, table: Any, kv_len: Any) -> Any:
            o = flash_mha_with_kvcache(
                _dense(case, q),
                k,
                v,
                cache_seqlens=kv_len,
                page_table=table,
                is_causal=case.causal,
                num_splits=num_splits,
            )
            return o.reshape(-1, *o.shape[2:])

        return lambda: JaxBurst(call, ops.sets, shared)

    # Beyond 2,000 CTAs, 15 for each multiprocessor, another split only adds merging.
    splits = [n for n in (8, 32) if case.kind == "decode" and case.batch * case.num_kv_heads * n <= 2000]
    return {f"{n} splits": with_splits(n) for n in (1, *splits)}


def _flash_attn3_refuses(case: Case) -> str | None:
    if case.head_dims != (128, 128):
        return "head_dim 128 only"
    if case.skewed:
        return "0.2.3 ends the process with an illegal memory access on skewed lengths"
    return None if len(set(case.q_len)) == 1 else "equal query lengths only"


def _pallas(ops: Operands) -> Variants:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    case = ops.case
    heads_first = jax.jit(lambda x: jnp.moveaxis(x, -2, 0))

    def with_splits(k_splits: int) -> Callable[[], Burst]:
        def call(q: Any, k: Any, v: Any, table: Any, kv_len: Any) -> Any:
            # The kernel has no scale of its own.
            scaled = q * jnp.asarray(case.head_dim**-0.5, q.dtype)
            return paged_attention(scaled, k, v, table, kv_len, k_splits=k_splits)

        def burst() -> Burst:
            sets = [(q, heads_first(k), heads_first(v)) for q, k, v in ops.sets]
            table = ops.block_table(multiple=8 * k_splits)  # 8 pages per block
            return JaxBurst(call, sets, (table, np.array(case.kv_len, np.int32)))

        return burst

    # Measured on an H200: 16 splits win up to a batch of 16, 4 beyond.
    return {f"{n} splits": with_splits(n) for n in ((16,) if case.batch <= 16 else (4,))}


_BOTH = ("decode", "prefill")
#: The first is ours; ratios are against the others.
RIVALS = (
    Rival(
        OURS,
        _BOTH,
        ("cpu", "gpu"),
        (),
        _ours,
        _accepts_all,
        "jaxinfer.attention, the plan made beforehand",
        _compile_ours,
    ),
    Rival(
        "FlashInfer",
        _BOTH,
        ("gpu",),
        ("flashinfer", "torch"),
        torch_rivals.flashinfer,
        _accepts_all,
        "CUDA graph replay, planned beforehand; best backend (fa2 in prefill at head_dim 128 only: it never won)",
        torch_rivals.compile_flashinfer,
    ),
    Rival(
        "flash-attn3-jax",
        _BOTH,
        ("gpu",),
        ("flash_attn3_jax",),
        _flash_attn3,
        _flash_attn3_refuses,
        "best of 1, 8, 32 splits",
    ),
    Rival(
        "Pallas paged_attention",
        ("decode",),
        ("gpu",),
        ("jax.experimental.pallas.ops.gpu.paged_attention",),
        _pallas,
        _accepts_all,
        "16 splits up to a batch of 16, else 4; q scaled by a fused product",
    ),
    Rival(
        "jax.nn cudnn",
        ("prefill",),
        ("gpu",),
        (),
        partial(_dot_product, "cudnn"),
        _needs_dense,
        "dense K and V only",
    ),
    Rival(
        "jax.nn xla",
        ("prefill",),
        ("cpu",),
        (),
        partial(_dot_product, "xla"),
        _needs_dense,
        "dense K and V only",
    ),
    Rival(
        "torch cuDNN SDPA",
        ("prefill",),
        ("gpu",),
        ("torch",),
        torch_rivals.cudnn_sdpa,
        _needs_dense,
        "CUDA graph replay; dense, K and V by head",
    ),
)
