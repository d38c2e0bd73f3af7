"""`bench mixed` at toy size: results are checked, parts add up to the mix; not how fast anything is."""

from __future__ import annotations

import pytest

from jaxinfer.bench import mixed


def test_parts_make_the_mix(capsys: pytest.CaptureFixture[str]) -> None:
    mix = mixed.Mix(3, 40, 2, 9, 33)
    both, decode, chunks = mix.cases().values()
    assert both.kv_bytes == decode.kv_bytes + chunks.kv_bytes
    assert both.flops == decode.flops + chunks.flops
    assert both.q_len == (1, 1, 1, 9, 9)
    (result,) = mixed.bench_mixed((mix,), seconds=0.1)
    sum_of_parts = result.decode.median + result.chunks.median
    assert result.ratio == pytest.approx(result.both.median / sum_of_parts)
    assert "3 x 40 + 2 x 9 of 33" in capsys.readouterr().out


def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "expected_tokens", lambda ops, tokens: 1.0 + 0.0 * tokens[..., None, None])
    with pytest.raises(ValueError, match="relative error"):
        mixed.measure_mix(mixed.Mix(1, 5, 1, 3, 3), 0.1)
