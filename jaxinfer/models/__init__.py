"""A Llama-family model served through the engine: loaders, tokenizer, forward pass, continuous batching.

The engine itself (jaxinfer) does not import this package. Loading real models needs `pip install
jaxinfer[models]`.
"""

from jaxinfer.models.config import LlamaConfig
from jaxinfer.models.download import DownloadError, default_model
from jaxinfer.models.generate import Completion, Event, Generator
from jaxinfer.models.model import Model, load_model
from jaxinfer.models.params import init_params, unstack_layers
from jaxinfer.models.sampling import Sampling
from jaxinfer.models.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "DownloadError",
    "Event",
    "Generator",
    "LlamaConfig",
    "Model",
    "Sampling",
    "Tokenizer",
    "default_model",
    "init_params",
    "load_model",
    "unstack_layers",
]
