"""`bench step` at toy size: what it counts and reports; not how fast anything is."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.bench import step


def test_bytes_are_weights_and_cache_once(capsys: pytest.CaptureFixture[str]) -> None:
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2)
    config = dataclasses.replace(step.LLAMA_8B, **small, num_qo_heads=4, num_kv_heads=2, head_dim=16)
    results = step.bench_step(config, ((1, 33), (3, 16)))
    attention = 32 * (64 + 2 * 32) + 64 * 32  # q, k, v and o projections
    weights = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 64 * 32  # layers, final norm, lm_head
    for result, tokens in zip(results, (33, 48), strict=True):
        assert result.num_bytes == 2 * weights + 2 * 2 * (2 * tokens * 2 * 16)
        assert result.efficiency == pytest.approx(result.read_seconds / result.step.median)
    table = capsys.readouterr().out
    assert "1 x 33" in table and "3 x 16" in table
