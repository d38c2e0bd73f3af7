"""The benchmarks measure the right thing: every peer computes attention, wrong results are refused."""

from __future__ import annotations

import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from backend import cpu_only

from jaxinfer.bench.measure import interleaved
from jaxinfer.bench.peers import OURS, PEERS, check_output, expected_output
from jaxinfer.bench.report import plain_table
from jaxinfer.bench.workloads import PLAN_SHAPES, DecodeShape, decode_batch, plan_arrays

SHAPE = DecodeShape(2, 20, num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=8)


def test_expected_output_by_hand():
    shape = DecodeShape(1, 2, num_qo_heads=1, num_kv_heads=1, head_dim=16, page_size=2)
    batch = decode_batch(shape)
    batch.q[:] = 0.0
    batch.q[0, 0, 0] = 4.0  # sm_scale is 1 / 4
    batch.k_pages[:] = 0.0
    batch.k_pages[0, 1, 0, 0] = math.log(3.0)
    batch.v_pages[0, 0], batch.v_pages[0, 1] = 0.0, 4.0
    np.testing.assert_allclose(expected_output(batch), np.full((1, 1, 16), 3.0), rtol=1e-6)


@cpu_only("the rows of the table for the CPU; test_bench_rows.py has those for a GPU")
@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_peer_computes_attention(peer, dtype: str):
    shape = DecodeShape(**{**SHAPE.__dict__, "dtype": dtype})
    batch = decode_batch(shape)
    assert check_output(peer.name, batch, peer.prepare(batch)(), expected_output(batch)) > 0


def test_wrong_results_are_not_timed():
    batch = decode_batch(SHAPE)
    expected = expected_output(batch)
    with pytest.raises(ValueError, match=r"liar, B 2 x 20: relative error .* expected below 2e-05"):
        check_output("liar", batch, jnp.asarray(expected * 1.001, jnp.float32), expected)
    with pytest.raises(ValueError, match="got shape"):
        check_output("liar", batch, jnp.zeros(3), expected)
    with pytest.raises(ValueError, match="relative error nan"):
        check_output("liar", batch, jnp.full(expected.shape, jnp.nan), expected)


def test_pages_are_shuffled_and_the_last_one_partly_filled():
    batch = decode_batch(SHAPE)
    assert SHAPE.pages_per_request == 3
    assert sorted(batch.block_table.ravel()) == list(range(6))
    assert SHAPE.kv_bytes == 2 * 2 * 20 * 2 * 16 * 4


def test_ours_comes_first_and_names_differ():
    assert PEERS[0].name == OURS
    assert len({peer.name for peer in PEERS}) == len(PEERS)


@pytest.mark.parametrize("shape", PLAN_SHAPES, ids=lambda s: s.name)
def test_plan_arrays_are_legal(shape):
    arrays = plan_arrays(shape)
    q_len = np.diff(arrays.qo_indptr)
    assert (q_len == shape.prefill_tokens).sum() == shape.prefill_requests
    assert (arrays.kv_len >= q_len).all() and (arrays.kv_len <= shape.max_kv_len).all()
    assert (np.diff(arrays.kv_indptr) * shape.page_size >= arrays.kv_len).all()


def test_rounds_interleave_and_rotate():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = interleaved(calls, rounds=6, warm_up=1)
    assert order == list("abc") + list("abcbcacab") * 2
    for timing in timings.values():
        assert timing.rounds == 6
        assert 0 <= timing.low <= timing.median <= timing.high


def test_budget_ends_early_but_not_before_five_rounds():
    count = iter(range(1000))
    timings = interleaved({"a": lambda: next(count)}, rounds=100, max_seconds=0.0)
    assert timings["a"].rounds == 5


def test_plain_table():
    table = plain_table(
        "title", ("name", "what", "us"), [("a", "bb", "1"), ("long", "c", "1000")], text_columns=2
    )
    assert table.splitlines() == [
        "title",
        "name  what    us",
        "----  ----  ----",
        "a     bb       1",
        "long  c     1000",
    ]


@cpu_only("its table has --batch")
def test_table_without_rich_and_plot_without_matplotlib():
    program = """
import sys
sys.modules["rich"] = sys.modules["matplotlib"] = None  # importing either fails, find_spec raises
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("rich", "matplotlib") else find(name)
from jaxinfer.cli import main
sizes = "--batch 1 --kv 8 --heads 2/1 --head-dim 16 --rounds 5"
assert main(["bench", "decode", *sizes.split()]) == 0
assert main(["bench", "decode", "--output", "x.png"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "B 1 x 8" in done.stdout
    assert "pip install 'jaxinfer[bench]'" in done.stderr
