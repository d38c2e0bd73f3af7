"""A dense Llama forward pass in numpy float64, and small models. It shares no code with what it judges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from jaxinfer.models import LlamaConfig
from jaxinfer.models.params import layer_shapes, model_shapes
from jaxinfer.rope import FrequencyFactors, Llama3Scaling

SPECIALS = ["<|begin|>", "<|end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}\n"
    "{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer as GGUF files hold it: two control tokens, all bytes, the merges; 264 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {key: value for key, value in (fields | changes).items() if value is not None}


def tiny_config(**changes: Any) -> LlamaConfig:
    """Three layers, group size 3, odd sizes."""
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_layers": 3,
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position": 64,
    }
    return LlamaConfig(**(fields | changes))


def rotate(x: np.ndarray, positions: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """RoPE by complex multiplication, x [tokens, heads, head_dim] float64."""
    dim = config.head_dim
    rates = []
    for i in range(dim // 2):
        rate = 1.0 / config.rope_theta ** (2 * i / dim)
        scaling = config.rope_scaling
        if isinstance(scaling, Llama3Scaling):
            wavelength = 2 * math.pi / rate
            if wavelength > scaling.original_max_position / scaling.low_freq_factor:
                rate = rate / scaling.factor
            elif wavelength >= scaling.original_max_position / scaling.high_freq_factor:
                blend = scaling.original_max_position / wavelength - scaling.low_freq_factor
                blend /= scaling.high_freq_factor - scaling.low_freq_factor
                rate = (1 - blend) * rate / scaling.factor + blend * rate
        elif isinstance(scaling, FrequencyFactors):
            rate = rate / scaling.factors[i]
        rates.append(rate)
    turn = np.exp(1j * np.outer(positions, rates))[:, None, :]
    if config.rope_interleaved:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
        return out
    z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def dense_logits(params: Any, config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """float64 logits [len(tokens), vocab_size] of one text from position 0."""

    def get(tree: dict[str, Any], name: str) -> np.ndarray:
        return np.asarray(tree[name]).astype(np.float64)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    n = len(tokens)
    positions = np.arange(n)
    x = get(params, "embed")[np.asarray(tokens)]
    for layer in range(config.num_layers):
        w = {name: get(params["layers"], name)[layer] for name in params["layers"]}
        h = norm(x, w["attn_norm"])
        q, k, v = (h @ w[f"{c}_proj"].T + w.get(f"{c}_bias", 0.0) for c in "qkv")
        q = rotate(q.reshape(n, config.num_qo_heads, -1), positions, config)
        k = rotate(k.reshape(n, config.num_kv_heads, -1), positions, config)
        v = v.reshape(n, config.num_kv_heads, -1)
        out = np.zeros((n, config.num_qo_heads, config.head_dim))
        window = config.layer_windows[layer] if config.layer_windows else None
        for t in range(n):
            first = 0 if window is None else max(0, t - window + 1)
            for head in range(config.num_qo_heads):
                kv = head * config.num_kv_heads // config.num_qo_heads
                s = k[first : t + 1, kv] @ q[t, head] / math.sqrt(config.head_dim)
                p = np.exp(s - s.max())
                out[t, head] = p @ v[first : t + 1, kv] / p.sum()
        x = x + out.reshape(n, -1) @ w["o_proj"].T + w.get("o_bias", 0.0)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate_proj"].T + w.get("gate_bias", 0.0)
        up = h @ w["up_proj"].T + w.get("up_bias", 0.0)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"].T + w.get("down_bias", 0.0)
    head_weight = get(params, "embed" if config.tie_embeddings else "lm_head")
    return norm(x, get(params, "final_norm")) @ head_weight.T


def greedy(params: Any, config: LlamaConfig, prompt: list[int], max_tokens: int) -> list[int]:
    """Tokens that greedy decoding with the dense forward pass generates."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(dense_logits(params, config, tokens)[-1].argmax()))
        if tokens[-1] in config.eos_ids:
            break
    return tokens[len(prompt) :]


def draw_weights(config: LlamaConfig) -> dict[str, Any]:
    """Numpy weights for a loader's test to write to a file and find again."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in model_shapes(config).items()
    }
    weights["layers"] = {
        name: rng.standard_normal((config.num_layers, *shape)).astype(np.float32)
        for name, shape in layer_shapes(config).items()
    }
    return weights


def assert_same_weights(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Same names and same bits."""
    assert got.keys() == want.keys() and got["layers"].keys() == want["layers"].keys()
    for name in want.keys() - {"layers"}:
        np.testing.assert_array_equal(got[name], want[name])
    for name in want["layers"]:
        np.testing.assert_array_equal(got["layers"][name], want["layers"][name])
