"""AttentionState, what attention over a part of the KV tokens knows, and merging of such states.

This is the paper's attention composition (FlashInfer, arXiv 2501.01005, section 2.2): states over disjoint
sets of KV tokens merge into the state over their union, in any order. Merging of partial results inside one
call is the plan's and the kernels' business, not this file's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer import _pytree
from jaxinfer._args import Array, check_array

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionState:
    """Normalised output and log-sum-exp of the logits over some set of KV tokens; a pytree.

    `lse = -inf` is the empty state, whatever its `o` holds: it is neutral for merging.
    """

    o: Array  # [num_tokens, num_qo_heads, head_dim_vo], dtype of q
    lse: Array  # float32 [num_tokens, num_qo_heads], natural log


_pytree.register(AttentionState, data_fields=("o", "lse"))


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over both sets of KV tokens, which must be disjoint.

    `lse = logaddexp(a.lse, b.lse)`, `o = a.o * exp(a.lse - lse) + b.o * exp(b.lse - lse)`, in float32; `o`
    comes back in its own dtype. Merging with an empty state returns the other bit for bit; of two empty
    ones, (0, -inf).

    States computed with sinks (the sink already divided `o` and would count twice) or without softmax (there
    is no `lse`; partial outputs simply add up) cannot be merged.

    Raises:
      ValueError: shapes or dtypes disagree, or lse is not float32 of shape `o.shape[:-1]`.
    """
    return merge_many((a, b))


def merge_many(states: Sequence[AttentionState]) -> AttentionState:
    """`merge` of one or more states, from left to right; rounded to the dtype of `o` only once, at the end.

    Raises:
      ValueError: no state, or as in `merge`.
      TypeError: something else than states.
    """
    if isinstance(states, AttentionState):
        raise TypeError("states must be a sequence of states, got one AttentionState")
    try:
        states = tuple(states)
    except TypeError:
        raise TypeError(f"states must be a sequence of AttentionState, got {type(states).__name__}") from None
    if not states:
        raise ValueError("merge_many needs at least one state")
    for i, s in enumerate(states):
        if not isinstance(s, AttentionState):
            raise TypeError(
                f"state {i} must be a jaxinfer.AttentionState, as attention(..., return_lse=True) gives, "
                f"got {type(s).__name__}"
            )
        check_array(f"o of state {i}", s.o)
        check_array(f"lse of state {i}", s.lse)
        if s.o.ndim == 0 or not jnp.issubdtype(s.o.dtype, jnp.floating):
            raise ValueError(
                f"o of state {i} must be floating, [num_tokens, num_qo_heads, head_dim_vo], "
                f"got {s.o.dtype}{list(s.o.shape)}"
            )
        if s.o.shape != states[0].o.shape or s.o.dtype != states[0].o.dtype:
            raise ValueError(
                f"state {i} has o {s.o.dtype}{list(s.o.shape)}, "
                f"state 0 has {states[0].o.dtype}{list(states[0].o.shape)}"
            )
        if s.lse.shape != s.o.shape[:-1] or s.lse.dtype != jnp.float32:
            raise ValueError(
                f"state {i} has lse {s.lse.dtype}{list(s.lse.shape)}, expected float32{list(s.o.shape[:-1])}"
            )
    pairs = [(jnp.asarray(s.o, jnp.float32), jnp.asarray(s.lse)) for s in states]
    zero = (jnp.zeros_like(pairs[0][0]), jnp.full_like(pairs[0][1], -jnp.inf))
    o, lse = functools.reduce(_merge, pairs, zero)
    return AttentionState(o.astype(states[0].o.dtype), lse)


def _merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (a_o, a_lse), (b_o, b_lse) = a, b
    a_empty, b_empty = jnp.isneginf(a_lse), jnp.isneginf(b_lse)
    both_empty = a_empty & b_empty
    # -inf - -inf is NaN and 0 * NaN is NaN, so empty sides are selected away instead of weighted with 0. No NaN is
    # computed on the way either: jax_debug_nans would find it outside jit, and a gradient would be it.
    a_o, b_o = jnp.where(a_empty[..., None], 0.0, a_o), jnp.where(b_empty[..., None], 0.0, b_o)
    top = jnp.where(both_empty, 0.0, jnp.maximum(a_lse, b_lse))
    a_weight, b_weight = jnp.exp(a_lse - top), jnp.exp(b_lse - top)
    total = jnp.where(both_empty, 1.0, a_weight + b_weight)
    o = (a_o * a_weight[..., None] + b_o * b_weight[..., None]) / total[..., None]
    o = jnp.where(b_empty[..., None], a_o, jnp.where(a_empty[..., None], b_o, o))
    lse = jnp.where(b_empty, a_lse, jnp.where(a_empty, b_lse, top + jnp.log(total)))
    return o, lse


def lse_to_log2(lse: Array) -> jax.Array:
    """Natural-log LSE, as jaxinfer returns it, to base 2, as some other kernels do; float32, -inf stays."""
    return jnp.multiply(_lse(lse), jnp.float32(_LOG2_E))


def lse_from_log2(lse: Array) -> jax.Array:
    """Base-2 LSE to the natural log that `merge` expects; float32, -inf stays."""
    return jnp.multiply(_lse(lse), jnp.float32(math.log(2.0)))


def _lse(lse: Array) -> jax.Array:
    try:
        return jnp.asarray(lse, jnp.float32)
    except (TypeError, ValueError):
        raise TypeError(f"lse must be an array of numbers, got {type(lse).__name__}") from None
