"""KernelSpec: everything that a kernel is compiled for, except the architecture, and its short string.

The string travels in the custom call, so that a program which was exported or came from a cache can have its
kernels built in another process. Turning a spec into CUDA text is render.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

#: Kernels by name: the stem of the template's header, and with "jaxinfer_" before it what a profiler shows.
#: "attention" is the best template of its tile: which one, render.py decides once the GPU is known.
KERNELS = ("attention", "attention_mma", "attention_wgmma", "attention_simt", "merge", "append")

#: Head dims that kernels are compiled for; others are padded to the next one inside the kernel.
PADDED_HEAD_DIMS = (64, 96, 128, 192, 256)

#: Bytes of an element, by the names of the dtypes that there are kernels for.
ELEMENT_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Bits of a spec's and of a call's `rules`; the same values as `enum Rule` in csrc/params.h.
RULES = {"causal": 1, "window_left": 2, "window_right": 4, "logits_soft_cap": 8, "mask": 16, "softmax": 32}


def padded_head_dim(head_dim: int) -> int:
    """The compiled head dim that holds `head_dim`.

    Raises:
      NotImplementedError: no kernel is that wide.
    """
    for padded in PADDED_HEAD_DIMS:
        if head_dim <= padded:
            return padded
    raise NotImplementedError(f"head_dim {head_dim} on a GPU; supported: up to {PADDED_HEAD_DIMS[-1]}")


@dataclass(frozen=True)
class FunctorSource:
    """A user's rules as CUDA text, with what its `params` holds.

    Attributes:
      text: member functions of the variant, the holes that `from_cuda` in functor.py lists.
      pointers: (name, element type in CUDA) of every array, in the order of the call's trailing operands.
      scalars: (name, "float" or "int") of every number, in the order of their bytes behind the pointers.
    """

    text: str
    pointers: tuple[tuple[str, str], ...] = ()
    scalars: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile.

    Attributes:
      kernel: one of KERNELS.
      dtype: of q, k, v and o; append: of the pools (only its size matters).
      head_dim_qk, head_dim_vo: padded; merge uses head_dim_vo alone, append neither (0).
      tile: query rows of a tile; 0 where the kernel has no tiles.
      packed: rows are tokens x group_size heads.
      contiguous: K and V are contiguous, not paged.
      page_box: where the template may be attention_wgmma, on pages: rows that one copy of the tensor engine
        brings, 8 or 16; 0: rows one by one.
      rules: OR of the bits of RULES.
      functor: the user's rules, or None.
    """

    kernel: str
    dtype: str
    head_dim_qk: int = 0
    head_dim_vo: int = 0
    tile: int = 0
    packed: bool = False
    contiguous: bool = False
    page_box: int = 0
    rules: int = 0
    functor: FunctorSource | None = None

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}, got {self.kernel!r}")
        if self.dtype not in ELEMENT_SIZE:
            raise ValueError(f"dtype must be one of {tuple(ELEMENT_SIZE)}, got {self.dtype!r}")

    def to_json(self) -> str:
        """One line of JSON; equal specs give equal strings, defaults are left out."""
        fields = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(fields, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KernelSpec:
        """The spec that `to_json` wrote.

        Raises:
          ValueError: not a spec, or one of another version of jaxinfer.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            functor = fields.get("functor")
            if functor is not None:
                fields["functor"] = FunctorSource(
                    functor["text"],
                    tuple((name, kind) for name, kind in functor["pointers"]),
                    tuple((name, kind) for name, kind in functor["scalars"]),
                )
            return KernelSpec(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"not a kernel spec of this version of jaxinfer ({error}); if the program was exported by "
                f"another version, export it again. The spec: {text[:200]}"
            ) from error

    def __str__(self) -> str:
        parts = [self.kernel, self.dtype]
        if self.head_dim_vo:
            same = self.head_dim_qk in (0, self.head_dim_vo)
            parts.append(f"d{self.head_dim_vo}" if same else f"d{self.head_dim_qk}x{self.head_dim_vo}")
        if self.tile:
            parts.append(f"tile{self.tile}")
        parts += [name for name in ("packed", "contiguous") if getattr(self, name)]
        if self.page_box:
            parts.append(f"box{self.page_box}")
        if self.rules:
            parts.append(f"rules{self.rules}")
        if self.functor is not None:
            parts.append("functor")
        return " ".join(parts)


def join(specs: Iterable[KernelSpec]) -> str:
    """The `kernels` attribute of a custom call: one spec per line."""
    return "\n".join(spec.to_json() for spec in specs)
