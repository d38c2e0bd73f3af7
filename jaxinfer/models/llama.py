"""The Llama forward pass over a paged cache: RMSNorm, RoPE, grouped-query attention through the engine,
SwiGLU.

Pure functions of weights, tokens, layout and pools. Who the requests are, and what is done with the logits,
is not here (scheduler.py, sampling.py, generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer._typing import Array, Float
from jaxinfer.models.config import LlamaConfig
from jaxinfer.models.params import Params, joined_name, layer_shapes
from jaxinfer.rope import apply_rope, rope_cos_sin, rope_frequencies


def variants(config: LlamaConfig) -> tuple[jaxinfer.Variant, ...]:
    """The attention rules of the model, one per entry of `config.windows`; each needs its own plan."""
    return tuple(
        jaxinfer.Variant(causal=True, window_left=None if window is None else window - 1)
        for window in config.windows  # a window of W tokens reaches back W - 1 positions
    )


def make_plans(
    config: LlamaConfig, layout: jaxinfer.BlockSparse, dtype: np.dtype[np.generic]
) -> tuple[jaxinfer.Plan, ...]:
    """One plan per entry of `config.windows`, on the host; the same plans serve every layer of this step."""
    return tuple(
        jaxinfer.plan(
            layout,
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            variant=variant,
        )
        for variant in variants(config)
    )


def forward(
    params: Params,
    config: LlamaConfig,
    tokens: jax.Array,
    layout: jaxinfer.BlockSparse,
    plans: Sequence[jaxinfer.Plan],
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    attention: Callable[..., object] = jaxinfer.attention,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one step's tokens through all layers.

    `tokens`: int32 `[num_tokens]`, packed as in the layout; what padding holds does not matter. `plans`: of
    `make_plans`. `k_pages`, `v_pages`: `[num_layers, num_pages, page_size, num_kv_heads, head_dim]` in the
    dtype of the weights; donate them, and the returned pools are the same memory. `attention`: called as
    `jaxinfer.attention` is. Layers stacked in `params` are scanned over, which compiles one; layers in a list
    (`unstack_layers`) follow one another, which on a GPU saves copying each layer's weights out of the stack.

    Returns `(hidden [num_tokens, hidden_size] after the final norm, k_pages, v_pages)`; `logits` turns hidden
    states into logits, for those tokens that need them.
    """
    rules = variants(config)
    if len(plans) != len(rules):
        raise ValueError(f"plans: got {len(plans)}, expected one for each of the windows {config.windows}")
    num_tokens = tokens.shape[0]
    cos, sin = rope_cos_sin(
        layout.q_pos, rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    )
    slots = jnp.asarray(layout.slots())
    window_index = jnp.asarray(config.window_index, jnp.int32)
    shapes = layer_shapes(config)

    def heads(x: jax.Array, num_heads: int) -> jax.Array:
        return x.reshape(num_tokens, num_heads, config.head_dim)

    # The pools are carried whole and `layer` is an operand: slicing them, or scanning over them, would copy.
    def block(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[dict[str, jax.Array], jax.Array | int]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        x, k_pages, v_pages = carry
        w, layer = inputs
        h = _rms_norm(x, w["attn_norm"], config.rms_norm_eps)
        q, k, v = _linears(h, w, ("q", "k", "v"), shapes)
        q, k, v = heads(q, config.num_qo_heads), heads(k, config.num_kv_heads), heads(v, config.num_kv_heads)
        q = apply_rope(q, cos, sin, interleaved=config.rope_interleaved)
        k = apply_rope(k, cos, sin, interleaved=config.rope_interleaved)
        k_pages, v_pages = jaxinfer.append_kv(k_pages, v_pages, k, v, slots, layer=layer)

        def attend(index: int) -> jax.Array:
            o = attention(q, k_pages, v_pages, layout, plans[index], variant=rules[index], layer=layer)
            assert isinstance(o, jax.Array)  # no LSE was asked for
            return o

        if isinstance(layer, int):
            o = attend(config.window_index[layer])
        elif len(rules) == 1:
            o = attend(0)
        else:
            o = jax.lax.switch(window_index[layer], [lambda i=i: attend(i) for i in range(len(rules))])
        x = x + _linear(o.reshape(num_tokens, -1), w["o_proj"], w.get("o_bias"))
        h = _rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
        gate, up = _linears(h, w, ("gate", "up"), shapes)
        x = x + _linear(jax.nn.silu(gate) * up, w["down_proj"], w.get("down_bias"))
        return (x, k_pages, v_pages), None

    x = params["embed"][tokens]
    carry = (x, k_pages, v_pages)
    if isinstance(params["layers"], dict):
        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        carry, _ = jax.lax.scan(block, carry, (params["layers"], layers))
    else:
        for layer, weights in enumerate(params["layers"]):
            carry, _ = block(carry, (weights, layer))
    x, k_pages, v_pages = carry
    return _rms_norm(x, params["final_norm"], config.rms_norm_eps), k_pages, v_pages


def logits(params: Params, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """float32 logits `[rows, vocab_size]` of hidden states `[rows, hidden_size]` that `forward` returned."""
    head = params["lm_head"] if "lm_head" in params else params["embed"]
    return _dot(hidden, head)


def new_pools(
    config: LlamaConfig, num_pages: int, page_size: int, dtype: np.dtype[np.generic]
) -> tuple[Float[Array, "layers pages page heads dim"], Float[Array, "layers pages page heads dim"]]:
    """Zeroed `(k_pages, v_pages)` for all layers."""
    shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def _rms_norm(
    x: Float[Array, "tokens hidden"], weight: Float[Array, " hidden"], eps: float
) -> Float[Array, "tokens hidden"]:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight[None]


def _dot(x: Float[Array, "tokens ins"], w: Float[Array, "outs ins"]) -> Float[Array, "tokens outs"]:
    """`x [tokens, in]` times `w [out, in]`, float32 `[tokens, out]`."""
    return jnp.einsum(
        "ti,oi->to", x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _linears(
    x: jax.Array, w: dict[str, jax.Array], stems: tuple[str, ...], shapes: dict[str, tuple[int, ...]]
) -> list[jax.Array]:
    """x times each of the stems' weights, which may be joined."""
    projections, biases = (tuple(f"{stem}_{kind}" for stem in stems) for kind in ("proj", "bias"))
    if (joined := joined_name(projections)) in w:
        ends = np.cumsum([shapes[name][0] for name in projections])
        return jnp.split(_linear(x, w[joined], w.get(joined_name(biases))), ends[:-1], axis=-1)
    return [_linear(x, w[p], w.get(b)) for p, b in zip(projections, biases, strict=True)]


def _linear(
    x: Float[Array, "tokens ins"], w: Float[Array, "outs ins"], bias: Float[Array, " outs"] | None
) -> Float[Array, "tokens outs"]:
    y = _dot(x, w)
    return (y if bias is None else y + bias.astype(jnp.float32)[None]).astype(x.dtype)
