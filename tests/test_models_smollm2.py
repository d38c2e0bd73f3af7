"""SmolLM2-135M-Instruct end to end: a real model's tokens, engine and reference, alone and together.

Marked `model`: the weights are fetched once into the cache folder.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.models import Completion, Generator, Model, Sampling, load_model
from jaxinfer.models.llama import forward, logits, make_plans, new_pools

pytestmark = pytest.mark.model

LENGTHS = (1, 2, 16, 17, 33, 100, 257, 600)  # around pages of 16 tokens and chunks of 256
MAX_TOKENS = 128
TEXT = (
    "The history of the lighthouse begins long before the first tower was built. Sailors who came home "
    "in the dark looked for fires that their families lit on the cliffs, and merchants paid for those "
    "fires with a share of what they carried. A fire on the ground is hard to see from far away, so "
    "people put it on a platform of stones, and then on a tower. The tower of Alexandria was about one "
    "hundred metres high. Nobody knows exactly how its light was made. Some writers speak of a mirror "
    "of polished bronze, others of burning oil. "
)


@functools.cache
def model() -> Model:
    return load_model(progress=False)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokens = model().tokenizer.encode(TEXT * 8)  # type: ignore[union-attr]
    return tuple(tuple(tokens[7 * i : 7 * i + n]) for i, n in enumerate(LENGTHS))


@functools.cache
def generator(implementation: str | None) -> Generator:
    return Generator(model(), max_batch=8, num_pages=8 * 46, max_seq_len=736, implementation=implementation)


@functools.cache
def together() -> tuple[Completion, ...]:
    return tuple(generator(None).generate(prompts(), max_tokens=MAX_TOKENS, ignore_eos=True))


def test_paris() -> None:
    """The text a person expects, plain and as a chat; the rotary pairs of GGUF files show here."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    plain, chat = generator(None).generate(["The capital of France is", messages], max_tokens=24)
    assert plain.text.startswith(" Paris")
    assert chat.text == "The capital of France is Paris." and chat.finish_reason == "stop"


def test_engine_is_reference() -> None:
    """8 prompts of 1 to 600 tokens, 128 greedy tokens each, token for token."""
    reference = generator("reference").generate(prompts(), max_tokens=MAX_TOKENS, ignore_eos=True)
    for length, got, want in zip(LENGTHS, together(), reference, strict=True):
        assert len(got.tokens) == MAX_TOKENS
        assert got.tokens == want.tokens, f"prompt of {length} tokens"
    assert generator(None).num_traces == generator("reference").num_traces == {"mixed": 1, "decode": 1}


@pytest.mark.parametrize("index", range(8), ids=lambda index: f"{LENGTHS[index]} tokens")
def test_alone_is_together(index: int) -> None:
    """The same tokens when a prompt runs alone."""
    (alone,) = generator(None).generate([prompts()[index]], max_tokens=MAX_TOKENS, ignore_eos=True)
    assert alone.tokens == together()[index].tokens


def test_perplexity() -> None:
    """Of ordinary English: a wrong rotary pairing, window or scale makes it many times larger."""
    tokens = np.asarray(prompts()[6], np.int32)
    pages = -(-len(tokens) // 16)
    layout = jaxinfer.from_block_table(np.arange(pages)[None], [len(tokens)], [0, len(tokens)], 16)
    config, dtype = model().config, model().dtype

    @jax.jit
    def run(params, tokens, layout, plans, k, v):  # type: ignore[no-untyped-def]
        return logits(params, forward(params, config, tokens, layout, plans, k, v)[0])

    pools = new_pools(config, pages, 16, dtype)
    out = run(model().params, tokens, layout, make_plans(config, layout, dtype), *pools)
    loss = -np.asarray(jax.nn.log_softmax(out))[np.arange(len(tokens) - 1), tokens[1:]].mean()
    assert np.exp(loss) < 12


def test_seeds_reproduce_beside_other_requests() -> None:
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=42)
    prompt = "Once upon a time"
    (alone,) = generator(None).generate([prompt], max_tokens=16, sampling=sampling)
    for i, mate in enumerate(prompts()[:3]):
        generator(None).submit(mate, max_tokens=8, sampling=Sampling(1.0, seed=i))
    (beside,) = generator(None).generate([prompt], max_tokens=16, sampling=sampling)
    assert beside == alone
