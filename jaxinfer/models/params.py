"""The weights of a Llama model as a pytree: its names and shapes, random weights, and filling it from named
tensors.

Layout: `{"embed", "final_norm", ["lm_head"], "layers": {name: [num_layers, ...]}}`; matrices are (out, in). After
`unstack_layers`, "layers" is a list with a dict per layer, in which matrices of one input are joined.
File formats are not known here: a loader hands in a function that reads one tensor by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxinfer.models.config import LlamaConfig

Params: TypeAlias = dict[str, Any]  # leaves are jax.Array; "layers": stacked, or a list
Tensor: TypeAlias = npt.NDArray[Any]


#: Weights of a layer that multiply the same input, or are added to the results.
JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_bias", "k_bias", "v_bias"),
    ("gate_proj", "up_proj"),
    ("gate_bias", "up_bias"),
)


def joined_name(names: tuple[str, ...]) -> str:
    """Of the weight in which `unstack_layers` joins others: "q_k_v_proj"; a single name stays."""
    *stems, kind = (*(name.partition("_")[0] for name in names), names[0].partition("_")[2])
    return "_".join([*stems, kind])


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of one layer."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "mlp_norm": (hidden,),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if config.o_bias:
        shapes["o_bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"gate_bias": (ffn,), "up_bias": (ffn,), "down_bias": (hidden,)}
    return shapes


def model_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight outside the layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """float32 or bfloat16, as a numpy dtype; ValueError for anything else."""
    got: np.dtype[Any] = np.dtype(dtype)
    if got not in (np.dtype(jnp.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype: got {got}, expected float32 or bfloat16")
    return got


def init_params(config: LlamaConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights (normal with standard deviation `1 / sqrt(in)`, norms and biases near 1 and 0)."""
    dtype = check_dtype(dtype)

    def draw(name: str, shape: tuple[int, ...], key: jax.Array, lead: tuple[int, ...] = ()) -> jax.Array:
        noise = jax.random.normal(key, lead + shape, jnp.float32)
        if len(shape) == 2:
            return jnp.asarray(noise * shape[1] ** -0.5, dtype)
        return jnp.asarray(0.1 * noise + (1.0 if name.endswith("norm") else 0.0), dtype)

    outer, inner = model_shapes(config), layer_shapes(config)
    keys = iter(jax.random.split(key, len(outer) + len(inner)))
    params: Params = {name: draw(name, shape, next(keys)) for name, shape in outer.items()}
    params["layers"] = {
        name: draw(name, shape, next(keys), (config.num_layers,)) for name, shape in inner.items()
    }
    return params


def unstack_layers(params: Params) -> Params:
    """The same weights with "layers" as a list, and with the matrices of each entry of JOINED as one: what a GPU
    decodes fastest from. The stacks are freed one by one: give `params` away.
    """
    layers = dict(params["layers"])
    count = len(layers["attn_norm"])
    unstacked: list[dict[str, jax.Array]] = [{} for _ in range(count)]

    @jax.jit
    def split(stacks: list[jax.Array]) -> list[jax.Array]:
        return [jnp.concatenate([stack[i] for stack in stacks]) for i in range(count)]

    joined = [name for names in JOINED for name in names]
    groups: list[tuple[str, ...]] = [(name,) for name in layers if name not in joined]
    groups += [names for names in JOINED if names[0] in layers]
    for names in groups:
        leaves = split([layers.pop(name) for name in names])
        for weights, leaf in zip(unstacked, leaves, strict=True):
            weights[joined_name(names)] = leaf
    return params | {"layers": unstacked}


def load_params(
    config: LlamaConfig,
    names: Mapping[str, str],
    available: Collection[str],
    read: Callable[[str], Tensor],
    *,
    dtype: Any,
    source: str,
    ignored: Collection[str] = (),
    progress: bool = True,
) -> Params:
    """Reads every weight, casts it to `dtype` and stacks the layers.

    `names`: weight name -> tensor name in the file, with `{layer}` for the layer index. `available`: all
    tensor names of the file; one that is neither read nor in `ignored` is refused, since it would belong to
    another computation. Raises ValueError for missing tensors and wrong shapes, with file, tensor and both
    values.
    """
    dtype = check_dtype(dtype)
    outer, inner = model_shapes(config), layer_shapes(config)
    wanted = {names[name] for name in outer}
    wanted |= {names[name].format(layer=layer) for name in inner for layer in range(config.num_layers)}
    missing, extra = sorted(wanted - set(available)), sorted(set(available) - wanted - set(ignored))
    if missing:
        raise ValueError(f"{source}: lacks {len(missing)} of {len(wanted)} tensors, such as {missing[0]!r}")
    if extra:
        raise ValueError(f"{source}: has {len(extra)} tensors this model does not use, such as {extra[0]!r}")
    bar = Progress(f"loading {source}", len(wanted), enabled=progress)

    def fetch(tensor: str, shape: tuple[int, ...]) -> Tensor:
        array = read(tensor)
        if array.shape != shape:
            raise ValueError(f"{source}: tensor {tensor!r} has shape {array.shape}, expected {shape}")
        bar.advance()
        return array.astype(dtype)

    params: Params = {}
    with bar:
        for name, shape in outer.items():
            params[name] = jnp.asarray(fetch(names[name], shape))
        params["layers"] = {}
        for name, shape in inner.items():
            stacked = np.empty((config.num_layers, *shape), dtype)
            for layer in range(config.num_layers):
                stacked[layer] = fetch(names[name].format(layer=layer), shape)
            params["layers"][name] = jnp.asarray(stacked)
    return params


class Progress:
    """One line on stderr that counts up, redrawn at most ten times a second; silent when stderr is no
    terminal.
    """

    def __init__(self, label: str, total: int, *, enabled: bool = True) -> None:
        self.label, self.total, self.done = label, total, 0
        self._enabled = enabled and sys.stderr.isatty()
        self._drawn = 0.0

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if self._enabled and (now - self._drawn > 0.1 or self.done >= self.total):
            self._drawn = now
            percent = 100 * self.done // max(self.total, 1)
            print(f"\r{self.label}: {percent:3d}%", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._enabled and self._drawn:
            print(file=sys.stderr)
