"""Choosing the next token from logits, inside the jitted step. A request's draws depend on its own seed and
on how many tokens it has generated, never on which other requests share the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import _args
from jaxinfer._args import Array

_NORMAL = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn.

    `temperature`: None takes the most likely token (greedy); else logits are divided by it. `top_k`: only the
    k most likely tokens; `top_p`: of those, only the smallest set of most likely tokens whose probability
    reaches it. None means off; tokens that tie with the last one kept are kept too. `seed`: in [0, 2**32).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, (bool, np.bool_)) or not isinstance(
                value, (int, float, np.integer, np.floating, type(None))
            ):
                raise ValueError(f"{name}: got {value!r}, expected a number, or None")
            if value is not None:
                _args.real(name, value)
        if self.top_k is not None:
            _args.index("top_k", self.top_k)
        _args.index("seed", self.seed)
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature: got {self.temperature}, expected a finite number above 0, or None for greedy"
            )
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise ValueError(f"top_k: got {self.top_k}, expected [1, 2**31), or None for off")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected (0, 1], or None for off")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected [0, 2**32)")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """`Sampling` of every batch row as operands of the step."""

    temperature: Array  # float32 [rows], 0 for greedy rows
    top_k: Array  # int32 [rows], vocab_size where off
    top_p: Array  # float32 [rows], 1 where off
    seed: Array  # uint32 [rows]
    index: Array  # int32 [rows], tokens the request has generated before this one

    @classmethod
    def build(
        cls, num_rows: int, vocab_size: int, entries: Iterable[tuple[int, Sampling, int]]
    ) -> SamplingRows:
        """On the host, from `(row, sampling, index)` of the rows in use; the others are greedy."""
        temperature, top_p = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        top_k, index = np.full(num_rows, vocab_size, np.int32), np.zeros(num_rows, np.int32)
        seed = np.zeros(num_rows, np.uint32)
        for row, sampling, generated in entries:
            # XLA takes subnormal numbers for 0, which stands for greedy rows.
            given = sampling.temperature
            temperature[row] = 0.0 if given is None else np.clip(float(given), *_NORMAL)
            top_k[row] = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
            top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
            seed[row], index[row] = sampling.seed, generated
        return cls(temperature, top_k, top_p, seed, index)


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Next token of every row, int32 `[rows]`, from float32 logits `[rows, vocab_size]`."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature = jnp.asarray(rows.temperature)

    def draw() -> jax.Array:
        hot = temperature > 0
        # The largest is 0 whatever it is divided by: a tiny temperature must not make ties of several infinities.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(hot, temperature, 1.0)[:, None]
        kept = jnp.where(_passes(scaled, rows), scaled, -jnp.inf)
        drawn = jax.vmap(_draw_row)(kept, jnp.asarray(rows.seed), jnp.asarray(rows.index))
        return jnp.where(hot, drawn, best)

    # Thresholds and random numbers for the whole vocabulary cost as much as a small model's step.
    chosen: jax.Array = jax.lax.cond(jnp.any(temperature > 0), draw, lambda: best)
    return chosen


def _passes(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Whether each token of `scaled [rows, vocab_size]` passes top-k, and top-p among what that left."""
    bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    rank = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned integers in the order of the floats
    kept = rank >= _reach(rank, jnp.ones_like(scaled), jnp.asarray(rows.top_k, jnp.float32))[:, None]
    mass = jnp.where(kept, jax.nn.softmax(scaled, axis=-1), 0.0)
    top_p = jnp.asarray(rows.top_p)
    nucleus = rank >= _reach(rank, mass, top_p * jnp.sum(mass, axis=-1))[:, None]
    # At 1 the rounded sum is reached before the tail is: tokens too unlikely to change it must stay possible.
    return kept & (nucleus | (top_p >= 1)[:, None])


def _reach(rank: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """Largest threshold per row so that tokens with `rank >= threshold` weigh at least `target`; 0: all.

    Found bit by bit: 32 passes over the vocabulary are several times cheaper on a CPU than sorting it.
    """

    def refine(step: int | jax.Array, threshold: jax.Array) -> jax.Array:
        trial = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        weighs = jnp.sum(jnp.where(rank >= trial[:, None], weight, 0.0), axis=-1)
        return jnp.where(weighs >= target, trial, threshold)

    threshold: jax.Array = jax.lax.fori_loop(0, 32, refine, jnp.zeros(rank.shape[0], jnp.uint32))
    return threshold


def _draw_row(kept: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), index)
    return jax.random.categorical(key, kept).astype(jnp.int32)
