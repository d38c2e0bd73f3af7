"""Rotary position embedding: frequencies (default, Llama 3 scaling, per-frequency factors) and the rotation.

Which positions the tokens have is the layout's affair (`layout.q_pos`); nothing here counts tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3 frequency scaling: long wavelengths are divided by `factor`, short ones kept, blended between.

    Wavelengths are measured in tokens: longer than `original_max_position / low_freq_factor` counts as long,
    shorter than `original_max_position / high_freq_factor` as short.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor: got {self.factor}, expected a number above 0")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor, high_freq_factor: got {self.low_freq_factor} and {self.high_freq_factor}, "
                "expected 0 < low_freq_factor < high_freq_factor"
            )
        if self.original_max_position < 1:
            raise ValueError(f"original_max_position: got {self.original_max_position}, expected at least 1")


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor per rotary frequency, `head_dim / 2` of them (how GGUF files store precomputed scaling)."""

    factors: tuple[float, ...]


RopeScaling = Llama3Scaling | FrequencyFactors


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> npt.NDArray[np.float32]:
    """Radians per token of each rotated pair, float32 `[head_dim / 2]`: `theta ** (-2 i / head_dim)`, scaled.

    Computed on the host in float64. ValueError for an odd `head_dim` or a wrong number of factors.
    Source: RoFormer, arXiv 2104.09864, section 3.2.2; scaling as in the Llama 3.1 model release.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, expected an even number of at least 2")
    inv_freq = float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if isinstance(scaling, Llama3Scaling):
        wavelength = 2 * math.pi / inv_freq
        turns = scaling.original_max_position / wavelength  # full rotations inside the original context
        span = scaling.high_freq_factor - scaling.low_freq_factor
        # 1: unscaled, 0: divided by factor
        keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        inv_freq = keep * inv_freq + (1.0 - keep) * inv_freq / scaling.factor
    elif isinstance(scaling, FrequencyFactors):
        if len(scaling.factors) != head_dim // 2:
            raise ValueError(f"factors: got {len(scaling.factors)}, expected head_dim / 2 = {head_dim // 2}")
        inv_freq = inv_freq / np.asarray(scaling.factors, np.float64)
    return inv_freq.astype(np.float32)


def rope_cos_sin(
    q_pos: jax.Array | npt.NDArray[np.int32], inv_freq: jax.Array | npt.NDArray[np.float32]
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every token's angles: float32 `[num_tokens, head_dim / 2]` each."""
    angles = jnp.asarray(q_pos).astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates `x [num_tokens, heads, head_dim]` by the angles of `rope_cos_sin`; same shape and dtype.

    Pair i is `(x[2i], x[2i + 1])` when `interleaved`, else `(x[i], x[i + head_dim / 2])` (half-split): a
    checkpoint is trained or permuted for one of the two, and the other gives plausible nonsense. Computed in
    float32. ValueError for shapes that do not fit together.
    """
    half = x.shape[-1] // 2
    if x.ndim != 3 or cos.shape != (x.shape[0], half) or sin.shape != cos.shape:
        raise ValueError(
            f"x, cos, sin: got {x.shape}, {cos.shape}, {sin.shape}, "
            "expected [num_tokens, heads, head_dim] and twice [num_tokens, head_dim / 2]"
        )
    c, s = cos[:, None, :], sin[:, None, :]
    y = x.astype(jnp.float32)
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        out = jnp.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)
    else:
        a, b = y[..., :half], y[..., half:]
        out = jnp.concatenate([a * c - b * s, a * s + b * c], axis=-1)
    return out.astype(x.dtype)
