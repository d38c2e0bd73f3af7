"""Hugging Face folders and configs, on small files written here: right values, every refusal's message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from model_oracle import assert_same_weights, draw_weights, tiny_config

from jaxinfer.models import LlamaConfig, load_model
from jaxinfer.models.hf_config import config_from_hf
from jaxinfer.models.safetensors_loader import load_hf_folder
from jaxinfer.rope import Llama3Scaling

HF_OUTER = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
HF_LAYER = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def hf_json(config: LlamaConfig, **changes: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_qo_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
    }
    return fields | changes


def hf_tensors(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors = {f"{HF_OUTER[name]}.weight": weights[name] for name in weights.keys() - {"layers"}}
    for name, stacked in weights["layers"].items():
        stem, kind = name.rsplit("_", 1)
        for layer, tensor in enumerate(stacked):
            if kind == "norm":
                where = f"{HF_LAYER[name]}.weight"
            else:
                block = "self_attn" if stem in "qkvo" else "mlp"
                where = f"{block}.{stem}_proj.{'weight' if kind == 'proj' else 'bias'}"
            tensors[f"model.layers.{layer}.{where}"] = np.ascontiguousarray(tensor)
    return tensors


def write_hf(
    folder: Path, tensors: dict[str, np.ndarray], config_json: dict[str, Any], shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    names = sorted(tensors)
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("biases", [False, True])
def test_hf_folder(tmp_path: Path, shards: int, biases: bool) -> None:
    config = tiny_config(qkv_bias=biases, o_bias=biases, mlp_bias=biases, tie_embeddings=biases)
    weights = draw_weights(config)
    tensors = hf_tensors(weights)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    if config.tie_embeddings:
        tensors["lm_head.weight"] = weights["embed"]
    write_hf(tmp_path, tensors, hf_json(config), shards)
    got_config, got = load_hf_folder(tmp_path)
    assert got_config == config
    assert_same_weights(got, weights)


def test_hf_bfloat16_and_float16_storage(tmp_path: Path) -> None:
    config = tiny_config()
    weights = draw_weights(config)
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in hf_tensors(weights).items()}
    tensors["lm_head.weight"] = weights["lm_head"].astype(np.float16)
    write_hf(tmp_path, tensors, hf_json(config))
    _, single = load_hf_folder(tmp_path, jnp.float32)
    np.testing.assert_array_equal(single["embed"], weights["embed"].astype(ml_dtypes.bfloat16).astype("f4"))
    np.testing.assert_array_equal(single["lm_head"], weights["lm_head"].astype("f2").astype("f4"))
    _, half = load_hf_folder(tmp_path, "bfloat16")
    assert {leaf.dtype for leaf in half["layers"].values()} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(half["embed"], weights["embed"].astype(ml_dtypes.bfloat16))


def test_hf_generation_config_ends_texts(tmp_path: Path) -> None:
    config = tiny_config()
    write_hf(tmp_path, hf_tensors(draw_weights(config)), hf_json(config, eos_token_id=1, bos_token_id=0))
    assert load_hf_folder(tmp_path)[0].eos_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    got = load_hf_folder(tmp_path)[0]
    assert got.eos_ids == (5, 6) and got.bos_id == 0


def test_hf_truncated_file(tmp_path: Path) -> None:
    config = tiny_config()
    write_hf(tmp_path, hf_tensors(draw_weights(config)), hf_json(config))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    match = (
        rf"model.safetensors: tensor '.*' ends at byte {len(whole)}, but the file has {len(whole) - 8} bytes"
    )
    with pytest.raises(ValueError, match=match):
        load_hf_folder(tmp_path)
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"header needs .* bytes, but the file has 100: truncated"):
        load_hf_folder(tmp_path)
    path.write_bytes((16).to_bytes(8, "little") + b"[1, 2, 3]       ")
    with pytest.raises(ValueError, match="no safetensors header"):
        load_hf_folder(tmp_path)


def test_hf_wrong_tensors(tmp_path: Path) -> None:
    config = tiny_config()
    good = hf_tensors(draw_weights(config))
    name = "model.layers.1.mlp.up_proj.weight"
    write_hf(tmp_path, {k: v for k, v in good.items() if k != name}, hf_json(config))
    with pytest.raises(ValueError, match=rf"lacks 1 of 30 tensors, such as '{name}'"):
        load_hf_folder(tmp_path)
    write_hf(tmp_path, good | {name: np.zeros((56, 41), np.float32)}, hf_json(config))
    with pytest.raises(ValueError, match=rf"tensor '{name}' has shape \(56, 41\), expected \(56, 40\)"):
        load_hf_folder(tmp_path)
    extra = "model.layers.0.self_attn.q_norm.weight"
    write_hf(tmp_path, good | {extra: np.zeros(16, np.float32)}, hf_json(config))
    with pytest.raises(ValueError, match=rf"1 tensors this model does not use, such as '{extra}'"):
        load_hf_folder(tmp_path)
    write_hf(tmp_path, good | {name: np.zeros((56, 40), np.int8)}, hf_json(config))
    with pytest.raises(NotImplementedError, match=rf"tensor '{name}' has dtype I8; supported: F32"):
        load_hf_folder(tmp_path)


def test_hf_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks config.json"):
        load_hf_folder(tmp_path)
    with pytest.raises(ValueError, match=r"neither a GGUF file nor a folder"):
        load_model(tmp_path / "nothing")
    config = tiny_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: is not valid JSON"):
        load_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_json(config)))
    with pytest.raises(ValueError, match=r"has no \*.safetensors file"):
        load_hf_folder(tmp_path)
    write_hf(tmp_path, hf_tensors(draw_weights(config)), hf_json(config), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"names 'gone.safetensors', which is not in"):
        load_hf_folder(tmp_path)
    index.write_text(
        json.dumps({"weight_map": good["weight_map"] | {"x": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(
        ValueError, match=r"places tensor 'x' in 'model-00001-of-00002.safetensors', but .* None"
    ):
        load_hf_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ({"head_dim": None, "hidden_size": 48}, {"head_dim": 8, "hidden_size": 48}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"rope_theta": 5e5},
        ),
        ({"rope_scaling": {"type": "default"}}, {}),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192)},
        ),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9},
            {"layer_windows": (9, 9, 9)},
        ),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}, {}),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": False,
                "max_window_layers": 2,
            },
            {"qkv_bias": True},
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            {"qkv_bias": True, "layer_windows": (None, None, 9)},
        ),
        (
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            {"layer_windows": (4, None, 4)},
        ),
        (
            {
                "residual_multiplier": 1.0,
                "logits_scaling": 1,
                "partial_rotary_factor": 1.0,
                "new_flag": False,
            },
            {},
        ),
    ],
)
def test_hf_config(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_from_hf(hf_json(tiny_config(), **changes)) == tiny_config(**expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"model_type": "qwen3"},
            NotImplementedError,
            "model_type 'qwen3'; supported: llama, mistral, qwen2",
        ),
        ({"model_type": None}, ValueError, "lacks 'model_type'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, NotImplementedError, "architectures"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            NotImplementedError,
            "rope_scaling type 'linear'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            NotImplementedError,
            "rope_scaling type 'yarn'",
        ),
        ({"rope_scaling": {"factor": 4.0}}, NotImplementedError, "rope_scaling type 'missing'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ValueError, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 2.0}}, NotImplementedError, "mscale"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, NotImplementedError, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act 'gelu'; supported: 'silu', absent"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor 0.5; supported: 1"),
        ({"embedding_multiplier": 12.0}, NotImplementedError, "embedding_multiplier 12.0"),
        ({"residual_multiplier": 0.2}, NotImplementedError, "residual_multiplier 0.2"),
        ({"logits_scaling": 8.0}, NotImplementedError, "logits_scaling 8.0"),
        ({"attention_multiplier": 0.01}, NotImplementedError, "attention_multiplier 0.01"),
        ({"attn_logit_softcapping": 50.0}, NotImplementedError, "attn_logit_softcapping"),
        ({"qk_norm": True}, NotImplementedError, "qk_norm True"),
        ({"num_local_experts": 8}, NotImplementedError, "num_local_experts 8"),
        ({"quantization_config": {"bits": 4}}, NotImplementedError, "quantization_config"),
        ({"auto_map": {"AutoModel": "x"}}, NotImplementedError, "auto_map"),
        ({"sliding_window": 4096}, NotImplementedError, "sliding_window 4096 with model_type 'llama'"),
        ({"layer_types": ["chunked_attention"] * 3}, NotImplementedError, "chunked_attention"),
        (
            {"layer_types": ["full_attention"]},
            ValueError,
            "layer_types has 1 entries, num_hidden_layers is 3",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, ValueError, "sliding_window is off"),
        ({"mystery": 3}, NotImplementedError, "unknown key mystery 3; .* ignore_keys"),
        ({"rms_norm_eps": None}, ValueError, "lacks 'rms_norm_eps'"),
        ({"head_dim": None, "hidden_size": 41}, ValueError, "hidden_size 41 is no multiple of .* 6"),
        (
            {"model_type": "mistral", "architectures": None, "num_key_value_heads": None},
            ValueError,
            "lacks 'num_key_value_heads'",
        ),
        (
            {"model_type": "mistral", "architectures": None, "attention_bias": True},
            NotImplementedError,
            "attention_bias True",
        ),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 4},
            ValueError,
            "needs 'max_window_layers'",
        ),
    ],
)
def test_hf_config_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"config.json: .*{message}"):
        config_from_hf(hf_json(tiny_config(), **changes))


def test_hf_unknown_key_can_be_vouched_for() -> None:
    got = config_from_hf(hf_json(tiny_config(), mystery=3), ignore_keys=("mystery",))
    assert got == tiny_config()
