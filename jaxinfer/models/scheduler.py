"""Continuous batching on the host: which requests run, which pages they own, which tokens the next step
computes.

Plain Python and numpy; nothing here knows the model, the layout classes or JAX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxinfer.models.sampling import Sampling

StepKind = Literal["mixed", "decode"]
FinishReason = Literal["stop", "length"]


class PagePool:
    """Free list of page ids; a page is given to one request at a time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; ValueError if there are fewer (callers look at `num_free` first)."""
        if count > len(self._free):
            raise ValueError(f"count: got {count} pages, expected at most the {len(self._free)} free ones")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Returns pages; ValueError if one is free already, because then two requests would share it."""
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"pages: page {page} is free already")
            self._is_free[page] = True
            self._free.append(page)


@dataclass
class Request:
    """One text being generated. Its cache holds its first `num_cached` tokens."""

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    generated: list[int] = field(default_factory=list)
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_reserved(self) -> int:
        """Most tokens its cache ever holds: the last generated token is never fed back."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def num_pending(self) -> int:
        """Known tokens that are not cached yet; 1 once the prompt is done."""
        return len(self.prompt) + len(self.generated) - self.num_cached

    def pending(self, count: int) -> list[int]:
        """The next `count` pending tokens."""
        begin, end = self.num_cached, self.num_cached + count
        if begin >= len(self.prompt):
            return self.generated[begin - len(self.prompt) : end - len(self.prompt)]
        return self.prompt[begin:end]  # a chunk never crosses from prompt to generated tokens

    def finish_reason(self) -> FinishReason | None:
        """Why it has ended, or None while it has not."""
        if self.generated and self.generated[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.generated) >= self.max_tokens else None


@dataclass
class Batch:
    """One step's work as host arrays; row r is batch row r, empty rows have no tokens and no KV."""

    kind: StepKind
    tokens: npt.NDArray[np.int32]  # [num_tokens] packed in row order, 0 behind the last
    block_table: npt.NDArray[np.int32]  # [max_batch, pages_per_request]
    kv_len: npt.NDArray[np.int32]  # [max_batch], this step's tokens included
    qo_indptr: npt.NDArray[np.int32]  # [max_batch + 1]
    last: npt.NDArray[np.int32]  # [max_batch] index of the row's last token in `tokens`, 0 for empty rows
    requests: list[tuple[int, Request, int]]  # (row, request, number of tokens in this step)


class Scheduler:
    """Admits requests in order of arrival, with pages for the longest they may become: a running request
    never runs out of pages, so none is ever evicted or lost; requests that find no row or no pages wait.
    """

    def __init__(
        self, *, max_batch: int, num_pages: int, page_size: int, pages_per_request: int, chunk_tokens: int
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("pages_per_request", pages_per_request),
        ):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if chunk_tokens < max_batch:
            raise ValueError(f"chunk_tokens: got {chunk_tokens}, expected at least max_batch {max_batch}")
        self.pool = PagePool(num_pages)
        self.page_size, self.pages_per_request, self.chunk_tokens = page_size, pages_per_request, chunk_tokens
        self.rows: list[Request | None] = [None] * max_batch
        self.waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._table = np.zeros((max_batch, pages_per_request), np.int32)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._running)

    def add(self, request: Request) -> None:
        """Queues a request; ValueError if it could never run."""
        need, most = self._num_pages(request), min(self.pool.num_pages, self.pages_per_request)
        if need > most:
            raise ValueError(
                f"request: {len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} "
                f"need {need} pages of {self.page_size} tokens, but a request can have at most {most}"
            )
        self.waiting.append(request)

    def next_batch(self) -> Batch | None:
        """Admits what fits, then picks the next step's tokens; None when nothing is left to do.

        If every running request has one pending token the step is "decode", else "mixed": running texts go on
        first, one token each, and prompts share the rest of `chunk_tokens` in order of admission.
        """
        self._admit()
        if not self._running:
            return None
        kind: StepKind = "decode" if all(r.num_pending == 1 for r in self._running) else "mixed"
        counts: dict[int, int] = {r.id: 1 for r in self._running if r.num_pending == 1}
        left = self.chunk_tokens - len(counts)
        for request in self._running:
            if request.id not in counts:
                counts[request.id] = min(left, request.num_pending)
                left -= counts[request.id]
        return self.pack(kind, counts)

    def pack(self, kind: StepKind, counts: Mapping[int, int]) -> Batch:
        """The batch in which each running request computes `counts[request.id]` tokens, absent ones none."""
        rows = len(self.rows)
        num_tokens = rows if kind == "decode" else self.chunk_tokens
        tokens, kv_len = np.zeros(num_tokens, np.int32), np.zeros(rows, np.int32)
        qo_indptr, last = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
        requests = []
        at = 0
        for row, request in enumerate(self.rows):
            count = counts.get(request.id, 0) if request is not None else 0
            if request is not None and count:
                tokens[at : at + count] = request.pending(count)
                at += count
                kv_len[row], last[row] = request.num_cached + count, at - 1
                requests.append((row, request, count))
            qo_indptr[row + 1] = at
        return Batch(kind, tokens, self._table.copy(), kv_len, qo_indptr, last, requests)

    def complete(self, batch: Batch, next_tokens: npt.NDArray[np.int32]) -> list[Request]:
        """Records a computed step; `next_tokens [max_batch]`. Returns the requests that got a token.

        A request that ended has left its row and given back its pages.
        """
        advanced = []
        for row, request, count in batch.requests:
            request.num_cached += count
            if request.num_pending:  # part of a prompt: what was sampled behind it means nothing
                continue
            request.generated.append(int(next_tokens[row]))
            advanced.append(request)
            if request.finish_reason() is not None:
                self._release(request)
        return advanced

    def cancel(self, request: Request) -> None:
        """Forgets a waiting or running request."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release(request)

    def _num_pages(self, request: Request) -> int:
        return -(-request.num_reserved // self.page_size)

    def _admit(self) -> None:
        while self.waiting and None in self.rows and self._num_pages(self.waiting[0]) <= self.pool.num_free:
            request = self.waiting.popleft()
            row = self.rows.index(None)
            request.pages = self.pool.take(self._num_pages(request))
            self.rows[row] = request
            self._running.append(request)
            self._table[row, : len(request.pages)] = request.pages

    def _release(self, request: Request) -> None:
        self.rows[self.rows.index(request)] = None
        self._running.remove(request)
        self.pool.give_back(request.pages)
        request.pages = []
