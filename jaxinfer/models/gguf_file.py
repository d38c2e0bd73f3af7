"""Reading a GGUF file: header, metadata and tensors (dequantised by the `gguf` package). Which tensors make a
model is not known here.

The header is parsed here, because a damaged file must end in a message that names the tensor and both sizes.
Format: the GGUF specification, version 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class _TensorInfo:
    shape: tuple[int, ...]  # numpy order (out, in); the file lists it reversed
    kind: int  # ggml type
    begin: int  # byte offset in the file
    num_bytes: int


class GgufFile:
    """`metadata`: key -> value (numbers, strings, lists). `tensors`: name -> where it lies. `read(name)` ->
    float32.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 24:
            raise ValueError(f"{self.path}: {size} bytes, expected at least the 24 bytes of a GGUF header")
        self._data = np.memmap(self.path, np.uint8, mode="r")
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{self.path}: begins with {bytes(self._data[:4])!r}, expected b'GGUF'")
        cursor = _Cursor(self._data, self.path)
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version}, expected 2 or 3 (little-endian)")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        align = int(self.metadata.get("general.alignment", 32))
        if align < 1:
            raise ValueError(f"{self.path}: general.alignment {align}, expected at least 1")
        base = -(-cursor.at // align) * align
        self.tensors: dict[str, _TensorInfo] = dict(self._locate(infos, base, size))

    def _locate(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, size: int
    ) -> Iterator[tuple[str, _TensorInfo]]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for name, shape, kind, offset in infos:
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise NotImplementedError(
                    f"{self.path}: tensor {name!r} has unknown ggml type {kind}"
                ) from None
            if shape and shape[-1] % block:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has row length {shape[-1]}, no multiple of {block}"
                )
            num_bytes = math.prod(shape) // block * block_bytes
            if base + offset + num_bytes > size:
                raise ValueError(
                    f"{self.path}: tensor {name!r} ends at byte {base + offset + num_bytes}, "
                    f"but the file has {size} bytes: it is truncated"
                )
            yield name, _TensorInfo(shape, kind, base + offset, num_bytes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor, dequantised, in (out, in) order."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        raw = np.asarray(self._data[info.begin : info.begin + info.num_bytes])
        kind = GGMLQuantizationType(info.kind)
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        if kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        rows = raw.reshape(-1, info.shape[-1] // block * block_bytes)
        try:
            values: npt.NDArray[np.float32] = dequantize(rows, kind)
        except NotImplementedError:
            raise NotImplementedError(
                f"{self.path}: tensor {name!r} has type {kind.name}, which cannot be dequantised"
            ) from None
        return values.astype(np.float32, copy=False).reshape(info.shape)


class _Cursor:
    """Reads the header front to back; every read is bounds-checked."""

    def __init__(self, data: npt.NDArray[np.uint8], path: Path) -> None:
        self._data, self._path, self.at = data.data, path, 0

    def _take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self._data):
            raise ValueError(
                f"{self._path}: the header needs byte {end}, "
                f"but the file has {len(self._data)} bytes: it is truncated"
            )
        self.at, begin = end, self.at
        return self._data[begin:end]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return bytes(self._take(self.scalar("Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                code = np.dtype("<" + _SCALARS[inner]) if _SCALARS[inner] != "?" else np.dtype(np.bool_)
                return np.frombuffer(self._take(count * code.itemsize), code).tolist()
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: metadata value of unknown type {kind} before byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.scalar("I")
        shape = tuple(reversed([self.scalar("Q") for _ in range(rank)]))
        return name, shape, self.scalar("I"), self.scalar("Q")
