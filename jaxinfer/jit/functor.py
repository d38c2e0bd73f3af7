"""Rules written by the user as CUDA text: `Variant.from_cuda`. Experimental.

Here: what the text may use, and how its arrays and numbers become operands. How it is woven into a kernel is
render.py's business.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .render import holes
from .spec import FunctorSource

if TYPE_CHECKING:
    from jaxinfer.variant import Variant

_ELEMENTS = {
    "float32": "float",
    "int32": "int",
    "uint32": "unsigned int",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
_NAME = re.compile(r"[A-Za-z]\w*\Z", re.ASCII)


@dataclass(frozen=True)
class Functor:
    """The static part of a user's rules; its arrays are operands of the Variant.

    Attributes:
      source: the text, and names and types of what it reads.
      values: the numbers, in the order of `source.scalars`.
      twin: the same rules in Python, see `from_cuda`; None: the rules run on a GPU only.
    """

    source: FunctorSource
    values: tuple[float | int, ...] = ()
    twin: Any = None

    def scalar_bytes(self) -> bytes:
        """The numbers as the kernel's parameter holds them, 4 bytes each."""
        return struct.pack(
            "".join("f" if kind == "float" else "i" for _, kind in self.source.scalars), *self.values
        )

    def saved(self) -> dict[str, Any]:
        """For `jax.export`, what JSON can hold.

        Raises:
          NotImplementedError: there is a twin, which is Python code.
        """
        if self.twin is not None:
            raise NotImplementedError(
                "a saved program whose operands hold a Variant with a twin; let the exported function make the "
                "Variant, from arrays that it is given"
            )
        source = self.source
        return {
            "text": source.text,
            "pointers": source.pointers,
            "scalars": source.scalars,
            "values": self.values,
        }

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Functor:
        """The opposite of `saved`, from lists in place of tuples."""
        pointers, scalars = (tuple((n, t) for n, t in saved[kind]) for kind in ("pointers", "scalars"))
        return cls(FunctorSource(saved["text"], pointers, scalars), tuple(saved["values"]))

    def twin_rule(
        self,
        operands: tuple[Any, ...],
        heads: tuple[int, int],
        request: Any,
        token: Any,
        q_pos: Any,
        kv_pos: Any,
        kv_index: Any,
    ) -> Callable[[Any], tuple[Any, Any]]:
        """The twin's rules for a tile of query tokens and a chunk of KV tokens.

        Args:
          operands: arrays of the Variant.
          heads: (num_kv_heads, group_size).
          request: BSR row.
          token, q_pos: [tile].
          kv_pos, kv_index: [chunk].

        Returns:
          From logits [tile, num_kv_heads, group_size, chunk] to (logits, bool that broadcasts against them).

        Raises:
          NotImplementedError: there is no twin, or the text fills holes that a twin cannot express.
        """
        filled = holes(self.source)
        if self.twin is None or not filled <= {"logits", "mask"}:
            raise NotImplementedError(
                f"rules written as CUDA text (holes {sorted(filled)}) outside a GPU; supported: logits and "
                "mask, with a `twin` in Python given to Variant.from_cuda"
            )
        kv_heads, group = (jnp.arange(n, dtype=jnp.int32) for n in heads)
        names = [name for name, _ in (*self.source.pointers, *self.source.scalars)]
        values = (*(jnp.asarray(x) for x in operands), *self.values)
        params = SimpleNamespace(**dict(zip(names, values, strict=True)))
        row = SimpleNamespace(
            request=request,
            token=token[:, None, None, None],
            q_pos=q_pos[:, None, None, None],
            qo_head=kv_heads[:, None, None] * heads[1] + group[:, None],
            kv_head=kv_heads[:, None, None],
        )
        col = SimpleNamespace(kv_pos=kv_pos, kv_index=kv_index)

        def rule(s: Any) -> tuple[Any, Any]:
            s = self.twin.logits(s, row, col, params) if "logits" in filled else s
            return s, self.twin.mask(row, col, params) if "mask" in filled else jnp.ones((), bool)

        return rule


def from_cuda(
    source: str,
    params: Mapping[str, Any] | None = None,
    *,
    twin: Any = None,
    **rules: Any,
) -> Variant:
    """A Variant whose rules are CUDA text, compiled into the kernel when it is first needed. Experimental.

    `source` defines one or more of these functions (and helpers, if it likes):

        __device__ float logits(float s, const Row& row, const Col& col) const;
        __device__ bool mask(const Row& row, const Col& col) const;
        template <int kCount>
        __device__ void query(float (&x)[kCount], int dim, const Row& row) const;
        template <int kCount>
        __device__ void key(float (&x)[kCount], int dim, const Row& row, const Col& col) const;
        template <int kCount>
        __device__ void value(float (&x)[kCount], int dim, const Row& row, const Col& col) const;
        template <int kCount>
        __device__ void output(float (&x)[kCount], int dim, const Row& row) const;

    `logits` gets `s = sm_scale * q . k` and returns what the softmax sees (before the soft cap, if the
    Variant has one); with `softmax=False` what it returns is the weight. `mask` returns whether the query
    token may attend, and is combined with the Variant's other rules by AND. The others change kCount
    consecutive elements of a row of q, K, V or the normalised output in place, from element `dim` on; key and
    value must not depend on the query token of `row`. Rows that see nothing stay zero: output is not called for
    them. A `Row` has `request` (the BSR row), `token`, `q_pos`, `qo_head`, `kv_head`; a `Col` has `kv_pos` and
    `kv_index` (its index in the row's list). Arrays and numbers are `params.NAME`: pointers and scalars. For ALiBi:

        Variant.from_cuda(
            "__device__ float logits(float s, const Row& row, const Col& col) const {"
            "  return s + params.slopes[row.qo_head] * (col.kv_pos - row.q_pos);"
            "}",
            {"slopes": slopes},
            causal=True,
        )

    Args:
      source: CUDA C++ text.
      params: by name, arrays (float32, int32, uint32, int8, uint8 or bool; operands of the call, any shape,
        row-major) and Python numbers (static; changing one does not compile anything again but traces again).
      twin: an object with the same functions in Python, `logits(s, row, col, params)` and `mask(row, col,
        params)`, on arrays that broadcast; `implementation="reference"` runs it. It cannot express the other
        holes. Static: give the same object every time, for example a module or a class with static methods.
      rules: the other fields of `Variant`.

    Raises:
      ValueError: no hole is filled, or a name, dtype or number is wrong.
      TypeError: source is no text.
    """
    from jaxinfer.variant import Variant

    if not isinstance(source, str):
        raise TypeError(f"source must be CUDA text, got {type(source).__name__}")
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params must be a mapping from names to values, got {type(params).__name__}")
    pointers: list[tuple[str, str]] = []
    scalars: list[tuple[str, str]] = []
    arrays: list[Any] = []
    values: list[float | int] = []
    for name, value in (params or {}).items():
        if not isinstance(name, str) or not _NAME.match(name):
            raise ValueError(f"params: {name!r} is not a name that CUDA text can use")
        if isinstance(value, (bool, np.bool_)):
            raise ValueError(f"params[{name!r}] is a bool; pass 0 or 1")
        if isinstance(value, (int, np.integer)):
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"params[{name!r}] = {value} does not fit int32")
            scalars.append((name, "int"))
            values.append(int(value))
        elif isinstance(value, (float, np.floating)):
            scalars.append((name, "float"))
            values.append(float(np.float32(value)))
        else:
            array = value if isinstance(value, jax.Array) else np.asarray(value)
            if str(array.dtype) not in _ELEMENTS:
                raise ValueError(f"params[{name!r}] must be one of {tuple(_ELEMENTS)}, got {array.dtype}")
            pointers.append((name, _ELEMENTS[str(array.dtype)]))
            arrays.append(array)
    functor = FunctorSource(source, tuple(pointers), tuple(scalars))
    if not holes(functor):
        raise ValueError(
            "source fills no hole; it must define "
            "`float logits(float s, const Row& row, const Col& col) const`, "
            "`bool mask(const Row& row, const Col& col) const`, or query, key, value, output"
        )
    return Variant(functor=Functor(functor, tuple(values), twin), operands=tuple(arrays), **rules)
