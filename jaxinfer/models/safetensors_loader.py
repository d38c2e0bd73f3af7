"""A Llama-family model from a Hugging Face folder: `config.json` and one or several `*.safetensors` files.

The format is read here (a JSON header and flat little-endian arrays), because a damaged file must end in a
message that names the tensor and both sizes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxinfer.models.config import LlamaConfig
from jaxinfer.models.hf_config import config_from_hf
from jaxinfer.models.params import Params, load_params

_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F64": np.dtype("<f8"),
}

_OUTER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
}
_NAMES = _OUTER_NAMES | {name: "model.layers.{layer}." + tensor for name, tensor in _LAYER_NAMES.items()}


@dataclass(frozen=True)
class _TensorInfo:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    num_bytes: int


def load_hf_folder(
    folder: str | os.PathLike[str],
    dtype: Any = jnp.float32,
    *,
    ignore_keys: Collection[str] = (),
    progress: bool = True,
) -> tuple[LlamaConfig, Params]:
    """`(config, weights in dtype)` of a folder as the Hugging Face hub stores it; `dtype` is float32 or
    bfloat16.

    `ignore_keys`: see `config_from_hf`. ValueError for truncated or missing files, missing tensors and wrong
    shapes (with file, tensor and both values), NotImplementedError for models that this code would compute
    wrongly.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{folder}: lacks config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else None
    config = config_from_hf(
        _read_json(config_path), generation, source=str(config_path), ignore_keys=ignore_keys
    )
    tensors: dict[str, _TensorInfo] = {}
    for path in _weight_files(folder):
        for name, info in read_header(path).items():
            if name in tensors:
                raise ValueError(f"{path}: tensor {name!r} is also in {tensors[name].path}")
            tensors[name] = info
    _check_index(folder, tensors)
    # Old exports store the rotary frequencies; a tied model may repeat its embedding as lm_head.
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    ignored |= {_OUTER_NAMES["lm_head"]} if config.tie_embeddings else set()
    params = load_params(
        config,
        _NAMES,
        tensors,
        lambda name: read_tensor(tensors[name], name),
        dtype=dtype,
        source=str(folder),
        ignored=ignored,
        progress=progress,
    )
    return config, params


def read_header(path: Path) -> dict[str, _TensorInfo]:
    """Where every tensor of one safetensors file lies; checks every range against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_bytes = int.from_bytes(head, "little")
        if len(head) < 8 or 8 + header_bytes > size:
            raise ValueError(
                f"{path}: the header needs {8 + header_bytes} bytes, but the file has {size}: truncated"
            )
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            fields = {name: _header_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: the header is no safetensors header ({error!r})") from None
    tensors = {}
    for name, (dtype, shape, begin, end) in fields.items():
        if 8 + header_bytes + end > size:
            raise ValueError(
                f"{path}: tensor {name!r} ends at byte {8 + header_bytes + end}, "
                f"but the file has {size} bytes: it is truncated"
            )
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            need = math.prod(shape) * _DTYPES[dtype].itemsize
            raise ValueError(
                f"{path}: tensor {name!r} of shape {shape} needs {need} bytes, but has {end - begin}"
            )
        tensors[name] = _TensorInfo(path, dtype, shape, 8 + header_bytes + begin, end - begin)
    return tensors


def _header_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = entry["data_offsets"]
    return str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(begin), int(end)


def read_tensor(info: _TensorInfo, name: str) -> npt.NDArray[Any]:
    """One tensor in the dtype it is stored in."""
    if info.dtype not in _DTYPES:
        raise NotImplementedError(
            f"{info.path}: tensor {name!r} has dtype {info.dtype}; supported: {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[info.dtype]
    array = np.fromfile(info.path, dtype, count=info.num_bytes // dtype.itemsize, offset=info.begin)
    return array.reshape(info.shape)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / str(name) for name in _weight_map(index).values()})
        for path in files:
            if not path.is_file():
                raise ValueError(f"{index}: names {path.name!r}, which is not in {folder}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: has no *.safetensors file")
    return files


def _check_index(folder: Path, tensors: dict[str, _TensorInfo]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        found = tensors[name].path.name if name in tensors else None
        if found != file:
            raise ValueError(f"{index}: places tensor {name!r} in {file!r}, but it is in {found!r}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: lacks 'weight_map'")
    return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value
