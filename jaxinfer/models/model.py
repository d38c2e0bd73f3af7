"""A loaded model: config, weights and tokenizer in one object, from whatever the given path is.

File formats are the loaders' business, running the model generate.py's.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import LlamaConfig
from jaxinfer.models.download import default_model
from jaxinfer.models.gguf_loader import load_gguf
from jaxinfer.models.params import Params, unstack_layers
from jaxinfer.models.safetensors_loader import load_hf_folder
from jaxinfer.models.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf


@dataclass(frozen=True)
class Model:
    """What a `Generator` serves. `tokenizer`: None for a model that is fed tokens only."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None = None
    name: str = "model"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """dtype of the weights, and so of activations and cache."""
        dtype: np.dtype[np.generic] = np.dtype(self.params["embed"].dtype)
        return dtype


def load_model(
    path: str | os.PathLike[str] | None = None,
    dtype: Any = jnp.float32,
    *,
    ignore_keys: Collection[str] = (),
    progress: bool = True,
) -> Model:
    """Loads a GGUF file or a Hugging Face folder; `path=None`: SmolLM2-135M-Instruct, fetched once.

    `dtype`: float32 or bfloat16. `ignore_keys`: see `config_from_hf`. Raises ValueError for damaged or
    incomplete files, NotImplementedError for models this code would compute wrongly, DownloadError (default
    model only).
    """
    path = default_model() if path is None else Path(path).expanduser()
    if path.is_dir():
        config, params = load_hf_folder(path, dtype, ignore_keys=ignore_keys, progress=progress)
        tokenizer = tokenizer_from_hf(path)
    elif path.is_file():
        config, params, metadata = load_gguf(path, dtype, progress=progress)
        tokenizer = tokenizer_from_gguf(metadata, str(path))
    else:
        raise ValueError(f"model: {path} is neither a GGUF file nor a folder")
    if jax.default_backend() != "cpu":
        params = unstack_layers(params)
    return Model(config, params, tokenizer, path.name)
