"""`Generator`: serves a model to many requests at once, over two compiled steps and one paged cache.

Each step plans once on the host for all layers of a window; lengths and page tables are operands, so the two
steps (mixed: prompts in chunks next to running texts; decode: one token each) are traced once, whatever the
requests are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer import _args
from jaxinfer.attention import check_implementation
from jaxinfer.models.llama import forward, logits, make_plans, new_pools
from jaxinfer.models.model import Model
from jaxinfer.models.params import Params, check_dtype
from jaxinfer.models.sampling import Sampling, SamplingRows, sample
from jaxinfer.models.scheduler import Batch, FinishReason, Request, Scheduler, StepKind
from jaxinfer.models.tokenizer import TextStream

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Event:
    """One generated token. `text` is what it added to the text, often nothing in the middle of a character;
    the last event of a request has a `finish_reason`.
    """

    request_id: int
    token: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """A finished text. `tokens` includes the end token that stopped it, `text` does not."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason


class Generator:
    """Continuous batching: requests of any lengths prefill in chunks and decode together, joining and leaving
    freely.

    `max_batch`: requests that run at once. `num_pages` of `page_size` tokens: the cache; None: `max_batch`
    requests of `min(max_position, 1024)` tokens. `max_seq_len`: longest request in tokens; None: the model's
    context or the whole pool, whichever is less. `chunk_tokens`: tokens of a mixed step. `dtype`: of weights,
    activations and cache (None: as loaded). `implementation`: as in `jaxinfer.attention`.

    Counters for tests and monitoring: `num_traces[kind]`, `num_steps[kind]`, `num_plans`. Not thread-safe.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 8,
        page_size: int = 16,
        num_pages: int | None = None,
        max_seq_len: int | None = None,
        chunk_tokens: int = 256,
        dtype: Any = None,
        implementation: str | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Model, as load_model gives, got {type(model).__name__}")
        check_implementation(implementation)
        config = model.config
        sizes = {"page_size": page_size, "max_batch": max_batch, "chunk_tokens": chunk_tokens}
        optional = {"num_pages": num_pages, "max_seq_len": max_seq_len}
        for name, value in (sizes | {n: v for n, v in optional.items() if v is not None}).items():
            if _args.index(name, value) < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if num_pages is None:
            num_pages = max_batch * -(-min(config.max_position, 1024) // page_size)
        most = min(config.max_position, num_pages * page_size)
        self.max_seq_len = most if max_seq_len is None else max_seq_len
        if not 1 <= self.max_seq_len <= most:
            raise ValueError(
                f"max_seq_len: got {self.max_seq_len}, expected [1, {most}] "
                f"(model context {config.max_position}, pool {num_pages * page_size} tokens)"
            )
        self.model = model
        self.num_traces: dict[StepKind, int] = {"mixed": 0, "decode": 0}
        self.num_steps: dict[StepKind, int] = {"mixed": 0, "decode": 0}
        self.num_plans = 0
        self._dtype = model.dtype if dtype is None else check_dtype(dtype)
        cast = self._dtype != model.dtype
        self._params = jax.tree.map(lambda x: x.astype(self._dtype), model.params) if cast else model.params
        self._implementation = implementation
        self._scheduler = Scheduler(
            max_batch=max_batch,
            num_pages=num_pages,
            page_size=page_size,
            pages_per_request=-(-self.max_seq_len // page_size),
            chunk_tokens=chunk_tokens,
        )
        self._pools = new_pools(config, num_pages, page_size, self._dtype)
        self._steps = {kind: self._compile(kind) for kind in self.num_traces}
        self._requests: dict[int, tuple[Request, TextStream | None]] = {}
        self._next_id = 0

    @property
    def pools(self) -> tuple[jax.Array, jax.Array]:
        """The cache `(k_pages, v_pages)`; the next step donates it."""
        return self._pools

    @property
    def num_free_pages(self) -> int:
        return self._scheduler.pool.num_free

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
    ) -> int:
        """Queues a request and returns its id, under which `step` and `stream` report.

        `prompt`: text (plain), tokens, or chat messages (mappings with "role" and "content").
        `sampling=None`: greedy. `ignore_eos`: go on to `max_tokens`. ValueError for an empty or too long
        prompt, a token outside the vocabulary, or a request that the model's context or the pool can never
        hold (with both numbers).
        """
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a jaxinfer.models.Sampling, got {type(sampling).__name__}")
        tokens = self.encode(prompt)
        vocab = self.model.config.vocab_size
        if not tokens:
            raise ValueError("prompt: got 0 tokens, expected at least 1")
        for token in tokens:
            if not 0 <= token < vocab:
                raise ValueError(f"prompt: got token {token}, expected [0, {vocab})")
        if _args.index("max_tokens", max_tokens) < 1:
            raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1")
        request = Request(
            id=self._next_id,
            prompt=tokens,
            max_tokens=max_tokens,
            sampling=Sampling() if sampling is None else sampling,
            stop_ids=frozenset() if ignore_eos else frozenset(self.model.config.eos_ids),
        )
        if request.num_reserved > self.max_seq_len:
            raise ValueError(
                f"prompt: {len(tokens)} tokens and max_tokens {max_tokens} need {request.num_reserved} "
                f"cached tokens, but a request can have at most max_seq_len {self.max_seq_len}"
            )
        self._scheduler.add(request)
        tokenizer = self.model.tokenizer
        self._requests[request.id] = request, None if tokenizer is None else tokenizer.stream()
        self._next_id += 1
        return request.id

    def cancel(self, request_id: int) -> None:
        """Drops a waiting or running request; no more events come of it. ValueError if it is not known (any
        more).
        """
        if request_id not in self._requests:
            raise ValueError(f"request_id: got {request_id}, expected one that waits or runs")
        self._scheduler.cancel(self._requests.pop(request_id)[0])

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt, as `submit` would feed them."""
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("prompt: got text, but this model has no tokenizer; give tokens")
            return tokenizer.encode(prompt)
        if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray)):
            raise TypeError(
                f"prompt must be text, tokens, or a list of chat messages, got {type(prompt).__name__}"
            )
        parts: Sequence[Any] = prompt
        try:
            messages = [part for part in parts if isinstance(part, Mapping)]
            tokens = [operator.index(part) for part in parts if not isinstance(part, Mapping)]
        except TypeError:
            raise TypeError(
                f"prompt must be text, tokens, or a list of chat messages, got {prompt!r}"
            ) from None
        if messages and tokens:
            raise ValueError("prompt: got tokens and chat messages in one list, expected one kind")
        if messages and tokenizer is None:
            raise ValueError("prompt: got chat messages, but this model has no tokenizer; give tokens")
        return tokenizer.chat(messages) if messages and tokenizer is not None else tokens

    def step(self) -> list[Event]:
        """Runs one step of all that is submitted; returns the tokens it generated (none for part of a
        prompt).
        """
        batch = self._scheduler.next_batch()
        if batch is None:
            return []
        args = self._step_args(batch)
        next_tokens, *pools = self._steps[batch.kind](*args)
        self._pools = (pools[0], pools[1])
        self.num_steps[batch.kind] += 1
        return [self._event(r) for r in self._scheduler.complete(batch, np.asarray(next_tokens))]

    def stream(self) -> Iterator[Event]:
        """Events of all requests until none is left; more may be submitted or cancelled meanwhile."""
        while self._scheduler.has_work:
            yield from self.step()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Submits all prompts and waits; results in order of the prompts. Arguments as in `submit`; where one of
        the prompts is refused, or a step is interrupted, none is left queued.
        """
        # Text is a sequence of texts, of one letter each.
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise TypeError(
                f"prompts must be a list of prompts, got one {type(prompts).__name__}; for one prompt give [prompt]"
            )
        ids: list[int] = []
        try:
            for prompt in prompts:
                ids.append(
                    self.submit(prompt, max_tokens=max_tokens, sampling=sampling, ignore_eos=ignore_eos)
                )
            events: dict[int, list[Event]] = {i: [] for i in ids}
            for event in self.stream():
                if event.request_id in events:
                    events[event.request_id].append(event)
        except BaseException:
            for i in ids:
                if i in self._requests:  # not finished
                    self.cancel(i)
            raise
        done = []
        for i in ids:
            reason = events[i][-1].finish_reason
            assert reason is not None  # stream() ends only after every request's last event
            text = "".join(event.text for event in events[i])
            done.append(Completion(tuple(event.token for event in events[i]), text, reason))
        return done

    def lower(self, kind: StepKind) -> jax.stages.Lowered:
        """The lowered step, for looking at its compiled program; counts as a trace and a plan."""
        args = self._step_args(self._scheduler.pack(kind, {}))
        lowered: jax.stages.Lowered = self._steps[kind].lower(*args)
        return lowered

    def _step_args(self, batch: Batch) -> tuple[Any, ...]:
        """Operands of the step: weights, pools, layout, plans, tokens, last token of each row, sampling
        rules.
        """
        layout = jaxinfer.from_block_table(
            batch.block_table,
            batch.kv_len,
            batch.qo_indptr,
            self._scheduler.page_size,
            num_tokens=len(batch.tokens),
        )
        plans = make_plans(self.model.config, layout, self._dtype)
        self.num_plans += len(plans)
        vocab = self.model.config.vocab_size
        entries = ((row, request.sampling, len(request.generated)) for row, request, _ in batch.requests)
        rows = SamplingRows.build(len(batch.last), vocab, entries)
        return self._params, *self._pools, layout, plans, batch.tokens, batch.last, rows

    def _compile(self, kind: StepKind) -> Any:
        config = self.model.config
        attention = functools.partial(jaxinfer.attention, implementation=self._implementation)

        def step(
            params: Params,
            k_pages: jax.Array,
            v_pages: jax.Array,
            layout: jaxinfer.BlockSparse,
            plans: tuple[jaxinfer.Plan, ...],
            tokens: jax.Array,
            last: jax.Array,
            rows: SamplingRows,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            self.num_traces[kind] += 1  # runs when traced, not when executed
            hidden, k_pages, v_pages = forward(
                params, config, tokens, layout, plans, k_pages, v_pages, attention=attention
            )
            return sample(logits(params, jnp.take(hidden, last, axis=0)), rows), k_pages, v_pages

        return jax.jit(step, donate_argnums=(1, 2))

    def _event(self, request: Request) -> Event:
        token, reason = request.generated[-1], request.finish_reason()
        stream = self._requests[request.id][1]
        text = "" if stream is None or token in request.stop_ids else stream.push(token)
        if reason is not None:
            text += "" if stream is None else stream.finish()
            del self._requests[request.id]
        return Event(request.id, token, text, reason)
