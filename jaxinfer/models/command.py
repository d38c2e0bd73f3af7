"""The `generate` command: loads a model, runs all prompts in one batch, prints the texts as they grow.

Arguments are parsed in cli.py; batching and sampling are generate.py's business.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from jaxinfer.models.generate import Event, Generator, Prompt
from jaxinfer.models.model import Model, load_model
from jaxinfer.models.sampling import Sampling


def generate(args: argparse.Namespace) -> int:
    """Runs `python -m jaxinfer generate` and returns the exit status."""
    if args.temperature is None and (args.top_k is not None or args.top_p is not None):
        raise ValueError("--top-k and --top-p need --temperature: without it the most likely token is taken")
    samplings = [
        Sampling(args.temperature, args.top_k, args.top_p, args.seed + index)
        for index in range(len(args.prompts))
    ]
    if args.model is None:
        _need_packages("gguf", "tokenizers")  # before 93 MB are fetched
    model = load_model(args.model, args.dtype)
    prompts = [_prompt(text, args.chat) for text in args.prompts]
    generator = _generator(model, prompts, args)
    ids = [
        generator.submit(prompt, max_tokens=args.max_tokens, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    start, first, count = time.perf_counter(), 0.0, 0

    def events() -> Iterator[Event]:
        nonlocal first, count
        for event in generator.stream():
            first = first or time.perf_counter() - start
            count += 1
            yield event

    for piece in ordered_text(events(), ids, args.prompts, chat=args.chat):
        print(piece, end="", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{count} tokens in {seconds:.1f} s, compilation included (the first after {first:.1f} s)",
        file=sys.stderr,
    )
    return 0


def ordered_text(
    events: Iterable[Event], ids: Sequence[int], prompts: Sequence[str], *, chat: bool
) -> Iterator[str]:
    """Pieces of standard output: one text after the other, in order of the prompts, as early as they can be.

    The first unfinished request's text is passed on as it comes; what others say is kept until their turn.
    """
    several = len(ids) > 1
    kept: dict[int, list[str]] = {i: [] for i in ids}
    finished: set[int] = set()
    turn = 0

    def heading(index: int) -> str:
        prompt = prompts[index]
        title = f"[{index + 1}/{len(ids)}] " if several else ""
        return title + (f"{prompt}\n" if chat and several else "" if chat else prompt)

    yield heading(0)
    for event in events:
        kept[event.request_id].append(event.text)
        if event.finish_reason is not None:
            finished.add(event.request_id)
        while turn < len(ids):
            pieces = kept[ids[turn]]
            yield from filter(None, pieces)
            pieces.clear()
            if ids[turn] not in finished:
                break
            turn += 1
            yield "\n"
            if turn < len(ids):
                yield "\n" + heading(turn)


def _prompt(text: str, chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if chat else text


def _generator(model: Model, prompts: Sequence[Prompt], args: argparse.Namespace) -> Generator:
    """A generator whose cache holds the longest of these prompts `max_batch` times."""
    tokenizer = model.tokenizer
    assert tokenizer is not None  # load_model always finds one or raises
    lengths = [len(tokenizer.encode(p) if isinstance(p, str) else tokenizer.chat(p)) for p in prompts]  # type: ignore[arg-type]
    max_batch = min(args.max_batch, len(prompts))
    longest = max(lengths) + args.max_tokens
    if longest > model.config.max_position:
        raise ValueError(
            f"the longest prompt has {max(lengths)} tokens; with --max-tokens {args.max_tokens} that is more "
            f"than the model's context of {model.config.max_position}"
        )
    # A step over the prompts costs as much as its capacity, whatever is in it.
    chunk_tokens = min(256, -(-sum(lengths) // 16) * 16)
    return Generator(
        model,
        max_batch=max_batch,
        page_size=args.page_size,
        num_pages=max_batch * -(-longest // args.page_size),
        max_seq_len=longest,
        chunk_tokens=max(chunk_tokens, max_batch),
        implementation=args.implementation,
    )


def _need_packages(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
