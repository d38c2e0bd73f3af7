"""Tokenizers from both sources, chat templates, and streaming text; with a small byte-level vocabulary."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from model_oracle import TEMPLATE, tokenizer_metadata

from jaxinfer.models.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf


def make(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(tokenizer_metadata(**changes), "m.gguf")


def names(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    listed = tokenizer_metadata()["tokenizer.ggml.tokens"]
    return [listed[token] for token in tokens]


def test_merges_digits_and_specials() -> None:
    """SmolLM splits digits one by one, so "1 2" never merges; control tokens are matched whole."""
    tokenizer = make()
    got = names(tokenizer, tokenizer.encode("hello w12<|end|>é"))
    assert got == ["hello", "Ġw", "1", "2", "<|end|>", "Ã", "©"]
    gpt2 = make(**{"tokenizer.ggml.pre": "gpt-2"})
    assert names(gpt2, gpt2.encode("hello 12")) == ["hello", "Ġ", "12"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
@given(text=st.text())
def test_text_round_trip(pre: str, text: str) -> None:
    tokenizer = make(**{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    want = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text)) == want.replace("<|begin|>", "").replace("<|end|>", "")


def test_begin_token() -> None:
    assert make(**{"tokenizer.ggml.add_bos_token": True}).encode("he")[0] == 0
    assert make(**{"tokenizer.ggml.add_bos_token": True}).encode("<|begin|>he").count(0) == 1
    assert 0 not in make().encode("he")
    assert make(**{"tokenizer.ggml.pre": "llama-bpe"}).encode("he")[0] == 0  # this family's default


def test_chat_template() -> None:
    tokenizer = make()
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.render_chat(messages) == "<|begin|>user:hello<|end|>assistant:"
    tokens = tokenizer.chat(messages)
    assert tokens[0] == 0 and tokens.count(1) == 1
    with pytest.raises(ValueError, match="refuses them: no bad roles"):
        tokenizer.render_chat([{"role": "bad", "content": ""}])
    with pytest.raises(ValueError, match="no chat template"):
        make(**{"tokenizer.chat_template": None}).chat(messages)


def test_chat_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxinfer\[models\]'"):
        make().chat([{"role": "user", "content": "x"}])


@given(st.lists(st.integers(0, len(tokenizer_metadata()["tokenizer.ggml.tokens"]) - 1)))
def test_stream_is_decode(tokens: list[int]) -> None:
    """Any tokens, valid UTF-8 or not: the pieces join to the decoded text."""
    tokenizer = make()
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens)


def test_stream_waits_for_whole_characters() -> None:
    tokenizer = make()
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("a🎉é")]
    assert pieces == ["a", "", "", "", "🎉", "", "é"]
    assert stream.push(tokenizer.encode("é")[0]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"tokenizer.ggml.model": "llama"},
            NotImplementedError,
            r"tokenizer.ggml.model 'llama'; supported: 'gpt2'",
        ),
        (
            {"tokenizer.ggml.pre": "tekken"},
            NotImplementedError,
            r"tokenizer.ggml.pre 'tekken'; supported: gpt-2",
        ),
        ({"tokenizer.ggml.token_type": [1]}, ValueError, r"token_type has 1 entries for 264 tokens"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"m.gguf: .*{message}"):
        make(**changes)


def test_hf_folder(tmp_path: Path) -> None:
    gguf = make()
    (tmp_path / "tokenizer.json").write_text(gguf._backend.to_str())
    config = {
        "bos_token": {"content": "<|begin|>"},
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "other", "template": "x"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_hf(tmp_path)
    assert tokenizer.encode("hello") == [0, *gguf.encode("hello")]
    assert tokenizer.render_chat([{"role": "user", "content": "q"}]) == "<|begin|>user:q<|end|>assistant:"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert tokenizer_from_hf(tmp_path).render_chat([{"role": "user", "content": "q"}]) == "q!"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"lacks tokenizer.json"):
        tokenizer_from_hf(tmp_path)
