"""`LlamaConfig`: everything the Llama forward pass must know of a checkpoint. Reading it from files is not
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.rope import RopeScaling


def words(text: str) -> frozenset[str]:
    """The blank-separated words of a table."""
    return frozenset(text.split())


@dataclass(frozen=True)
class LlamaConfig:
    """Facts of a Llama-family model (Llama, Mistral, Qwen2, SmolLM2); hashable, so it can be a static
    argument.

    `layer_windows`: per layer, how many tokens it attends to, itself included (`None`: all); `None` for the
    whole field: no layer has a window. `max_position`: longest context in tokens. `eos_ids`: any of them ends
    a text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads: got {self.num_qo_heads}, "
                f"expected a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim: got {self.head_dim}, expected an even number (rotary embedding needs pairs)"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected a number above 0")
        if self.layer_windows is not None:
            if len(self.layer_windows) != self.num_layers:
                raise ValueError(
                    f"layer_windows: got {len(self.layer_windows)} entries, "
                    f"expected num_layers {self.num_layers}"
                )
            for layer, window in enumerate(self.layer_windows):
                if window is not None and window < 1:
                    raise ValueError(
                        f"layer_windows[{layer}]: got {window}, expected at least 1, or None for off"
                    )
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_ids, bos_id: got token {token}, expected [0, {self.vocab_size})")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use: one plan per step is made for each."""
        return tuple(dict.fromkeys(self.layer_windows or (None,)))

    @property
    def window_index(self) -> tuple[int, ...]:
        """For every layer, which entry of `windows` it uses."""
        windows = self.windows
        return tuple(windows.index(w) for w in self.layer_windows or (None,) * self.num_layers)
