"""Text to tokens and back: from GGUF metadata or a Hugging Face `tokenizer.json`, chat templates, streaming
text.

Needs the `tokenizers` package; chat templates need `jinja2`. Both come with `pip install jaxinfer[models]`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4  # ggml token types that are matched before any splitting


class Tokenizer:
    """`encode`, `decode`, `chat`, `stream`. `bos_id` is put before plain prompts when `add_bos` says so."""

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: str | None = None,
        bos_id: int | None = None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}
        self._bos = [bos_id] if add_bos and bos_id is not None else []

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the begin token where the model wants one."""
        tokens = list(self._backend.encode(text, add_special_tokens=True).ids)
        return tokens if tokens[: len(self._bos)] == self._bos else self._bos + tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """An incremental decoder for one text."""
        return TextStream(self)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation in the model's chat template, ending where the assistant is to speak.

        `messages`: mappings with "role" and "content". ValueError if the model has no template, ImportError
        if jinja2 is not installed.
        """
        if self._chat_template is None:
            raise ValueError("messages: this model has no chat template; give a plain prompt")
        return list(self._backend.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation in the model's chat template."""
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError:
            raise ImportError("chat templates need jinja2: pip install 'jaxinfer[models]'") from None

        def raise_exception(message: str) -> None:
            raise ValueError(f"messages: the chat template refuses them: {message}")

        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.globals.update(
            raise_exception=raise_exception, strftime_now=lambda form: datetime.datetime.now().strftime(form)
        )
        env.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
        template = env.from_string(self._chat_template or "")
        return str(template.render(messages=list(messages), add_generation_prompt=True, **self._specials))


class TextStream:
    """Turns tokens into text pieces whose concatenation is the decoded text, whatever way tokens cut
    characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens [context, sent) are emitted already and decoded again, for decoders that look at neighbours;
        # both lie on character borders.
        self._context = self._sent = 0

    def push(self, token: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        self._tokens.append(token)
        return self._emit(final=False)

    def finish(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._sent])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\ufffd") and not final:
            return ""
        self._context, self._sent = self._sent, len(self._tokens)
        return text[len(before) :]


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The byte-level BPE tokenizer in a GGUF file's metadata; NotImplementedError, with the name, for other
    kinds.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise NotImplementedError(
            f"{source}: tokenizer.ggml.model {kind!r}; supported: 'gpt2' (byte-level BPE)"
        )
    if pre not in _PRE_TOKENIZERS:
        raise NotImplementedError(
            f"{source}: tokenizer.ggml.pre {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    merges = [
        (left, right) for left, right in (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    splits: dict[str, list[Any]] = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated")],
    }
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits[pre], byte_level])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    return Tokenizer(
        backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_id=bos,
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
    )


def tokenizer_from_hf(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, and `tokenizer_config.json` for the chat
    template.
    """
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: lacks tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every kind of damage
        raise ValueError(f"{path}: cannot be read ({error})") from None
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template_path.is_file():
        template = template_path.read_text(encoding="utf-8")

    def text(name: str) -> str:
        value = config.get(name)
        return str(value["content"] if isinstance(value, dict) else value or "")

    bos = text("bos_token")
    return Tokenizer(
        backend,
        chat_template=template,
        bos_id=backend.token_to_id(bos) if bos else None,
        bos_token=bos,
        eos_token=text("eos_token"),
        add_bos=bool(config.get("add_bos_token")),
    )
