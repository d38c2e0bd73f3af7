"""`bench step`: a whole decode step of a Llama of 8B shape in one jit, against the time its bytes take to be read.

The step is the model's: projections, RoPE, append, attention, MLP, logits, greedy sampling, random bfloat16 weights.
Attention alone against other libraries is versus.py's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.bench.ceilings import measure_ceilings
from jaxinfer.bench.measure import Timing, summary
from jaxinfer.bench.report import Progress, print_table
from jaxinfer.models.config import LlamaConfig
from jaxinfer.models.llama import forward, logits, make_plans, new_pools
from jaxinfer.models.params import Params, init_params, unstack_layers

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position=131072,
)
#: (requests, cached tokens of each)
BATCHES = ((1, 4096), (64, 4096))
PAGE_SIZE = 16
#: Steps of a short and a long run; their difference is free of what starting and waiting cost.
SHORT, LONG, ROUNDS = 2, 12, 7


@dataclass(frozen=True)
class StepResult:
    """One batch: seconds of a step, of the same step with q in place of attention's result, and of its bytes."""

    batch: int
    kv_len: int
    step: Timing
    without_attention: Timing
    num_bytes: int  # weights and cached K and V, each read once
    read_seconds: float  # of num_bytes at the bandwidth of a sum

    @property
    def efficiency(self) -> float:
        """Part of the read bandwidth that the step reaches."""
        return self.read_seconds / self.step.median


def bench_step(
    config: LlamaConfig = LLAMA_8B, batches: tuple[tuple[int, int], ...] = BATCHES
) -> list[StepResult]:
    """Measures all batches and prints the table."""
    progress = Progress(len(batches) + 2)
    progress.start("read bandwidth")
    bandwidth = measure_ceilings(["read"])["read"]
    progress.start("random weights")
    params = jax.block_until_ready(unstack_layers(init_params(config, jax.random.key(0), jnp.bfloat16)))
    results = []
    for batch, kv_len in batches:
        progress.start(f"{batch} requests x {kv_len} tokens")
        results.append(measure_step(params, config, batch, kv_len, bandwidth))
    progress.finish()
    _report(config, results, bandwidth)
    return results


def measure_step(
    params: Params, config: LlamaConfig, batch: int, kv_len: int, bandwidth: float
) -> StepResult:
    """Times the step with and without attention, in turns on the same pools."""
    pages = -(-kv_len // PAGE_SIZE)
    dtype = np.dtype(jnp.bfloat16)
    table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    layout = jaxinfer.from_block_table(
        table, np.full(batch, kv_len, np.int32), np.arange(batch + 1, dtype=np.int32), PAGE_SIZE
    )
    plans = make_plans(config, layout, dtype)
    pool = jax.eval_shape(lambda: new_pools(config, batch * pages, PAGE_SIZE, dtype))[0]
    # One layer's draw for all layers: the whole pool's random bits would not fit beside it.
    draw = jax.jit(
        lambda key: jnp.broadcast_to(jax.random.normal(key, pool.shape[1:], pool.dtype), pool.shape)
    )
    state = [jnp.zeros(batch, jnp.int32), *map(draw, jax.random.split(jax.random.key(1)))]
    operands = jax.device_put((params, layout, plans))

    def compiled(attention: Callable[..., object]) -> Any:
        def step(tokens: Any, k_pages: Any, v_pages: Any, params: Params, layout: Any, plans: Any) -> Any:
            hidden, k_pages, v_pages = forward(
                params, config, tokens, layout, plans, k_pages, v_pages, attention=attention
            )
            return jnp.argmax(logits(params, hidden), axis=-1).astype(jnp.int32), k_pages, v_pages

        jitted = jax.jit(step, donate_argnums=(0, 1, 2))
        return jitted.lower(*state, *operands).compile()

    steps = {
        "with": compiled(jaxinfer.attention),
        "without": compiled(lambda q, *_args, **_options: q),
    }

    def run(name: str, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            state[:] = steps[name](*state, *operands)
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    for name in steps:
        run(name, SHORT)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name in steps:
            samples[name].append(_slope(partial(run, name)))
    kv_bytes = 2 * config.num_layers * batch * kv_len * config.num_kv_heads * config.head_dim * 2
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["embed"].nbytes
    num_bytes = weight_bytes + kv_bytes
    return StepResult(
        batch,
        kv_len,
        summary(samples["with"]),
        summary(samples["without"]),
        num_bytes,
        num_bytes / bandwidth,
    )


def _slope(run: Callable[[int], float]) -> float:
    """Seconds of one step: a long run less a short one."""
    short = run(SHORT)
    return (run(LONG) - short) / (LONG - SHORT)


def _report(config: LlamaConfig, results: list[StepResult], bandwidth: float) -> None:
    title = (
        f"decode step, {config.num_layers} layers, hidden {config.hidden_size}, bfloat16, page {PAGE_SIZE}, "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; reading {bandwidth / 1e12:.2f} TB/s"
    )
    columns = ("requests x kv", "ms", "quartiles ms", "without attention", "GB read", "of read bandwidth")
    rows = [
        (
            f"{r.batch} x {r.kv_len}",
            f"{1e3 * r.step.median:.2f}",
            f"{1e3 * r.step.low:.2f}-{1e3 * r.step.high:.2f}",
            f"{1e3 * r.without_attention.median:.2f}",
            f"{r.num_bytes / 1e9:.1f}",
            f"{r.efficiency:.0%}",
        )
        for r in results
    ]
    print_table(title, columns, rows)
