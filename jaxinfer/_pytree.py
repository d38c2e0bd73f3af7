"""Dataclasses as pytrees, of which `jax.export` can save programs: what of them is operands, what is static.

The static part goes into a saved program as JSON. Not here: what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export


def register(
    cls: type[Any],
    *,
    data_fields: Sequence[str],
    meta_fields: Sequence[str] = (),
    encode: Callable[[Any], Any] = lambda value: value,
    decode: Callable[[str, Any], Any] = lambda name, value: value,
) -> None:
    """Registers a dataclass whose `data_fields` are operands and whose `meta_fields` are static.

    Args:
      encode: of a static value that JSON does not have, one that it has.
      decode: from the name of a field and what `encode` made of its value (tuples are lists by then), the value.
    """
    jax.tree_util.register_dataclass(cls, data_fields=list(data_fields), meta_fields=list(meta_fields))

    def save(values: tuple[Any, ...]) -> bytes:
        return json.dumps(dict(zip(meta_fields, values, strict=True)), default=encode).encode()

    def load(saved: bytes | bytearray) -> dict[str, Any]:
        values = json.loads(bytes(saved))
        if list(values) != list(meta_fields):
            raise ValueError(
                f"a saved {cls.__name__} has the fields {list(values)}, this version of jaxinfer {list(meta_fields)}"
            )
        try:
            return {name: decode(name, value) for name, value in values.items()}
        except (KeyError, TypeError) as error:  # of a field that has fields of its own
            raise ValueError(f"a saved {cls.__name__} is another version of jaxinfer's: {error}") from None

    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jaxinfer.{cls.__name__}",
        serialize_auxdata=save,
        deserialize_auxdata=load,
        from_children=lambda static, children: cls(**static, **dict(zip(data_fields, children, strict=True))),
    )
