"""`LlamaConfig` from a Hugging Face `config.json`. A key that would change the math and is not supported is
refused by name; a key nobody here knows is refused too, because ignoring it might mean computing another
model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.models.config import LlamaConfig, words
from jaxinfer.rope import Llama3Scaling

# model_type -> the one architecture class whose math this is
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# Read below.
_READ = words(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling "
    "rope_parameters max_position_embeddings attention_bias mlp_bias tie_word_embeddings bos_token_id "
    "eos_token_id sliding_window use_sliding_window max_window_layers layer_types"
)

# Change the math unless they hold one of the listed values (None always counts as absent).
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "auto_map": (),
}

# Say nothing about the forward pass (training, file format, defaults of text generation, bookkeeping).
_HARMLESS = words(
    "torch_dtype dtype transformers_version use_cache initializer_range attention_dropout hidden_dropout "
    "resid_pdrop pad_token_id sep_token_id pretraining_tp _name_or_path is_llama_config "
    "transformers.js_config unsloth_version unsloth_fixed return_dict output_attentions "
    "output_hidden_states _attn_implementation _attn_implementation_autoset id2label label2id "
    "task_specific_params problem_type chunk_size_feed_forward finetuning_task is_decoder "
    "decoder_start_token_id prefix tokenizer_class tie_encoder_decoder temperature top_k top_p typical_p "
    "do_sample max_length min_length num_beams num_beam_groups diversity_penalty length_penalty "
    "repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "exponential_decay_length_penalty early_stopping bad_words_ids begin_suppress_tokens suppress_tokens "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values output_scores return_dict_in_generate "
    "pruned_heads use_bfloat16 torchscript tf_legacy_loss cross_attention_hidden_size"
)


def config_from_hf(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    source: str = "config.json",
    ignore_keys: Collection[str] = (),
) -> LlamaConfig:
    """Reads a parsed `config.json` (and `generation_config.json`, whose end tokens win).

    `ignore_keys`: keys the caller vouches for as not changing the math. Raises ValueError for a missing or
    absurd value and NotImplementedError, naming the key, for a model that this code would compute wrongly.
    """

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ValueError(f"{source}: lacks {key!r}")
        return config[key]

    model_type = need("model_type")
    if model_type not in _ARCHITECTURES:
        raise NotImplementedError(
            f"{source}: model_type {model_type!r}; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    architectures = config.get("architectures")
    if architectures is not None and list(architectures) != [_ARCHITECTURES[model_type]]:
        raise NotImplementedError(
            f"{source}: architectures {architectures!r}; supported with model_type {model_type!r}: "
            f"{[_ARCHITECTURES[model_type]]!r}"
        )
    _refuse_unsupported(config, source, ignore_keys)

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"{source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None:
        if model_type != "llama":  # the others default to numbers that depend on the library version
            raise ValueError(f"{source}: lacks 'num_key_value_heads'")
        kv_heads = heads
    theta, scaling = _rope(config, source)
    attention_bias = bool(config.get("attention_bias"))
    if model_type != "llama" and attention_bias:
        raise NotImplementedError(f"{source}: attention_bias True; supported with model_type 'llama' only")
    if model_type != "llama" and config.get("mlp_bias"):
        raise NotImplementedError(f"{source}: mlp_bias True; supported with model_type 'llama' only")
    eos = (generation or {}).get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(need("rms_norm_eps")),
        rope_theta=theta,
        max_position=need("max_position_embeddings"),
        rope_scaling=scaling,
        rope_interleaved=False,  # this format stores q and k for half-split pairs
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        layer_windows=_windows(config, model_type, source),
        bos_id=config.get("bos_token_id"),
        eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _refuse_unsupported(config: Mapping[str, Any], source: str, ignore_keys: Collection[str]) -> None:
    for key, value in config.items():
        if key in ignore_keys or key in _READ or key in _HARMLESS or value is None:
            continue
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                accepted = ", ".join([*map(repr, _NEUTRAL[key]), "absent"])
                raise NotImplementedError(f"{source}: {key} {value!r}; supported: {accepted}")
        elif value is not False:
            raise NotImplementedError(
                f"{source}: unknown key {key} {value!r}; "
                "if it does not change the math, name it in ignore_keys"
            )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Llama3Scaling | None]:
    """`(theta, scaling)` from `rope_theta` + `rope_scaling`, or from the newer `rope_parameters`."""
    newer = config.get("rope_parameters")
    rope = dict((newer if newer is not None else config.get("rope_scaling")) or {})
    theta = rope.pop("rope_theta", None)
    theta = config.get("rope_theta") if theta is None else theta
    kinds = {rope.pop(key) for key in ("rope_type", "type") if rope.get(key) is not None}
    kind = kinds.pop() if kinds else "default" if not rope or newer is not None else "missing"
    name = "rope_parameters" if newer is not None else "rope_scaling"
    if kinds or kind not in ("default", "llama3"):
        raise NotImplementedError(f"{source}: {name} type {kind!r}; supported: 'default', 'llama3'")
    if rope.pop("partial_rotary_factor", None) not in (None, 1):
        raise NotImplementedError(f"{source}: partial_rotary_factor in {name}; supported: 1")
    scaling = None
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for key in names:
            if rope.get(key) is None:
                raise ValueError(f"{source}: {name} lacks {key!r}")
        factor, low, high, original = (rope.pop(key) for key in names)
        scaling = Llama3Scaling(float(factor), float(low), float(high), int(original))
    else:
        rope.pop("original_max_position_embeddings", None)
        if rope.get("factor") in (1, 1.0):
            rope.pop("factor")
    if rope:
        raise NotImplementedError(
            f"{source}: {name} keys {sorted(rope)} with type {kind!r} are not supported"
        )
    return (10000.0 if theta is None else float(theta)), scaling


def _windows(config: Mapping[str, Any], model_type: str, source: str) -> tuple[int | None, ...] | None:
    layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window")
    if model_type == "qwen2" and not config.get("use_sliding_window"):
        window = None  # this family writes a window that it does not use
    elif model_type == "llama" and window is not None:
        raise NotImplementedError(
            f"{source}: sliding_window {window} with model_type 'llama'; supported: absent"
        )
    types = config.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise NotImplementedError(
                f"{source}: layer_types {unknown}; supported: full_attention, sliding_attention"
            )
        if len(types) != layers:
            raise ValueError(f"{source}: layer_types has {len(types)} entries, num_hidden_layers is {layers}")
        if "sliding_attention" in types and window is None:
            raise ValueError(f"{source}: layer_types has sliding_attention, but sliding_window is off")
        slides = [t == "sliding_attention" for t in types]
    elif model_type == "qwen2" and window is not None:
        first = config.get("max_window_layers")
        if first is None:
            raise ValueError(f"{source}: use_sliding_window needs 'max_window_layers'")
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [window is not None] * layers
    return tuple(window if s else None for s in slides) if any(slides) else None
