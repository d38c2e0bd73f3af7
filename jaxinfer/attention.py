"""`attention`: the one operator. Checks a call when it is traced, then runs it through the plan's primitive.

Not here: who computes which piece (plan.py), the math in plain JAX (reference.py), attribute types and lowering
(ffi.py), the kernels (csrc/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import _args, reference
from ._args import Array, check_array
from .ffi import ABSENT, attention_attributes, attention_kernel_attributes, bind, make_primitive
from .jit.spec import ELEMENT_SIZE
from .layout import BlockSparse
from .plan import Plan
from .state import AttentionState
from .variant import Variant

KV_LAYOUTS = ("NHD", "HND")
#: Kernels that a caller may ask for by name; None chooses.
IMPLEMENTATIONS = ("reference", "mma", "wgmma")
DTYPES = tuple(ELEMENT_SIZE)
FLOAT32_MAX = float(np.finfo(np.float32).max)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: BlockSparse,
    plan: Plan,
    *,
    variant: Variant | None = None,
    sm_scale: float | None = None,
    layer: jax.Array | int | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | AttentionState:
    """Attention of ragged queries over a block-sparse KV cache: prefill, chunked prefill, decode, verification.

    `o_t = sum_j softmax_j(transform(sm_scale * q_t . k_j)) v_j` over the KV tokens j that the rows covering token t
    list and the variant lets it see (FlashInfer, arXiv 2501.01005, sections 3.1 to 3.3). Runs inside `jax.jit`;
    lengths, tables and the plan are operands, so one compiled program serves every batch of the same capacity.

    Args:
      q: [num_tokens, num_qo_heads, head_dim_qk], float32, float16 or bfloat16. Tokens beyond the last request are
        padding and get the empty state.
      k, v: pages [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, num_kv_heads, page_size,
        head_dim] ("HND"), or contiguous [num_kv_tokens, num_kv_heads, head_dim]; with a leading [num_layers] axis
        when `layer` is given. The dtype of q; head_dim_qk and head_dim_vo may differ.
      layout: which tokens see which KV blocks.
      plan: made by `jaxinfer.plan` for this layout, these heads and this variant.
      variant: the attention rules; `Variant()` by default (full attention).
      sm_scale: factor of q . k, a Python float; `1 / sqrt(head_dim_qk)` by default.
      layer: int32 scalar, an operand; out of range gives the empty state.
      kv_layout: "NHD" or "HND".
      return_lse: also return the log-sum-exp.
      implementation: None (the plan's kernels for the platform), "reference" (plain JAX, every platform), "mma"
        (tensor cores through mma.sync; GPU, 16-bit dtypes, tiles 16 to 128) or "wgmma" (warpgroup instructions;
        Hopper, 16-bit dtypes, tiles 128 and 192; what None takes there, but for rules that change q, k or v).

    Returns:
      o [num_tokens, num_qo_heads, head_dim_vo] in q's dtype, or `AttentionState(o, lse)` with lse float32
      [num_tokens, num_qo_heads], natural log. A token that sees nothing gets o = 0 and lse = -inf.

    Raises:
      ValueError: a shape, dtype or option is wrong, or the plan was made for another call; says what was expected.
      TypeError: an argument is something of another kind, or a static one is traced.
      NotImplementedError: no kernel supports the call.
    """
    variant = Variant() if variant is None else variant
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be a jaxinfer.Variant, got {type(variant).__name__}")
    check_implementation(implementation)
    _check_operands(q, k, v, layout, layer, kv_layout)
    _check_layout(layout)
    if sm_scale is None:
        sm_scale = 1.0 / math.sqrt(q.shape[2])
    elif isinstance(sm_scale, jax.Array):
        raise TypeError("sm_scale is static and must be a Python float, got a jax.Array")
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"sm_scale must be a Python float, got {sm_scale!r}")
    sm_scale = _args.real("sm_scale", sm_scale)
    if not abs(sm_scale) <= FLOAT32_MAX:
        raise ValueError(f"sm_scale must be finite in float32, got {sm_scale}")
    return_lse = _args.flag("return_lse", return_lse)
    if return_lse and not variant.softmax:
        raise ValueError(
            "return_lse=True needs softmax: without it (Variant(softmax=False)) lse is not defined"
        )
    variant.check_operands(layout)
    check_plan(plan, q, v, num_heads(k, kv_layout, layout.contiguous), layout, variant)
    layers = None if layer is None else layer_operand(layer)
    if implementation == "reference":
        return reference.attention(
            q,
            k,
            v,
            layout,
            plan,
            variant=variant,
            sm_scale=sm_scale,
            layer=layers,
            kv_layout=kv_layout,
            return_lse=return_lse,
        )
    o, lse = _bind(q, k, v, layout, plan, variant, sm_scale, layers, kv_layout, implementation)
    return AttentionState(o, lse) if return_lse else o


def _bind(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: BlockSparse,
    plan: Plan,
    variant: Variant,
    sm_scale: float,
    layers: Array | None,
    kv_layout: str,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    masked = variant.mask_bits is not None
    spec = plan.spec
    o, lse, _ = bind(
        attention_p,
        q,
        k,
        v,
        ABSENT if layers is None else layers,
        plan.data,
        ABSENT if layout.contiguous else layout.kv_indices,
        layout.kv_offset,
        layout.q_pos,
        ABSENT if layout.block_pos is None else layout.block_pos,
        layout.q_start if masked else ABSENT,
        layout.kv_len if masked else ABSENT,
        variant.mask_bits if masked else ABSENT.astype(np.uint8),
        variant.mask_indptr if masked else ABSENT,
        *variant.operands,
        rules=rules(variant),
        sm_scale=sm_scale,
        logits_soft_cap=variant.logits_soft_cap,
        window_left=variant.window_left,
        window_right=variant.window_right,
        kv_layout=kv_layout,
        contiguous=layout.contiguous,
        has_layer=layers is not None,
        has_block_pos=layout.block_pos is not None,
        plan_classes=tuple(
            (c.tile, int(c.packed), c.num_queues, c.num_ctas, c.item_capacity) for c in spec.classes
        ),
        merge_capacity=spec.merge_capacity,
        slot_capacity=spec.slot_capacity,
        functor=None if variant.functor is None else variant.functor.source,
        scalars=b"" if variant.functor is None else variant.functor.scalar_bytes(),
        implementation=implementation,
    )
    return o, lse


def rules(variant: Variant) -> tuple[str, ...]:
    """The rules that are on, by the names of `jit.spec.RULES`: the structure that a kernel is compiled for."""
    on = {
        "causal": variant.causal,
        "window_left": variant.window_left is not None,
        "window_right": variant.window_right is not None,
        "logits_soft_cap": variant.logits_soft_cap is not None,
        "mask": variant.mask_bits is not None,
        "softmax": variant.softmax,
    }
    return tuple(rule for rule, is_on in on.items() if is_on)


def _abstract_eval(
    q: Any, k: Any, v: Any, *operands: Any, slot_capacity: int, **params: Any
) -> Sequence[Any]:
    num_tokens, num_qo_heads, _ = q.shape
    head_dim_vo = v.shape[-1]
    spec = q.sharding.spec

    def like_q(shape: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        # .update keeps the mesh and the varying axes of q, which a fresh ShapedArray would lose.
        sharding = q.sharding.update(spec=PartitionSpec(*axes))
        return q.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)

    return (
        like_q((num_tokens, num_qo_heads, head_dim_vo), q.dtype, spec[0], spec[1], None),
        like_q((num_tokens, num_qo_heads), np.float32, spec[0], spec[1]),
        like_q((slot_capacity * num_qo_heads * (head_dim_vo + 2),), np.float32, None),
    )


#: Operands: q, k, v, layer, plan, kv_indices, kv_offset, q_pos, block_pos, q_start, kv_len, mask_bits, mask_indptr
#: (in place of an absent one: ABSENT), then the arrays of `Variant.from_cuda`. Results: o, lse, workspace (partial
#: o, max, sum).
attention_p = make_primitive(
    "jaxinfer_attention",
    _abstract_eval,
    attention_attributes,
    attention_kernel_attributes,
    num_scratch=1,
    instead='implementation="reference" is plain JAX, with jax.vmap and forward-mode differentiation.',
)


def check_implementation(implementation: str | None) -> None:
    if implementation is None or (isinstance(implementation, str) and implementation in IMPLEMENTATIONS):
        return
    raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def _check_operands(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: BlockSparse,
    layer: jax.Array | int | None,
    kv_layout: str,
) -> None:
    if not isinstance(layout, BlockSparse):
        raise TypeError(f"layout must be a jaxinfer.BlockSparse, got {type(layout).__name__}")
    check_kv_layout(kv_layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x)
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_qo_heads, head_dim], got shape {q.shape}")
    if str(q.dtype) not in DTYPES:
        raise ValueError(f"q must be one of {DTYPES}, got {q.dtype}")
    if layout.contiguous:
        kind, rank = "contiguous, [num_kv_tokens, num_kv_heads, head_dim]", 3
    else:
        kind, rank = f"paged, {page_shape(kv_layout)}", 4
    rank += layer is not None
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.ndim != rank:
            with_layer = (
                " with a leading [num_layers] axis because layer is given" if layer is not None else ""
            )
            raise ValueError(
                f"{name} must have rank {rank} (the layout is {kind}){with_layer}, got shape {x.shape}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v may differ in head_dim only, got shapes {k.shape} and {v.shape}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if not layout.contiguous:
        page_size = k.shape[-3] if kv_layout == "NHD" else k.shape[-2]
        if page_size != layout.page_size:
            raise ValueError(
                f"k has page_size {page_size} (shape {k.shape}, kv_layout {kv_layout}), "
                f"the layout has page_size {layout.page_size}"
            )
    elif layout.num_layouts == 1 and k.shape[-3] < layout.kv_capacity:  # composed layouts share K
        raise ValueError(
            f"k has {k.shape[-3]} KV tokens (shape {k.shape}), the layout was built for num_kv_tokens "
            f"{layout.kv_capacity}"
        )
    num_kv_heads = num_heads(k, kv_layout, layout.contiguous)
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads != 0:
        raise ValueError(f"num_qo_heads {q.shape[1]} must be a multiple of num_kv_heads {num_kv_heads}")
    if q.shape[0] != layout.num_tokens:
        raise ValueError(
            f"q has {q.shape[0]} tokens, the layout was built for num_tokens {layout.num_tokens}"
        )
    check_layer(layer)


def page_shape(kv_layout: str) -> str:
    """The shape of a pool without its layer axis, in words."""
    axes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
    return f"[num_pages, {axes}, head_dim] ({kv_layout})"


def num_heads(k: jax.Array, kv_layout: str, contiguous: bool) -> int:
    """num_kv_heads of a cache tensor."""
    return int(k.shape[-3] if kv_layout == "HND" and not contiguous else k.shape[-2])


def check_kv_layout(kv_layout: str) -> None:
    _args.one_of("kv_layout", kv_layout, KV_LAYOUTS)


def check_layer(layer: jax.Array | int | None) -> None:
    if layer is None:
        return
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        return
    dtype, size = getattr(layer, "dtype", None), getattr(layer, "size", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or size != 1:
        raise ValueError(f"layer must be an int32 scalar, got {layer!r}")


def layer_operand(layer: jax.Array | int) -> Array:
    """`layer` as int32 [1]. What int32 cannot hold stays out of range instead of becoming another layer."""
    if isinstance(layer, jax.Array):
        return _args.ints("layer", layer.reshape(1), 1)
    number = max(-1, min(int(np.asarray(layer).item()), _args.INT32_MAX))
    return np.full(1, number, np.int32)


def _check_layout(layout: BlockSparse) -> None:
    """Dtypes and shapes of a layout's arrays: kernels index them by the plan's rows and tokens."""
    entries = dict.fromkeys(("q_start", "q_len", "kv_start", "kv_len", "kv_offset"), layout.num_rows)
    entries |= {"kv_indices": np.shape(layout.kv_indices)[0], "q_pos": layout.num_tokens}
    if layout.block_pos is not None:
        entries["block_pos"] = entries["kv_indices"]
    for name, size in entries.items():
        array = getattr(layout, name)
        dtype = getattr(array, "dtype", type(array).__name__)
        if dtype != np.int32 or array.shape != (size,):
            raise ValueError(f"layout.{name} must be int32[{size}], got {dtype}{list(np.shape(array))}")


def check_plan(
    plan: Plan, q: jax.Array, v: jax.Array, num_kv_heads: int, layout: BlockSparse, variant: Variant
) -> None:
    """Compares the plan's static facts with the call; raises ValueError naming every difference."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a jaxinfer.Plan, got {type(plan).__name__}")
    spec = plan.spec
    facts: dict[str, tuple[Any, Any]] = {
        "num_tokens": (spec.num_tokens, layout.num_tokens),
        "num_rows": (spec.num_rows, layout.num_rows),
        "num_layouts": (spec.num_layouts, layout.num_layouts),
        "kv_capacity": (spec.kv_capacity, layout.kv_capacity),
        "page_size": (spec.page_size, layout.page_size),
        "contiguous": (spec.contiguous, layout.contiguous),
        "block_pos": (spec.has_block_pos, layout.block_pos is not None),
        "num_qo_heads": (spec.num_qo_heads, q.shape[1]),
        "num_kv_heads": (spec.num_kv_heads, num_kv_heads),
        "head_dim_qk": (spec.head_dim_qk, q.shape[2]),
        "head_dim_vo": (spec.head_dim_vo, v.shape[-1]),
        "dtype": (spec.dtype, str(q.dtype)),
        "causal": (spec.causal, variant.causal),
        "window_left": (spec.window_left, variant.window_left),
        "window_right": (spec.window_right, variant.window_right),
        "softmax": (spec.softmax, variant.softmax),
    }
    wrong = [
        f"{name} {made} (this call: {called})" for name, (made, called) in facts.items() if made != called
    ]
    if wrong:
        raise ValueError("the plan was made for another call: " + ", ".join(wrong))
    if plan.data.shape != (spec.num_words,) or plan.data.dtype != np.int32:
        raise ValueError(
            f"the plan's array must have shape ({spec.num_words},) and dtype int32, got {plan.data.shape} and "
            f"{plan.data.dtype}"
        )
