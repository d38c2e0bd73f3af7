"""`append_kv`: writes this step's K and V into the paged pools, in place when they are donated.

There is no cache class: pools are plain arrays that the caller owns. Reading them is attention.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import _args
from .attention import DTYPES, check_kv_layout, check_layer, layer_operand, num_heads, page_shape
from .ffi import ABSENT, append_attributes, append_kernel_attributes, bind, make_primitive


def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array | np.ndarray[Any, np.dtype[Any]],
    *,
    layer: jax.Array | int | None = None,
    kv_layout: str = "NHD",
) -> tuple[jax.Array, jax.Array]:
    """Writes token t's K and V to slot `slots[t] = page * page_size + offset` of the pools.

    Append first, then attend on the returned pools: reading the old ones afterwards makes XLA copy them. Under
    `jax.jit(..., donate_argnums=...)` the update is in place.

    Args:
      k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, num_kv_heads,
        page_size, head_dim] ("HND"), float32, float16 or bfloat16; with a leading [num_layers] axis when `layer`
        is given. head_dim may differ between the two.
      k, v: [num_tokens, num_kv_heads, head_dim], the pools' dtype.
      slots: int32 [num_tokens]; a slot outside [0, num_pages * page_size), -1 by custom, is skipped. Duplicates are
        refused on the host and unspecified in compiled code. `layout.slots()` gives those of a step's new tokens.
      layer: int32 scalar, an operand; out of range nothing is written.
      kv_layout: "NHD" or "HND".

    Returns:
      The updated (k_pages, v_pages).

    Raises:
      ValueError: a shape, dtype or host value is wrong; says what was expected.
      TypeError: an argument is something else than an array.
    """
    check_kv_layout(kv_layout)
    check_layer(layer)
    rank = 4 + (layer is not None)
    for name, pages, x_name, x in (("k_pages", k_pages, "k", k), ("v_pages", v_pages, "v", v)):
        _args.check_array(name, pages)
        _args.check_array(x_name, x)
        if pages.ndim != rank:
            with_layer = "[num_layers] + " if layer is not None else ""
            raise ValueError(f"{name} must be {with_layer}{page_shape(kv_layout)}, got shape {pages.shape}")
        if str(pages.dtype) not in DTYPES:
            raise ValueError(f"{name} must be one of {DTYPES}, got {pages.dtype}")
        if x.dtype != pages.dtype:
            raise ValueError(f"{x_name} must have {name}'s dtype {pages.dtype}, got {x.dtype}")
        expected = (num_heads(pages, kv_layout, False), pages.shape[-1])
        if x.ndim != 3 or x.shape[1:] != expected:
            raise ValueError(
                f"{x_name} must be [num_tokens, {expected[0]}, {expected[1]}] to fit {name} {pages.shape} "
                f"({kv_layout}), got shape {x.shape}"
            )
    if k_pages.shape[:-1] != v_pages.shape[:-1] or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            "k_pages and v_pages may differ in head_dim only, got "
            f"{k_pages.dtype}{list(k_pages.shape)} and {v_pages.dtype}{list(v_pages.shape)}"
        )
    num_slots = k_pages.shape[-4] * k_pages.shape[-3 if kv_layout == "NHD" else -2]
    known = isinstance(num_slots, int)  # jax.export may leave the size of a pool open
    if known and num_slots > _args.INT32_MAX:
        raise ValueError(f"a pool may have at most {_args.INT32_MAX} slots (int32), got {num_slots}")
    if not (k.shape[0] == v.shape[0]):
        raise ValueError(f"k and v must have the same num_tokens, got {k.shape[0]} and {v.shape[0]}")
    slots = _args.ints("slots", slots, 1)
    if slots.shape[0] != k.shape[0]:
        raise ValueError(f"slots must have k's num_tokens {k.shape[0]}, got {slots.shape[0]}")
    if isinstance(slots, np.ndarray) and known:
        used = np.sort(slots[(slots >= 0) & (slots < num_slots)])
        twice = used[:-1][used[1:] == used[:-1]]
        if twice.size:
            raise ValueError(
                f"slots holds slot {twice[0]} more than once; every token needs a slot of its own"
            )
    k_out, v_out = bind(
        append_p,
        k_pages,
        v_pages,
        k,
        v,
        slots,
        ABSENT if layer is None else layer_operand(layer),
        kv_layout=kv_layout,
        has_layer=layer is not None,
    )
    return k_out, v_out


def _abstract_eval(k_pages: Any, v_pages: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    return k_pages.update(weak_type=False), v_pages.update(weak_type=False)


#: Operands: k_pages, v_pages, k, v, slots, layer (or ABSENT). Results: k_pages, v_pages, aliased.
append_p = make_primitive(
    "jaxinfer_append",
    _abstract_eval,
    append_attributes,
    append_kernel_attributes,
    aliases={0: 0, 1: 1},
    instead="`jaxinfer.reference.append_kv` does the same in plain JAX, on every platform.",
)
