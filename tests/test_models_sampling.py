"""Sampling against sets and frequencies worked out in numpy."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer.models.sampling import Sampling, SamplingRows, _passes, sample

VOCAB = 12


def allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Tokens that may be drawn, by sorting; logits without near ties."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    order = np.argsort(-scaled)[: sampling.top_k]
    p = np.exp(scaled[order] - scaled[order[0]])
    p /= p.sum()
    if sampling.top_p is None:
        return set(order.tolist())
    count = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
    return set(order[:count].tolist())


passes = jax.jit(_passes)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 2 * VOCAB),
    top_p=st.none() | st.floats(0.01, 1.0),
)
def test_kept_tokens(seed: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.permutation(np.linspace(-4, 4, VOCAB) + rng.uniform(0, 0.3, VOCAB)).astype(np.float32)
    sampling = Sampling(temperature, top_k, top_p)
    rows = SamplingRows.build(3, VOCAB, [(1, sampling, 0)])
    scaled = np.stack([logits, logits / np.float32(temperature), logits])
    got = np.asarray(passes(jnp.asarray(scaled), rows))
    assert got[0].all() and got[2].all()  # rows without rules
    found = set(np.flatnonzero(got[1]).tolist())
    if top_p is None:
        assert found == allowed(logits, sampling)
    else:  # a probability sum within rounding of top_p may fall on either side
        low = allowed(logits, Sampling(temperature, top_k, max(top_p - 1e-5, 1e-6)))
        high = allowed(logits, Sampling(temperature, top_k, min(top_p + 1e-5, 1.0)))
        assert low <= found <= high or found == allowed(logits, sampling)


def test_ties_are_kept_together() -> None:
    logits = jnp.asarray([[1.0, 5.0, 5.0, 5.0, -0.0, 0.0, -jnp.inf, -3.0]])
    top_1 = SamplingRows.build(1, 8, [(0, Sampling(1.0, top_k=1), 0)])
    np.testing.assert_array_equal(np.flatnonzero(passes(logits, top_1)), [1, 2, 3])
    top_p = SamplingRows.build(1, 8, [(0, Sampling(1.0, top_p=0.1), 0)])
    np.testing.assert_array_equal(np.flatnonzero(passes(logits, top_p)), [1, 2, 3])


def test_frequencies() -> None:
    """4096 seeds draw each token as often as its probability says, within five standard deviations."""
    n = 4096
    logits = np.log(np.asarray([0.5, 0.2, 0.15, 0.1, 0.05]))
    entries = [(row, Sampling(1.0, top_k=4, seed=row), 3) for row in range(n)]
    rows = SamplingRows.build(n, 5, entries)
    tokens = np.asarray(jax.jit(sample)(jnp.asarray(np.tile(logits, (n, 1)), jnp.float32), rows))
    counts = np.bincount(tokens, minlength=5)
    p = np.asarray([0.5, 0.2, 0.15, 0.1, 0.0]) / 0.95
    assert counts[4] == 0
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


def test_greedy_rows_beside_drawn_ones() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, VOCAB)), jnp.float32)
    rows = SamplingRows.build(4, VOCAB, [(2, Sampling(100.0, seed=5), 0)])
    got = np.asarray(sample(logits, rows))
    best = np.asarray(jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(np.delete(got, 2), np.delete(best, 2))
    alone = SamplingRows.build(1, VOCAB, [(0, Sampling(100.0, seed=5), 0)])
    assert got[2] == sample(logits[2:3], alone)[0]


def test_draws_differ_by_seed_and_index() -> None:
    n = 64
    logits = jnp.zeros((n, 1000), jnp.float32)
    by_index = sample(logits, SamplingRows.build(n, 1000, [(i, Sampling(1.0, seed=1), i) for i in range(n)]))
    by_seed = sample(logits, SamplingRows.build(n, 1000, [(i, Sampling(1.0, seed=i), 1) for i in range(n)]))
    assert len(set(by_index.tolist())) > n * 0.9 and len(set(by_seed.tolist())) > n * 0.9
    assert by_index[1] == by_seed[1]  # seed 1, index 1 in both


@pytest.mark.parametrize("temperature", [1e-50, 1e-40, 2e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("best", [0, 2, 3])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float, best: int) -> None:
    logits = np.array([[7.0, 5.0, 9.5, 10.0]], np.float32)
    logits[0, best] = 10.5
    rows = SamplingRows.build(1, 4, [(0, Sampling(temperature=temperature, seed=best), 0)])
    assert sample(jnp.asarray(logits), rows).tolist() == [best]


def test_numpy_temperatures_of_16_bits() -> None:
    rows = SamplingRows.build(1, 3, [(0, Sampling(temperature=np.float16(0.5)), 0)])  # warnings are errors
    assert rows.temperature.tolist() == [0.5]


def test_huge_temperatures_are_finite() -> None:
    rows = SamplingRows.build(50, 3, [(i, Sampling(temperature=1e300, seed=i), 0) for i in range(50)])
    assert set(sample(jnp.tile(jnp.array([[-9.0, 9.0, 0.0]]), (50, 1)), rows).tolist()) == {0, 1, 2}
