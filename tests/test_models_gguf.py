"""GGUF files and their metadata, on small files written here: right values, and every refusal's message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_oracle import assert_same_weights, draw_weights, tiny_config

from jaxinfer.models import LlamaConfig
from jaxinfer.models.gguf_file import GgufFile
from jaxinfer.models.gguf_loader import config_from_gguf, load_gguf
from jaxinfer.models.params import check_dtype
from jaxinfer.rope import FrequencyFactors

GGUF_OUTER = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def write_gguf(
    path: Path,
    config: LlamaConfig,
    weights: dict[str, Any],
    *,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    skip: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    numbers: dict[str, Any] = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_qo_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
    }
    for key, value in (numbers | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    tensors = {f"{GGUF_OUTER[name]}.weight": weights[name] for name in weights.keys() - {"layers"}}
    for name, stacked in weights["layers"].items():
        stem, kind = name.rsplit("_", 1)
        where = GGUF_LAYER.get(name) or GGUF_LAYER[stem]
        for layer, tensor in enumerate(stacked):
            tensors[f"blk.{layer}.{where}.{'bias' if kind == 'bias' else 'weight'}"] = tensor
    for name, tensor in (tensors | (extra or {})).items():
        if name != skip:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_file(tmp_path: Path, arch: str) -> None:
    config = tiny_config(
        rope_interleaved=arch == "llama",
        qkv_bias=arch == "qwen2",
        tie_embeddings=arch == "llama",
        rms_norm_eps=2.0**-17,  # float32 holds it exactly
        eos_ids=(3, 4),
        bos_id=1,
    )
    weights = draw_weights(config)
    ids = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 4,
    }
    path = write_gguf(tmp_path / "m.gguf", config, weights, arch=arch, metadata=ids)
    got_config, got, metadata = load_gguf(path)
    assert got_config == config
    assert_same_weights(got, weights)
    assert metadata["tokenizer.ggml.eos_token_id"] == 3
    _, half, _ = load_gguf(path, jnp.bfloat16)
    np.testing.assert_array_equal(half["embed"], weights["embed"].astype(ml_dtypes.bfloat16))


def test_gguf_rope_factors_and_window(tmp_path: Path) -> None:
    config = tiny_config()
    factors = np.asarray([1, 1, 1, 1.5, 2, 4, 8, 8], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        draw_weights(config),
        metadata={"llama.attention.sliding_window": 7, "llama.expert_count": 0},
        extra={"rope_freqs.weight": factors},
    )
    got = load_gguf(path)[0]
    assert got.rope_scaling == FrequencyFactors((1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0))
    assert got.layer_windows == (7, 7, 7)


@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16]
)
def test_gguf_quantised_tensors(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Stored blocks come back as floats within half a step of what went in, rows and columns in place."""
    rng = np.random.default_rng(1)
    values = rng.uniform(-1, 1, (6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GgufFile(tmp_path / "t.gguf").read("t")
    step = {"Q4_1": 2 / 15, "Q8_0": 1 / 127, "F16": 2**-11}[kind.name]
    assert got.shape == (6, 64) and got.dtype == np.float32
    np.testing.assert_allclose(got, values, atol=0.55 * step)


def test_gguf_metadata_types(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.strings", ["x", "é", ""])
    writer.add_bool("a.flag", True)
    writer.add_float64("a.double", math.pi)
    writer.add_int64("a.long", -(2**40))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["a.ints"] == [1, -2, 3] and metadata["a.strings"] == ["x", "é", ""]
    assert metadata["a.flag"] is True and metadata["a.double"] == math.pi and metadata["a.long"] == -(2**40)


def test_gguf_truncated_file(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, draw_weights(config))
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])  # the last tensor ends at most 31 padding bytes before the end of the file
    match = (
        rf"m.gguf: tensor '.*' ends at byte \d+, but the file has {len(whole) - 64} bytes: it is truncated"
    )
    with pytest.raises(ValueError, match=match):
        load_gguf(path)
    path.write_bytes(whole[:200])
    with pytest.raises(ValueError, match=r"header needs byte \d+, but the file has 200 bytes"):
        load_gguf(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="4 bytes, expected at least the 24"):
        load_gguf(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ValueError, match=r"begins with b'PKUF', expected b'GGUF'"):
        load_gguf(path)
    path.write_bytes(whole[:4] + b"\x00\x00\x00\x03" + whole[8:])  # big-endian version word
    with pytest.raises(ValueError, match="GGUF version 50331648, expected 2 or 3"):
        load_gguf(path)


def test_gguf_wrong_tensors(tmp_path: Path) -> None:
    config = tiny_config()
    weights, path = draw_weights(config), tmp_path / "m.gguf"
    write_gguf(path, config, weights, skip="blk.2.ffn_down.weight")
    with pytest.raises(ValueError, match=r"lacks 1 of 30 tensors, such as 'blk.2.ffn_down.weight'"):
        load_gguf(path)
    write_gguf(path, config, weights, extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ValueError, match=r"does not use, such as 'blk.0.attn_q_norm.weight'"):
        load_gguf(path)
    write_gguf(path, config, weights, extra={"blk.1.attn_v.weight": np.ones((32, 39), np.float32)})
    with pytest.raises(ValueError, match=r"'blk.1.attn_v.weight' has shape \(32, 39\), expected \(32, 40\)"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, NotImplementedError, r"llama.rope.scaling.type 'yarn'"),
        (
            {"llama.rope.scaling.factor": 4.0},
            NotImplementedError,
            r"llama.rope.scaling.factor 4.0 without a type",
        ),
        ({"llama.expert_count": 8}, NotImplementedError, r"llama.expert_count 8; supported: 0"),
        ({"llama.attention.clamp_kqv": 8.0}, NotImplementedError, r"llama.attention.clamp_kqv 8.0"),
        ({"llama.logit_scale": 0.5}, NotImplementedError, r"llama.logit_scale 0.5"),
        ({"llama.mystery": 1}, NotImplementedError, r"llama.mystery 1 is not supported"),
        ({"llama.rope.dimension_count": 8}, NotImplementedError, r"rope.dimension_count 8; supported: .* 16"),
        ({"llama.attention.value_length": 8}, NotImplementedError, r"attention.value_length 8"),
        ({"llama.feed_forward_length": [56, 56, 40]}, NotImplementedError, "differs between layers"),
        ({"llama.context_length": None}, ValueError, r"lacks llama.context_length"),
        ({"split.count": 2}, NotImplementedError, r"split.count 2; supported: one file"),
    ],
)
def test_gguf_config_refusals(
    tmp_path: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = tiny_config(num_layers=1, layer_windows=None)
    path = write_gguf(tmp_path / "m.gguf", config, draw_weights(config), metadata=metadata)
    with pytest.raises(error, match=f"m.gguf: .*{message}"):
        config_from_gguf(GgufFile(path))


def test_gguf_unknown_architecture(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, draw_weights(config), arch="gemma2")
    with pytest.raises(NotImplementedError, match=r"general.architecture 'gemma2'; supported: llama, qwen2"):
        load_gguf(path)


def test_dtypes() -> None:
    assert check_dtype("bfloat16") == jnp.bfloat16 and check_dtype(jnp.float32) == np.float32
    with pytest.raises(ValueError, match="dtype: got int32, expected float32 or bfloat16"):
        check_dtype(np.int32)
