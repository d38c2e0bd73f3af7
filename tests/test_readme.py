"""README.md stays true: its example runs and computes attention, its commands and names exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import pytest
import readme_text
from backend import assert_close

import jaxinfer
from jaxinfer.cli import parser


def test_commands_are_one_line_each():
    commands = readme_text.commands()
    assert len(commands) == 2
    for command in commands:
        assert "\n" not in command
        assert command.startswith('python -m pip install -e ".[')


def test_generate_command_parses():
    tokens = shlex.split(readme_text.commands()[0].partition("&&")[2])
    assert tokens[:3] == ["python", "-m", "jaxinfer"]
    args = parser().parse_args(tokens[3:])
    assert args.prompts == ["The capital of France is"]


def test_other_commands_parse():
    text = readme_text.README.read_text(encoding="utf-8")
    lines = re.findall(r"^    python -m jaxinfer (.+)$", text, flags=re.MULTILINE)
    lines = [line for line in lines if "..." not in line and "[" not in line]
    assert len(lines) >= 8
    for line in lines:
        parser().parse_args(shlex.split(line, comments=True))
    for what in (
        "generate",
        "info",
        "warmup",
        "bench plan",
        "bench decode",
        "bench prefill",
        "bench step",
        "bench mixed",
    ):
        assert f"    python -m jaxinfer {what} " in readme_text.section("Command line")


def test_example_computes_attention(capsys: pytest.CaptureFixture[str]):
    program = readme_text.example()
    assert len([line for line in program.splitlines() if line]) <= 20
    names: dict[str, Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert capsys.readouterr().out.split("\n") == ["(25, 9, 64)", "(2, 9, 64)", ""]
    # The last step: one query token for each request, over what the pools hold for it.
    pools = [np.asarray(names[n], np.float64) for n in ("k_pages", "v_pages")]
    for r, kv_len in enumerate((21, 6)):
        k, v = (pool[names["block_table"][r]].reshape(-1, 3, 64)[:kv_len] for pool in pools)
        assert np.any(k != 0, axis=(1, 2)).all()  # every token of both steps was appended
        q = np.asarray(names["q"][r], np.float64).reshape(3, 3, 64)
        weights = np.exp(np.einsum("hgd,nhd->hgn", q, k) / 8.0)
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("hgn,nhd->hgd", weights, v).reshape(9, 64)
        assert_close(names["o"][r], expected, rtol=0, atol=1e-5)


def test_public_names_in_the_text_exist():
    text = readme_text.README.read_text(encoding="utf-8")
    for name in set(re.findall(r"\bjaxinfer\.([a-z_]+)\(", text)):
        assert hasattr(jaxinfer, name), name
