"""The generator on a tiny random model: right tokens whatever shares the batch, two programs, no copies."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import greedy, tiny_config, tokenizer_metadata

from jaxinfer.models import Completion, Event, Generator, Model, Sampling, init_params
from jaxinfer.models.tokenizer import tokenizer_from_gguf

ENDS = tuple(range(1, 264, 24))  # so that some texts end early
SIZES: dict[str, Any] = {"max_batch": 3, "page_size": 4, "num_pages": 24, "chunk_tokens": 8}


@functools.cache
def tiny_model(**changes: Any) -> Model:
    config = tiny_config(vocab_size=264, eos_ids=ENDS, **changes)
    tokenizer = tokenizer_from_gguf(tokenizer_metadata(), "test")
    return Model(config, init_params(config, jax.random.key(7)), tokenizer)


@functools.cache
def shared_generator() -> Generator:
    """Compiled once for the tests that only look at tokens; each leaves it idle."""
    return Generator(tiny_model(), **SIZES)


def draw_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 264, int(n)).tolist() for n in rng.integers(1, longest + 1, count)]


def assert_idle(generator: Generator, num_pages: int = 24) -> None:
    assert generator.num_free_pages == num_pages
    assert generator.step() == []


def test_many_requests_of_any_length() -> None:
    """14 requests, 3 rows, too few pages for 3 long ones: every text is the dense model's, on two traces."""
    generator = Generator(tiny_model(), **SIZES)
    prompts = draw_prompts(12, 40) + draw_prompts(1, 1) + [list(range(2, 52))]
    lengths = [1 + 3 * i % 11 for i in range(len(prompts))]
    ids = [
        generator.submit(prompt, max_tokens=n, ignore_eos=i % 2 == 0)
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    got: dict[int, list[int]] = {i: [] for i in ids}
    for event in generator.stream():
        got[event.request_id].append(event.token)
    params = tiny_model().params
    for i, prompt, n in zip(ids, prompts, lengths, strict=True):
        config = tiny_config(vocab_size=264, eos_ids=() if i % 2 == 0 else ENDS)
        assert got[i] == greedy(params, config, prompt, n)
    assert generator.num_traces == {"mixed": 1, "decode": 1}
    assert generator.num_plans == sum(generator.num_steps.values())
    assert_idle(generator)


def test_two_windows_take_two_plans_a_step() -> None:
    model = tiny_model(layer_windows=(None, 3, None))
    generator = Generator(model, **SIZES)
    prompts = draw_prompts(4, 20, seed=1)
    got = generator.generate(prompts, max_tokens=5, ignore_eos=True)
    config = tiny_config(vocab_size=264, layer_windows=(None, 3, None))
    assert [list(c.tokens) for c in got] == [greedy(model.params, config, p, 5) for p in prompts]
    assert generator.num_plans == 2 * sum(generator.num_steps.values())
    assert generator.num_traces == {"mixed": 1, "decode": 1}


def test_alone_is_together_is_reference() -> None:
    generator = shared_generator()
    prompts = draw_prompts(5, 30, seed=2)
    together = generator.generate(prompts, max_tokens=8)
    alone = [generator.generate([prompt], max_tokens=8)[0] for prompt in prompts]
    reference = Generator(tiny_model(), implementation="reference", **SIZES).generate(prompts, max_tokens=8)
    assert together == alone == reference
    assert generator.num_traces == {"mixed": 1, "decode": 1}


def test_requests_join_and_leave() -> None:
    """A request submitted in the middle, one cancelled while it runs, one while it waits."""
    generator = shared_generator()
    prompts = draw_prompts(6, 12, seed=3)
    want = generator.generate(prompts, max_tokens=10, ignore_eos=True)
    ids = [generator.submit(prompt, max_tokens=10, ignore_eos=True) for prompt in prompts[:5]]
    got: dict[int, list[int]] = {i: [] for i in ids}
    for count, event in enumerate(generator.stream()):
        got[event.request_id].append(event.token)
        if count == 4:
            generator.cancel(ids[0])  # runs
            generator.cancel(ids[4])  # waits
            late = generator.submit(prompts[5], max_tokens=10, ignore_eos=True)
            got[late] = []
    assert [got[i] for i in ids[1:4]] == [list(c.tokens) for c in want[1:4]]
    assert got[late] == list(want[5].tokens)
    assert len(got[ids[0]]) < 10 and got[ids[4]] == []
    assert_idle(generator)
    with pytest.raises(ValueError, match=f"request_id: got {ids[0]}, expected one that waits or runs"):
        generator.cancel(ids[0])


def test_sampling_does_not_depend_on_batch_mates() -> None:
    generator = shared_generator()
    prompts = draw_prompts(5, 9, seed=4)
    rules = [Sampling(1.5, seed=s) for s in (1, 2)] + [
        Sampling(0.9, 20, 0.8, 3),
        Sampling(2.0, top_p=0.95, seed=4),
    ]

    def draw(order: list[int]) -> dict[int, list[int]]:
        ids = {}
        for i in order:
            rule = rules[i] if i < 4 else None  # the last is greedy
            ids[generator.submit(prompts[i], max_tokens=12, sampling=rule, ignore_eos=True)] = i
        out: dict[int, list[int]] = {i: [] for i in order}
        for event in generator.stream():
            out[ids[event.request_id]].append(event.token)
        return out

    together = draw([0, 1, 2, 3, 4])
    assert draw([4, 2, 0, 3, 1]) == together
    for i in range(5):
        assert draw([i])[i] == together[i]
    a, b = (
        generator.generate([prompts[0]], max_tokens=12, sampling=Sampling(1.5, seed=s), ignore_eos=True)[
            0
        ].tokens
        for s in (1, 9)
    )
    assert list(a) == together[0] and a != b
    assert generator.num_traces == {"mixed": 1, "decode": 1}


def test_end_token_ends_a_text() -> None:
    """The end token is reported as a token and not as text; max_tokens ends the rest."""
    generator, model = shared_generator(), tiny_model()
    assert model.tokenizer is not None
    reasons = set()
    for prompt in draw_prompts(8, 5, seed=6):
        tokens = greedy(model.params, tiny_config(vocab_size=264), prompt, 6)
        count = next((i for i, token in enumerate(tokens) if token in ENDS), 6)
        reasons.add("stop" if count < 6 else "length")
        (got,) = generator.generate([prompt], max_tokens=6)
        text = model.tokenizer.decode(tokens[:count])
        assert got == Completion(tuple(tokens[: count + 1]), text, "stop" if count < 6 else "length")
        (got,) = generator.generate([prompt], max_tokens=6, ignore_eos=True)
        assert got == Completion(tuple(tokens), model.tokenizer.decode(tokens), "length")
    assert reasons == {"stop", "length"}


def test_events_and_prompts_of_all_kinds() -> None:
    generator = shared_generator()
    text = "hello w"
    tokens = generator.encode(text)
    messages = [{"role": "user", "content": text}]
    chat = generator.encode(messages)
    assert chat[0] == 0 and len(chat) > len(tokens)
    by_text, by_tokens = generator.generate([text, tokens], max_tokens=3)
    assert by_text == by_tokens
    request = generator.submit(messages, max_tokens=4, ignore_eos=True)
    events = list(generator.stream())
    assert [type(event) for event in events] == [Event] * 4
    assert [event.request_id for event in events] == [request] * 4
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    assert generator.model.tokenizer is not None
    assert "".join(e.text for e in events) == generator.model.tokenizer.decode([e.token for e in events])


def test_pools_stay_where_they_are() -> None:
    """100 steps: both pools keep their memory and every donation is used."""
    generator = shared_generator()
    generator.generate([[2, 3, 4]], max_tokens=2, ignore_eos=True)  # compiled, and donated once
    pointers = [pool.unsafe_buffer_pointer() for pool in generator.pools]
    before = sum(generator.num_steps.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "some donated buffers were not usable"
        while sum(generator.num_steps.values()) < before + 100:
            generator.generate(draw_prompts(4, 20, seed=5), max_tokens=30, ignore_eos=True)
    assert [pool.unsafe_buffer_pointer() for pool in generator.pools] == pointers


@pytest.mark.parametrize(
    ("kind", "windows"), [("mixed", None), ("decode", None), ("decode", (None, 1, 6))], ids=str
)
def test_no_pool_sized_copy_is_compiled(kind: Any, windows: Any) -> None:
    """Values of a pool's shape are passed on and appended to in place, and nothing else."""
    generator = Generator(tiny_model(layer_windows=windows), **SIZES)
    text = generator.lower(kind).compile().as_text()
    assert text is not None
    produced: Counter[str] = Counter()
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z-]*)\(", line)
        if found and "f32[3,24,4,2,16]" in found[1]:
            produced[found[2]] += 1
    assert produced["custom-call"] == 1  # the append
    assert set(produced) <= {"parameter", "tuple", "get-tuple-element", "while", "custom-call", "bitcast"}


def test_bfloat16() -> None:
    generator = Generator(tiny_model(), dtype=jnp.bfloat16, **SIZES)
    (got,) = generator.generate([[5, 6, 7]], max_tokens=3, ignore_eos=True)
    assert len(got.tokens) == 3
    assert generator.pools[0].dtype == jnp.bfloat16


def test_default_sizes() -> None:
    generator = Generator(tiny_model(), max_batch=2)
    assert generator.num_free_pages == 2 * 4  # two contexts of 64 tokens in pages of 16
    assert generator.max_seq_len == 64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.submit([]), "prompt: got 0 tokens"),
        (lambda g: g.submit([3, 264]), r"prompt: got token 264, expected \[0, 264\)"),
        (lambda g: g.submit([-1]), r"prompt: got token -1"),
        (lambda g: g.submit([3], max_tokens=0), "max_tokens: got 0"),
        (
            lambda g: g.submit([3] * 60, max_tokens=6),
            "60 tokens and max_tokens 6 need 65 cached tokens, .* at most max_seq_len 64",
        ),
        (lambda g: g.submit([3, {"role": "user", "content": ""}]), "prompt: got tokens and chat messages"),
        (lambda g: Generator(tiny_model(), page_size=0), "page_size: got 0"),
        (lambda g: Generator(tiny_model(), max_batch=0), "max_batch: got 0"),
        (
            lambda g: Generator(tiny_model(), chunk_tokens=7),
            "chunk_tokens: got 7, expected at least max_batch 8",
        ),
        (lambda g: Generator(tiny_model(), max_seq_len=65), r"max_seq_len: got 65, expected \[1, 64\]"),
        (
            lambda g: Generator(tiny_model(), num_pages=2, max_seq_len=33),
            r"max_seq_len: got 33, expected \[1, 32\] \(model context 64, pool 32 tokens\)",
        ),
        (lambda g: Generator(tiny_model(), dtype=np.float16), "dtype: got float16"),
        (lambda g: Generator(tiny_model(), num_pages=0), "num_pages: got 0, expected at least 1"),
        (lambda g: Generator(tiny_model(), max_batch="2"), "max_batch must be an int, got '2'"),
        (lambda g: Generator(tiny_model(), max_batch=True), "max_batch must be an int, got True"),
        (lambda g: Generator(tiny_model(), page_size=1.5), "page_size must be an int, got 1.5"),
        (lambda g: Generator(tiny_model(), max_seq_len=8.0), "max_seq_len must be an int, got 8.0"),
        (lambda g: Generator(tiny_model(), chunk_tokens=[9]), "chunk_tokens must be an int, got"),
        (lambda g: Generator(tiny_model(), implementation="x"), "implementation must be None or one of"),
        (lambda g: g.submit([3], max_tokens=2.5), "max_tokens must be an int, got 2.5"),
        (lambda g: g.submit([3], max_tokens=None), "max_tokens must be an int, got None"),
        (lambda g: Sampling(temperature="1"), "temperature: got '1', expected a number, or None"),
        (lambda g: Sampling(top_p=True), "top_p: got True, expected a number, or None"),
        (lambda g: Sampling(top_k=2.5), "top_k must be an int, got 2.5"),
        (lambda g: Sampling(seed=1.5), "seed must be an int, got 1.5"),
        (lambda g: Sampling(temperature=0.0), "temperature: got 0.0"),
        (
            lambda g: Sampling(temperature=10**400),
            "temperature must be finite in float32, got an int of 1329",
        ),
        (lambda g: Sampling(temperature=float("nan")), "temperature: got nan"),
        (lambda g: Sampling(top_k=0), "top_k: got 0"),
        (lambda g: Sampling(top_p=0.0), "top_p: got 0.0"),
        (lambda g: Sampling(seed=-1), "seed: got -1"),
        (
            lambda g: Generator(no_tokenizer(), **SIZES).submit("text"),
            "got text, but this model has no tokenizer",
        ),
        (
            lambda g: Generator(no_tokenizer(), **SIZES).submit([{"role": "user", "content": ""}]),
            "got chat messages, but this model has no tokenizer",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(shared_generator())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.generate("text"), r"prompts must be a list of prompts, got one str; .*\[prompt\]"),
        (lambda g: g.generate(None), "prompts must be a list of prompts, got one NoneType"),
        (lambda g: g.submit(b"abc"), "prompt must be text, tokens, .* got bytes"),
        (lambda g: g.submit([3, 1.5]), r"prompt must be text, tokens, .* got \[3, 1.5\]"),
        (lambda g: g.submit([[3], [4]]), "prompt must be text, tokens, or a list of chat messages"),
        (lambda g: g.submit(np.array(3)), r"prompt must be text, tokens, .* got array\(3\)"),
        (lambda g: Generator(None), "model must be a Model, as load_model gives, got NoneType"),
        (lambda g: g.generate([3]), "prompt must be text, tokens, or a list of chat messages, got int"),
        (lambda g: g.submit({"role": "user", "content": ""}), "a list of chat messages, got dict"),
        (lambda g: g.submit([3], sampling={"seed": 1}), "sampling must be .*Sampling, got dict"),
    ],
)
def test_refusals_of_other_kinds(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(shared_generator())


def test_a_refused_prompt_takes_the_others_with_it() -> None:
    generator = shared_generator()
    with pytest.raises(ValueError, match="prompt: got 0 tokens"):
        generator.generate([[3, 4], [5], []], max_tokens=2)
    assert_idle(generator)


def test_an_interrupted_step_leaves_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = shared_generator()
    (want,) = generator.generate([[3, 4]], max_tokens=2)
    step, calls = generator.step, iter(range(3))

    def interrupted() -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(generator, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator.generate([[3, 4], [5] * 9, [6]], max_tokens=9)
    monkeypatch.undo()
    assert_idle(generator)
    assert generator.generate([[3, 4]], max_tokens=2) == [want]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_enable_x64", True),
    ],
)
def test_texts_under_strict_settings_of_jax(name: str, value: Any) -> None:
    prompts, sampling = [[3, 4], [5]], Sampling(temperature=0.9, top_k=9, top_p=0.9)
    want = shared_generator().generate(prompts, max_tokens=2, sampling=sampling)
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, value)
        assert Generator(tiny_model(), **SIZES).generate(prompts, max_tokens=2, sampling=sampling) == want
    finally:
        jax.config.update(name, before)


def no_tokenizer() -> Model:
    return Model(tiny_model().config, tiny_model().params)


def test_longest_request_fits() -> None:
    """59 prompt tokens and 6 new ones fill the context of 64: the last token is never fed back."""
    (got,) = shared_generator().generate([[3] * 59], max_tokens=6, ignore_eos=True)
    assert len(got.tokens) == 6
