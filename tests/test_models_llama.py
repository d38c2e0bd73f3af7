"""The Llama forward pass and RoPE against float64 numpy and closed forms; not loading, not serving."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import assert_close
from model_oracle import dense_logits, tiny_config

import jaxinfer
from jaxinfer.models import LlamaConfig, init_params
from jaxinfer.models.llama import forward, logits, make_plans, new_pools, variants
from jaxinfer.models.params import unstack_layers
from jaxinfer.rope import FrequencyFactors, Llama3Scaling, apply_rope, rope_cos_sin, rope_frequencies

PAGE, PAGES_PER_ROW, NUM_PAGES, ROWS, CAPACITY = 4, 6, 30, 3, 24
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
FAMILIES = {
    "llama": {},
    "gguf": {"rope_interleaved": True, "tie_embeddings": True},
    "qwen2": {"qkv_bias": True, "rope_theta": 10000.0},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama3 scaling": {"rope_scaling": LLAMA3, "tie_embeddings": True},
    "factors": {
        "rope_interleaved": True,
        "rope_scaling": FrequencyFactors((1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)),
    },
    "one window": {"layer_windows": (5, 5, 5)},
    "alternating windows": {"layer_windows": (None, 1, 6)},
}


@functools.cache
def compiled(config: LlamaConfig, implementation: str | None) -> Any:
    attention = functools.partial(jaxinfer.attention, implementation=implementation)

    def step(params, tokens, layout, plans, k, v):  # type: ignore[no-untyped-def]
        hidden, k, v = forward(params, config, tokens, layout, plans, k, v, attention=attention)
        return logits(params, hidden), k, v

    return jax.jit(step)


def run(
    params: Any,
    config: LlamaConfig,
    pools: tuple[jax.Array, jax.Array],
    table: np.ndarray,
    cached: list[int],
    new: list[list[int]],
    implementation: str | None = None,
) -> tuple[list[np.ndarray], tuple[jax.Array, jax.Array]]:
    """One step of fixed capacity: row r appends tokens new[r] behind cached[r] others; logits per row."""
    counts = np.asarray([len(tokens) for tokens in new])
    kv_len = np.where(counts > 0, np.asarray(cached) + counts, 0)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    table = table.copy()
    for row in range(ROWS):  # absurd ids behind the used range
        table[row, -(-kv_len[row] // PAGE) :] = 2_147_480_000
    layout = jaxinfer.from_block_table(table, kv_len, indptr, PAGE, num_tokens=CAPACITY)
    tokens = np.full(CAPACITY, config.vocab_size - 1, np.int32)
    tokens[: indptr[-1]] = np.concatenate([np.asarray(t, np.int32) for t in new])
    dtype = np.dtype(params["embed"].dtype)
    plans = make_plans(config, layout, dtype)
    out, *pools_out = compiled(config, implementation)(params, tokens, layout, plans, *pools)
    out = np.asarray(out)
    return [out[indptr[r] : indptr[r + 1]] for r in range(ROWS)], (pools_out[0], pools_out[1])


def poisoned_pools(config: LlamaConfig, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    k, v = new_pools(config, NUM_PAGES, PAGE, np.dtype(dtype))
    return k + jnp.nan, v + jnp.nan


def shuffled_table() -> np.ndarray:
    pages = np.random.default_rng(5).permutation(NUM_PAGES)
    return pages[: ROWS * PAGES_PER_ROW].reshape(ROWS, PAGES_PER_ROW).astype(np.int32)


def draw_texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, n).tolist() for n in (13, 9, 1)]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((family, None) for family in FAMILIES), ("llama", "reference"), ("alternating windows", "reference")],
)
def test_forward_is_the_dense_model(family: str, implementation: str | None) -> None:
    check_forward(family, implementation, lambda params: params)


@pytest.mark.parametrize("family", ["llama", "all biases", "alternating windows"])
def test_layers_in_a_list(family: str) -> None:
    check_forward(family, None, unstack_layers)


def check_forward(family: str, implementation: str | None, prepare: Callable[[Any], Any]) -> None:
    """Prefill, a chunk, then decode steps, three texts side by side in a pool full of NaN."""
    config = tiny_config(**FAMILIES[family])
    params = init_params(config, jax.random.key(1))
    texts, table = draw_texts(), shuffled_table()
    want = [dense_logits(params, config, text) for text in texts]
    params = prepare(params)
    pools = poisoned_pools(config)
    cuts = ([0, 0, 0], [9, 4, 0], [12, 8, 0], [13, 9, 1])
    got: list[list[np.ndarray]] = [[], [], []]
    for begin, end in itertools.pairwise(cuts):
        new = [text[b:e] for text, b, e in zip(texts, begin, end, strict=True)]
        out, pools = run(params, config, pools, table, begin, new, implementation)
        for row in range(ROWS):
            got[row].append(out[row])
    for row in range(ROWS):
        assert_close(np.concatenate(got[row]), want[row], rtol=0, atol=2e-5)


def test_prefill_is_prefill_then_decode() -> None:
    """Six tokens at once, or five and then one: the sixth has position 5 both times."""
    config = tiny_config()
    params = init_params(config, jax.random.key(2))
    text, table = [7, 1, 2, 9, 30, 11], shuffled_table()
    whole, _ = run(params, config, poisoned_pools(config), table, [0, 0, 0], [[], text, []])
    first, pools = run(params, config, poisoned_pools(config), table, [0, 0, 0], [[], text[:5], []])
    last, _ = run(params, config, pools, table, [0, 5, 0], [[], text[5:], []])
    assert_close(np.concatenate([first[1], last[1]]), whole[1], rtol=0, atol=1e-5)


def test_shared_prefix_pages_keep_their_positions() -> None:
    """Two texts share the pages of a common prefix of 8 tokens; each continues at position 8."""
    config = tiny_config()
    params = init_params(config, jax.random.key(4))
    prefix, table = draw_texts()[0][:8], shuffled_table()
    table[1, :2] = table[0, :2]
    _, pools = run(params, config, poisoned_pools(config), table, [0, 0, 0], [prefix, [], []])
    out, _ = run(params, config, pools, table, [8, 8, 0], [[3, 4], [50], []])
    assert_close(out[0], dense_logits(params, config, [*prefix, 3, 4])[8:], rtol=0, atol=2e-5)
    assert_close(out[1], dense_logits(params, config, [*prefix, 50])[8:], rtol=0, atol=2e-5)


def test_bfloat16_weights_and_cache() -> None:
    config = tiny_config()
    params = init_params(config, jax.random.key(1), jnp.bfloat16)
    texts = draw_texts()
    pools = poisoned_pools(config, jnp.bfloat16)
    out, pools = run(params, config, pools, shuffled_table(), [0, 0, 0], texts)
    assert pools[0].dtype == jnp.bfloat16
    for row, text in enumerate(texts):
        want = dense_logits(params, config, text)
        assert np.linalg.norm(out[row] - want) < 0.03 * np.linalg.norm(want)


def test_variants_of_windows() -> None:
    config = tiny_config(layer_windows=(None, 1, None))
    assert config.windows == (None, 1) and config.window_index == (0, 1, 0)
    full, one = variants(config)
    assert full.causal and full.window_left is None
    assert one.causal and one.window_left == 0  # a window of one token is the token itself


def test_forward_wants_one_plan_per_window() -> None:
    config = tiny_config(layer_windows=(None, 1, None))
    layout = jaxinfer.from_block_table([[0]], [1], [0, 1], PAGE)
    params = init_params(config, jax.random.key(0))
    plans = make_plans(config, layout, np.dtype(np.float32))[:1]
    pools = new_pools(config, 1, PAGE, np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"plans: got 1, expected one for each of the windows \(None, 1\)"):
        forward(params, config, jnp.zeros(1, jnp.int32), layout, plans, *pools)


def test_rope_closed_form() -> None:
    """Head dim 2, position 5: the unit vector turns by 5 radians, whichever lanes are paired."""
    cos, sin = rope_cos_sin(np.asarray([5], np.int32), rope_frequencies(2, 10000.0))
    assert_close([cos[0, 0], sin[0, 0]], [0.283662, -0.958924], atol=1e-6)
    for interleaved in (False, True):
        turned = apply_rope(jnp.asarray([[[1.0, 0.0]]]), cos, sin, interleaved=interleaved)
        assert_close(turned[0, 0], [0.283662, -0.958924], atol=1e-6)


def test_rope_pairs() -> None:
    """Which lanes turn together: (0, 1), (2, 3) when interleaved, (0, 2), (1, 3) when half-split."""
    cos, sin = jnp.asarray([[0.0, 1.0]]), jnp.asarray([[1.0, 0.0]])  # a quarter turn of pair 0
    x = jnp.asarray([[[1.0, 2.0, 3.0, 4.0]]])
    np.testing.assert_array_equal(apply_rope(x, cos, sin, interleaved=True)[0, 0], [-2.0, 1.0, 3.0, 4.0])
    np.testing.assert_array_equal(apply_rope(x, cos, sin, interleaved=False)[0, 0], [-3.0, 2.0, 1.0, 4.0])


def test_llama3_frequencies_closed_form() -> None:
    """Wavelengths of 8, 32 and 128 tokens around an original context of 64: kept, blended, divided."""
    head_dim = 6
    theta = 4.0 ** (head_dim / 2)  # each frequency is a quarter of the one before
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    base = rope_frequencies(head_dim, theta)
    assert_close(base, [1.0, 0.25, 0.0625], rtol=1e-6)
    wavelengths = 2 * math.pi / base  # 6.28, 25.1, 100.5
    got = rope_frequencies(head_dim, theta, scaling)
    blend = (64 / wavelengths[1] - 1.0) / 3.0
    assert_close(got, [1.0, 0.25 * (blend + (1 - blend) / 8), 0.0625 / 8], rtol=1e-6)


def test_long_positions_are_exact() -> None:
    """At position 131071 the float32 angle is right to its own rounding (2**-24 relative, 0.008 rad)."""
    frequencies = rope_frequencies(64, 500000.0)
    cos, _ = rope_cos_sin(np.asarray([131071], np.int32), frequencies)
    want = np.cos(131071 * frequencies.astype(np.float64))
    assert_close(cos[0], want, atol=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope_frequencies(7, 1e4), "head_dim: got 7, expected an even number"),
        (
            lambda: rope_frequencies(8, 1e4, FrequencyFactors((1.0,))),
            "factors: got 1, expected head_dim / 2 = 4",
        ),
        (lambda: Llama3Scaling(0.0, 1.0, 4.0, 64), "factor: got 0.0"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 64), "got 4.0 and 4.0, expected 0 < low"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_max_position: got 0"),
        (
            lambda: apply_rope(jnp.zeros((2, 1, 4)), jnp.zeros((2, 1)), jnp.zeros((2, 1)), interleaved=False),
            r"got \(2, 1, 4\), \(2, 1\), \(2, 1\)",
        ),
        (lambda: tiny_config(num_kv_heads=4), "num_qo_heads: got 6, expected a multiple of num_kv_heads 4"),
        (lambda: tiny_config(head_dim=15), "head_dim: got 15, expected an even"),
        (lambda: tiny_config(num_layers=0), "num_layers: got 0, expected an integer of at least 1"),
        (lambda: tiny_config(vocab_size=2.5), "vocab_size: got 2.5"),
        (lambda: tiny_config(rms_norm_eps=0.0), "rms_norm_eps: got 0.0"),
        (lambda: tiny_config(layer_windows=(1,)), "layer_windows: got 1 entries, expected num_layers 3"),
        (lambda: tiny_config(layer_windows=(1, 0, None)), r"layer_windows\[1\]: got 0"),
        (lambda: tiny_config(eos_ids=(97,)), r"got token 97, expected \[0, 97\)"),
        (
            lambda: init_params(tiny_config(), jax.random.key(0), jnp.float16),
            "got float16, expected float32",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
