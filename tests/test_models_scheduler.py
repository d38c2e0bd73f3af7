"""The scheduler without a model: pages, rows and order of tokens over random traffic."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxinfer.models.sampling import Sampling
from jaxinfer.models.scheduler import Batch, PagePool, Request, Scheduler

PAGE, ROWS, CHUNK = 3, 3, 7


def request(i: int, prompt: int, max_tokens: int) -> Request:
    return Request(i, [1000 * (i + 1) + t for t in range(prompt)], max_tokens, Sampling(), frozenset({-1}))


def check_batch(
    batch: Batch, scheduler: Scheduler, fed: dict[int, list[int]], owner: dict[int, list[int]]
) -> None:
    """Every array says what `requests` says, no page has two users, and tokens go on where they stopped."""
    assert len(batch.tokens) == (ROWS if batch.kind == "decode" else CHUNK)
    used = [r.pages for r in scheduler.rows if r is not None]
    assert len({page for pages in used for page in pages}) == sum(map(len, used))
    assert sum(map(len, used)) + scheduler.pool.num_free == scheduler.pool.num_pages
    assert batch.qo_indptr[-1] == sum(count for _, _, count in batch.requests) > 0
    for row, r, count in batch.requests:
        begin, end = batch.qo_indptr[row], batch.qo_indptr[row + 1]
        assert scheduler.rows[row] is r and end - begin == count >= 1
        assert batch.last[row] == end - 1
        fed.setdefault(r.id, []).extend(batch.tokens[begin:end].tolist())
        assert batch.kv_len[row] == len(fed[r.id])
        assert owner.setdefault(r.id, r.pages) == r.pages  # its pages never change
        num_pages = -(-int(batch.kv_len[row]) // PAGE)
        assert batch.block_table[row, :num_pages].tolist() == r.pages[:num_pages]
        assert num_pages <= len(r.pages)
    idle = set(range(ROWS)) - {row for row, _, _ in batch.requests}
    assert all(batch.kv_len[row] == 0 for row in idle)
    if batch.kind == "decode":
        assert all(count == 1 for _, _, count in batch.requests)


@given(
    traffic=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 6)), max_size=10),
    num_pages=st.integers(9, 20),
)
def test_random_traffic(traffic: list[tuple[int, int, int]], num_pages: int) -> None:
    """Whatever arrives when: each request is fed its prompt and its own tokens, in order, exactly once."""
    scheduler = Scheduler(
        max_batch=ROWS, num_pages=num_pages, page_size=PAGE, pages_per_request=9, chunk_tokens=CHUNK
    )
    arrivals = [(step, request(i, prompt, n)) for i, (prompt, n, step) in enumerate(traffic)]
    fed: dict[int, list[int]] = {}
    owner: dict[int, list[int]] = {}
    step = done = 0
    while arrivals or scheduler.has_work:
        for arrival in [a for a in arrivals if a[0] <= step]:
            scheduler.add(arrival[1])
            arrivals.remove(arrival)
        batch = scheduler.next_batch()
        if batch is not None:
            check_batch(batch, scheduler, fed, owner)
            # Row r's "sampled" token names the request and the position it will take.
            sampled = np.full(ROWS, -999, np.int32)
            for row, r, count in batch.requests:
                sampled[row] = 1000 * (r.id + 1) + r.num_cached + count
            advanced = scheduler.complete(batch, sampled)
            done += sum(r.finish_reason() is not None for r in advanced)
        step += 1
        assert step < 1000
    assert done == len(traffic) and scheduler.pool.num_free == num_pages
    for i, (prompt, n, _) in enumerate(traffic):
        assert fed[i] == [1000 * (i + 1) + t for t in range(prompt + n - 1)]


def test_first_come_first_served() -> None:
    """A long request at the head of the queue is not overtaken by short ones that would fit."""
    scheduler = Scheduler(max_batch=2, num_pages=4, page_size=1, pages_per_request=4, chunk_tokens=4)
    for r in (request(0, 2, 1), request(1, 4, 1), request(2, 1, 1)):
        scheduler.add(r)
    order = []
    while (batch := scheduler.next_batch()) is not None:
        order.append([r.id for _, r, _ in batch.requests])
        scheduler.complete(batch, np.zeros(2, np.int32))
    assert order == [[0], [1], [2]]


def test_running_texts_go_on_while_prompts_are_read() -> None:
    scheduler = Scheduler(max_batch=2, num_pages=20, page_size=1, pages_per_request=20, chunk_tokens=4)
    scheduler.add(request(0, 1, 5))
    first = scheduler.next_batch()
    assert first is not None and first.kind == "decode"
    scheduler.complete(first, np.zeros(2, np.int32))
    scheduler.add(request(1, 8, 1))
    counts = []
    for _ in range(3):
        batch = scheduler.next_batch()
        assert batch is not None and batch.kind == "mixed"
        counts.append([count for _, _, count in batch.requests])
        scheduler.complete(batch, np.zeros(2, np.int32))
    assert counts == [[1, 3], [1, 3], [1, 2]]


def test_page_pool() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert len(set(pages)) == 2 and pool.num_free == 1
    with pytest.raises(ValueError, match="count: got 2 pages, expected at most the 1 free ones"):
        pool.take(2)
    pool.give_back(pages[:1])
    with pytest.raises(ValueError, match=f"pages: page {pages[0]} is free already"):
        pool.give_back(pages)


def test_request_larger_than_the_pool() -> None:
    scheduler = Scheduler(max_batch=1, num_pages=3, page_size=4, pages_per_request=9, chunk_tokens=4)
    with pytest.raises(
        ValueError, match=r"10 prompt tokens and max_tokens 4 need 4 pages of 4 tokens, .* at most 3"
    ):
        scheduler.add(request(0, 10, 4))
    scheduler.add(request(0, 9, 4))
