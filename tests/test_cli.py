"""The command line as a user meets it: help, exit statuses, messages, and that each command does its work.

Texts of a real model are judged in the tests of jaxinfer.models; no test looks at times.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from backend import cpu_only

from jaxinfer import __version__
from jaxinfer.cli import main
from jaxinfer.models.command import ordered_text
from jaxinfer.models.generate import Event


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"jaxinfer {__version__}\n"


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["info"], ["bench"], ["bench", "plan"], ["bench", "decode"], ["warmup"]]
)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxinfer")
    if command in (["generate"], ["bench"]):
        assert "examples:" in out


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    assert main(["info"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    facts = {label: value.strip() for label, value in lines.items()}
    assert facts["jaxinfer"] == __version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["jax"] == jax.__version__
    assert facts["FFI targets, cpu"] == "jaxinfer_append, jaxinfer_attention"
    assert facts["CPU instructions"] in ("scalar", "avx2", "avx512")
    assert facts["cache folder"] == str(tmp_path)
    assert str(jax.devices()[0]) in facts["devices"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate"], "required: PROMPT"),
        (["generate", "x", "--max-tokens", "0"], "'0' is not a whole number above 0"),
        (["generate", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["bench", "decode", "--heads", "9"], "'9' is not of the form QO/KV"),
        (["bench", "decode", "--heads", "9/2"], "9 query heads are not a multiple of 2 KV heads"),
        (["bench", "plan", "--requests", "-1"], "'-1' is not a whole number above 0"),
    ],
)
def test_wrong_usage_is_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["generate", "x", "--model", "/nowhere/m.gguf"],
            "/nowhere/m.gguf is neither a GGUF file nor a folder",
        ),
        (["generate", "x", "--top-k", "5"], "--top-k and --top-p need --temperature"),
        (["generate", "x", "--temperature", "-1"], "temperature: got -1.0"),
        (["generate", "x", "--seed", "-1"], "seed: got -1"),
        (["bench", "decode", "--output", "/nowhere/x.png"], "the folder /nowhere does not exist"),
        (["bench", "prefill", "--json", "/nowhere/x.json"], "--json: the folder /nowhere does not exist"),
        (["warmup", "--heads", "8/2", "--head-dim", "100"], "head_dim 100; supported: every multiple of 8"),
        (["warmup", "--heads", "256/1"], "group size 256 (num_qo_heads 256 / num_kv_heads 1); supported"),
        (["bench", "decode", "--output", "x.gif"], "expected a path that ends in .png"),
    ],
)
def test_failures_are_status_1_and_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxinfer: error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"),
            "this needs the package tokenizers: pip install 'jaxinfer[models]'",
        ),
        (
            ImportError("templates need jinja2: pip install 'jaxinfer[models]'"),
            "templates need jinja2: pip install",
        ),
    ],
)
def test_missing_extra_is_named(
    error: ImportError, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lacking(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("jaxinfer.models.command.load_model", lacking)
    assert main(["generate", "x", "--model", "m"]) == 1
    assert message in capsys.readouterr().err


def test_missing_module_of_our_own_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("No module named 'jaxinfer.gone'", name="jaxinfer.gone")

    monkeypatch.setattr("jaxinfer.models.command.load_model", broken)
    with pytest.raises(ModuleNotFoundError):
        main(["generate", "x", "--model", "m"])


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXINFER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="neither a GGUF file nor a folder"):
        main(["generate", "x", "--model", "/nowhere"])


def test_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.models.command.load_model", interrupt)
    assert main(["generate", "x", "--model", "m"]) == 130
    assert capsys.readouterr().err == "jaxinfer: error: interrupted\n"


def test_bench_plan(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "plan", "--requests", "3", "5", "--rounds", "5"]) == 0
    captured = capsys.readouterr()
    assert "[2/2] plan 5 requests" in captured.err
    for text in ("jaxinfer.paged", "jaxinfer.plan", "C++", "3 requests", "5 requests"):
        assert text in captured.out


@cpu_only("the options of its table")
def test_bench_decode_with_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    png = tmp_path / "decode.png"
    argv = [
        "bench",
        "decode",
        "--batch",
        "2",
        "--kv",
        "20",
        "--heads",
        "4/2",
        "--head-dim",
        "16",
        "--page-size",
        "8",
    ]
    assert main([*argv, "--rounds", "5", "--output", str(png)]) == 0
    captured = capsys.readouterr()
    for text in ("B 2 x 20", "jaxinfer", "jax.nn, gathered pages", "GB/s", f"plot written to {png}"):
        assert text in captured.out
    assert png.read_bytes().startswith(b"\x89PNG")


def events(*tokens: tuple[int, str, bool]) -> Iterator[Event]:
    """Events (request, text, is last)."""
    for request, text, last in tokens:
        yield Event(request, 0, text, "stop" if last else None)


def test_single_text_continues_its_prompt():
    pieces = list(
        ordered_text(events((7, " is", False), (7, "", False), (7, " it.", True)), [7], ["This"], chat=False)
    )
    assert pieces == ["This", " is", " it.", "\n"]


def test_single_chat_answer_stands_alone():
    pieces = ordered_text(events((0, "Yes.", True)), [0], ["Is it?"], chat=True)
    assert "".join(pieces) == "Yes.\n"


def test_several_texts_come_in_order_and_the_first_one_live():
    source = [(1, "b1", False), (0, "a1", False), (1, "b2", True), (2, "c1", True), (0, "a2", True)]
    seen: list[str] = []
    for count, piece in enumerate(ordered_text(events(*source), [0, 1, 2], ["A ", "B ", "C "], chat=False)):
        seen.append(piece)
        if count == 1:
            assert seen == ["[1/3] A ", "a1"]  # passed on before the other requests are done
    assert "".join(seen) == "[1/3] A a1a2\n\n[2/3] B b1b2\n\n[3/3] C c1\n"


def test_several_chat_answers_stand_under_their_questions():
    source = events((0, "x", True), (1, "y", True))
    assert "".join(ordered_text(source, [0, 1], ["P?", "Q?"], chat=True)) == "[1/2] P?\nx\n\n[2/2] Q?\ny\n"
