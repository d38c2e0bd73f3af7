"""A Llama or Qwen2 model from a GGUF file: its config from the metadata, its weights from the tensors.

Architecture `llama` stores q and k permuted for interleaved rotary pairs (also for checkpoints that began
half-split); `qwen2` keeps half-split pairs. Metadata that would change the math and is not supported is
refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.config import LlamaConfig, words
from jaxinfer.models.gguf_file import GgufFile
from jaxinfer.models.params import Params, load_params
from jaxinfer.rope import FrequencyFactors, RopeScaling

_INTERLEAVED = {"llama": True, "qwen2": False}
_ROPE_FACTORS = "rope_freqs.weight"

# Keys under "<architecture>." that are read below.
_READ = words(
    "vocab_size block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned"
)
# Keys under "<architecture>." that change the math unless they hold this value.
_NEUTRAL: Mapping[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",
}

_OUTER_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
_NAMES = _OUTER_NAMES | {name: "blk.{layer}." + tensor for name, tensor in _LAYER_NAMES.items()}


def load_gguf(
    path: str | os.PathLike[str], dtype: Any = jnp.float32, *, progress: bool = True
) -> tuple[LlamaConfig, Params, Mapping[str, Any]]:
    """`(config, weights in dtype, metadata)` of a GGUF file; `dtype` is float32 or bfloat16.

    ValueError for truncated files, missing tensors and wrong shapes (with file, tensor and both values),
    NotImplementedError, naming the key, for models that this code would compute wrongly.
    """
    file = GgufFile(path)
    config = config_from_gguf(file)
    params = load_params(
        config,
        _NAMES,
        file.tensors,
        file.read,
        dtype=dtype,
        source=str(file.path),
        ignored=(_ROPE_FACTORS,),
        progress=progress,
    )
    return config, params, file.metadata


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """The config in a file's metadata; biases, tied embeddings and rotary factors show in its tensors."""
    meta, source = file.metadata, str(file.path)
    arch = meta.get("general.architecture")
    if arch not in _INTERLEAVED:
        raise NotImplementedError(
            f"{source}: general.architecture {arch!r}; supported: {', '.join(sorted(_INTERLEAVED))}"
        )
    if meta.get("split.count", 1) > 1:
        raise NotImplementedError(f"{source}: split.count {meta['split.count']}; supported: one file")
    own = {key[len(arch) + 1 :]: value for key, value in meta.items() if key.startswith(arch + ".")}
    for key, value in own.items():
        if key in _NEUTRAL:
            if value != _NEUTRAL[key]:
                raise NotImplementedError(f"{source}: {arch}.{key} {value!r}; supported: {_NEUTRAL[key]!r}")
        elif key not in _READ:
            raise NotImplementedError(f"{source}: {arch}.{key} {value!r} is not supported")

    def need(key: str) -> Any:
        if key not in own:
            raise ValueError(f"{source}: lacks {arch}.{key}")
        value = own[key]
        if isinstance(value, list):  # one number for each layer
            if len(set(value)) != 1:
                raise NotImplementedError(f"{source}: {arch}.{key} differs between layers: {value}")
            value = value[0]
        return value

    layers, heads, hidden = need("block_count"), need("attention.head_count"), need("embedding_length")
    kv_heads = need("attention.head_count_kv") if "attention.head_count_kv" in own else heads
    head_dim = own.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise NotImplementedError(
                f"{source}: {arch}.{key} {own[key]}; supported: the head dim, {head_dim}"
            )
    window = own.get("attention.sliding_window") or None
    tokens = meta.get("tokenizer.ggml.tokens")
    embed = file.tensors.get(_OUTER_NAMES["embed"])
    vocab = own.get("vocab_size", len(tokens) if tokens is not None else embed.shape[0] if embed else None)
    if vocab is None:
        raise ValueError(
            f"{source}: lacks {arch}.vocab_size, tokenizer.ggml.tokens and {_OUTER_NAMES['embed']}"
        )
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=layers,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        rope_theta=float(own.get("rope.freq_base", 10000.0)),
        max_position=need("context_length"),
        rope_scaling=_rope_scaling(own, file, arch),
        rope_interleaved=_INTERLEAVED[arch],
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tie_embeddings=_OUTER_NAMES["lm_head"] not in file.tensors,
        layer_windows=None if window is None else (window,) * layers,
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
    )


def _rope_scaling(own: Mapping[str, Any], file: GgufFile, arch: str) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "none")
    if kind != "none":
        raise NotImplementedError(f"{file.path}: {arch}.rope.scaling.type {kind!r}; supported: 'none'")
    if own.get("rope.scaling.factor", 1.0) not in (0.0, 1.0):
        raise NotImplementedError(
            f"{file.path}: {arch}.rope.scaling.factor {own['rope.scaling.factor']} "
            "without a type; supported: 1"
        )
    if _ROPE_FACTORS in file.tensors:
        return FrequencyFactors(tuple(file.read(_ROPE_FACTORS).tolist()))
    return None
