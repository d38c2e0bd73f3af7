"""The tables against other libraries: rows and their counts, the reference, refusal of wrong results. No times."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from backend import cpu_only

from jaxinfer.bench import cases as rows
from jaxinfer.bench.burst import JaxBurst, race
from jaxinfer.bench.cases import Case, decode_case, make_operands, prefill_case
from jaxinfer.bench.rivals import OURS, RIVALS
from jaxinfer.bench.versus import as_json, measure_case, measure_ceilings, relative_error
from jaxinfer.cli import main

SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def dense_attention(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One request with float64 loops over its tokens."""
    out = np.empty(q.shape)
    group = case.num_qo_heads // case.num_kv_heads
    for t in range(len(q)):
        last = len(k) - len(q) + t
        for h in range(case.num_qo_heads):
            logits = k[: last + 1, h // group] @ q[t, h] / math.sqrt(case.head_dim)
            weights = np.exp(logits - logits.max())
            out[t, h] = weights / weights.sum() @ v[: last + 1, h // group]
    return out


@pytest.mark.parametrize(
    "case",
    [
        decode_case("decode", (5, 40, 16), page_size=16, **SMALL),
        prefill_case("dense", 2, 9, page_size=None, **SMALL),
        prefill_case("chunk", 2, 21, 6, page_size=4, **SMALL),
    ],
    ids=lambda c: c.name,
)
def test_expected_tokens(case: Case):
    ops = make_operands(case)
    tokens = rows.checked_tokens(ops)
    got = rows.expected_tokens(ops, tokens)
    q, k, v = (np.asarray(x, np.float64) for x in ops.sets[0])
    for r in range(case.batch):
        begin, n = ops.kv_indptr[r], case.kv_len[r]
        if case.page_size is None:
            kk, vv = (x[begin : begin + n] for x in (k, v))
        else:
            pages = ops.kv_indices[begin : ops.kv_indptr[r + 1]]
            kk, vv = (x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k, v))
        want = dense_attention(case, q[ops.qo_indptr[r] : ops.qo_indptr[r + 1]], kk, vv)
        np.testing.assert_allclose(got[r], want[tokens[r] - ops.qo_indptr[r]], rtol=1e-4, atol=1e-5)


def test_rows_count_their_work():
    case = prefill_case("x", 1, 4, 2, **SMALL)
    assert case.flops == 4 * 4 * 16 * (3 + 4)  # the two queries see three and four tokens
    assert case.kv_bytes == 2 * 4 * 2 * 16 * 4
    assert len({(c.kind, c.name) for c in rows.CASES}) == len(rows.CASES)
    skewed = {c.name: c for c in rows.CASES}
    assert (sum(skewed["skewed-B16"].kv_len), max(skewed["skewed-B16"].kv_len)) == (16372, 5573)
    assert (sum(skewed["skewed-B64"].kv_len), max(skewed["skewed-B64"].kv_len)) == (87371, 32768)
    assert (sum(skewed["skewed-B128"].kv_len), max(skewed["skewed-B128"].kv_len)) == (117660, 32768)


def test_rotated_operands_exceed_the_cache():
    for case in rows.CASES:
        if "gpu" in case.platforms:
            assert case.num_sets * (case.kv_bytes + case.q_bytes) >= 380 << 20, case.name


def test_select():
    assert [c.name for c in rows.select("decode", "gpu", ["B1x8192"], page_size=1)] == ["B1x8192"]
    assert {c.page_size for c in rows.select("prefill", "gpu", page_size=4)} == {None, 4}
    with pytest.raises(ValueError, match="--rows: no prefill row 'B9' on cpu; there are B1x512, B4x256"):
        rows.select("prefill", "cpu", ["B9"])


def test_wrong_results_are_refused():
    case = decode_case("x", (5, 6), **SMALL)
    ops = make_operands(case)
    tokens = rows.checked_tokens(ops)
    expected = rows.expected_tokens(ops, tokens)
    right = jnp.asarray(expected.reshape(2, 4, 16))
    assert relative_error(case, right, tokens, expected) == 0
    with pytest.raises(ValueError, match=r"relative error .* expected below 2e-05"):
        relative_error(case, right * 1.001, tokens, expected)
    with pytest.raises(ValueError, match="not finite"):
        relative_error(case, right.at[0, 0, 0].set(jnp.nan), tokens, expected)
    with pytest.raises(ValueError, match="got shape"):
        relative_error(case, right[:1], tokens, expected)


def test_a_failing_library_is_listed_and_the_row_goes_on():
    case = decode_case("x", (5, 6), **SMALL)
    case = replace(case, platforms=("cpu",))

    def broken(ops: object) -> dict[str, object]:
        raise OSError("no such kernel")

    ours = next(r for r in RIVALS if r.name == OURS)
    liar = replace(
        ours,
        name="liar",
        variants=lambda ops: {"v1": lambda: JaxBurst(lambda q, k, v: q, ops.sets)},
    )
    row = measure_case(case, [ours, replace(ours, name="broken", variants=broken), liar], 0.0)
    assert OURS in {e.rival for e in row.entries} | set(row.absent)
    assert row.absent["broken"] == "failed: OSError: no such kernel"
    assert "relative error" in row.absent["liar v1"]
    assert row.ratio is None
    entry = as_json([row], measure_ceilings(small=True), {"torch": ["torch"]})
    assert json.loads(json.dumps(entry))["rows"][0]["kv_tokens"] == 11


def test_missing_modules():
    assert replace(RIVALS[0], needs=("json", "no_such_module", "no_such.module")).missing() == [
        "no_such_module",
        "no_such.module",
    ]


def test_bursts_run_every_set_and_take_turns():
    sets = [(jnp.full(4, i, jnp.float32), jnp.float32(1)) for i in range(3)]
    burst = JaxBurst(lambda x, y, z: x + y + z, sets, (np.float32(10),))
    assert burst.slots == 3
    np.testing.assert_array_equal(burst.output(), np.full(4, 11))
    burst.first_estimate()
    burst.warm_up()
    assert race({"a": burst, "b": burst}, seconds=0.0)["a"].rounds == 5


@cpu_only("the refusal where there is no GPU")
def test_rows_are_for_gpus_on_decode(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "decode", "--rows", "B1x8192"]) == 1
    assert "--rows: decode has named rows on a GPU only" in capsys.readouterr().err
    assert main(["bench", "prefill", "--peers", "nobody"]) == 1
    assert "'nobody' is not one of jax.nn xla" in capsys.readouterr().err
