"""Variant: the attention rules of a call (causal, windows, soft cap, custom masks), and packing of masks.

Which tokens meet at all is the layout's affair (layout.py); what the rules do to a logit is written in
reference.py. Fields hold either static facts, which are the compile key, or arrays, which are operands.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer import _args, _pytree
from jaxinfer._args import INT32_MAX, Array, all_host, static_int
from jaxinfer.jit.functor import Functor, from_cuda
from jaxinfer.layout import BlockSparse


@dataclass(frozen=True)
class Variant:
    """Rules between a query token at position q_pos and a KV token at position kv_pos; all given ones hold (AND).

    Attributes:
      causal: `kv_pos <= q_pos`.
      window_left: `kv_pos >= q_pos - window_left`, an inclusive distance: 0 sees only itself. None: off.
      window_right: `kv_pos <= q_pos + window_right`. None: off.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`, after scaling and before masking. None: off.
      softmax: False: weights are the transformed logits themselves, 0 where masked; the result has no LSE.
      mask_bits: uint8 [capacity], packed custom masks of `pack_masks`; True bits may attend.
      mask_indptr: int32 [rows + 1], byte in mask_bits where each BSR row's mask begins. Both or neither.
      functor, operands: rules written as CUDA text and the arrays they read; `Variant.from_cuda` fills them.

    Raises:
      ValueError: a negative window, a soft cap that float32 cannot use, a value of a wrong kind, or only one of the
        mask arrays.
      TypeError: a static field is traced.
    """

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    softmax: bool = True
    mask_bits: Array | None = None
    mask_indptr: Array | None = None
    functor: Functor | None = None
    operands: tuple[Array, ...] = ()

    from_cuda = staticmethod(from_cuda)

    def __post_init__(self) -> None:
        # Runs again when jax rebuilds the pytree, then with whatever leaves it likes: only static fields are
        # checked here, arrays where they are used (`check_operands`).
        normalised = {
            "causal": _args.flag("causal", self.causal),
            "softmax": _args.flag("softmax", self.softmax),
            "window_left": _window("window_left", self.window_left),
            "window_right": _window("window_right", self.window_right),
            "logits_soft_cap": _soft_cap(self.logits_soft_cap),
        }
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        if (self.mask_bits is None) != (self.mask_indptr is None):
            missing = "mask_bits" if self.mask_bits is None else "mask_indptr"
            raise ValueError(f"mask_bits and mask_indptr go together; {missing} is missing")
        if self.functor is not None and not isinstance(self.functor, Functor):
            raise TypeError(f"functor is filled by Variant.from_cuda, got {type(self.functor).__name__}")

    def check_operands(self, layout: BlockSparse) -> None:
        """Checks shapes and dtypes of the array fields against the layout they will be used with.

        Raises:
          ValueError: wrong dtype, rank, not one mask_indptr entry per BSR row and one more, or operands that
            no functor reads or that are no tuple.
          NotImplementedError: a custom mask with a composed layout.
        """
        if not isinstance(self.operands, tuple):
            raise ValueError(f"operands is filled by Variant.from_cuda, got {type(self.operands).__name__}")
        if self.functor is None and self.operands:
            raise ValueError(
                f"operands holds {len(self.operands)} array(s) that no functor reads; Variant.from_cuda fills both"
            )
        if self.mask_bits is None or self.mask_indptr is None:
            return
        if layout.num_layouts > 1:
            raise NotImplementedError("custom masks with a composed layout; supported: layouts of one level")
        for name, array, dtype in (
            ("mask_bits", self.mask_bits, np.uint8),
            ("mask_indptr", self.mask_indptr, np.int32),
        ):
            got = getattr(array, "dtype", type(array).__name__)
            if got != dtype or len(array.shape) != 1:
                raise ValueError(
                    f"{name} must be a 1-D {np.dtype(dtype)} array, got {got} of shape {np.shape(array)}"
                )
        entries, rows = self.mask_indptr.shape[0], layout.num_rows
        if entries != rows + 1:
            raise ValueError(f"mask_indptr must have rows + 1 = {rows + 1} entries, got {entries}")


_pytree.register(
    Variant,
    data_fields=("mask_bits", "mask_indptr", "operands"),
    meta_fields=("causal", "window_left", "window_right", "logits_soft_cap", "softmax", "functor"),
    encode=Functor.saved,
    decode=lambda name, value: (
        Functor.from_saved(value) if name == "functor" and value is not None else value
    ),
)


def pack_masks(
    masks: Sequence[np.ndarray[Any, np.dtype[Any]]], layout: BlockSparse, capacity: int | None = None
) -> tuple[np.ndarray[Any, np.dtype[Any]], np.ndarray[Any, np.dtype[Any]]]:
    """Packs one bool mask per BSR row into the bits that a Variant carries. On the host.

    Bit `i * kv_len + j` of a row, counted from its first byte in little-endian bit order, says whether the
    row's query token i may attend to its KV token j. Each row starts on a byte.

    Args:
      masks: per BSR row bool [q_len, kv_len]; rows without tokens have an empty one.
      layout: layout of one level, on the host.
      capacity: bytes of the result, so that its shape stays the same from step to step; None: just enough.

    Returns:
      mask_bits uint8 [capacity], mask_indptr int32 [rows + 1] (byte offsets).

    Raises:
      ValueError: a mask with another shape (both are named) or not bool, too many or few, or more bytes than
      capacity.
      TypeError: layout or a mask is traced or on a device.
      NotImplementedError: a composed layout.
    """
    if not isinstance(layout, BlockSparse):
        raise TypeError(f"layout must be a jaxinfer.BlockSparse, got {type(layout).__name__}")
    if not isinstance(masks, (Sequence, np.ndarray)):
        raise TypeError(f"masks must be a list with one mask per row, got {type(masks).__name__}")
    if layout.num_layouts > 1:
        raise NotImplementedError("pack_masks of a composed layout; supported: layouts of one level")
    if not all_host(layout.q_len, layout.kv_len, *masks):
        raise TypeError("pack_masks needs the layout and the masks on the host, got a jax.Array")
    if len(masks) != layout.num_rows:
        raise ValueError(f"masks has {len(masks)} entries, the layout has {layout.num_rows} rows")
    packed = []
    for r, mask in enumerate(masks):
        m = _args.host(f"masks[{r}]", mask)
        want = (int(layout.q_len[r]), int(layout.kv_len[r]))
        if m.shape != want:
            raise ValueError(f"masks[{r}] has shape {m.shape}, its row needs [q_len, kv_len] = {want}")
        if m.dtype != np.bool_:
            raise ValueError(f"masks[{r}] must be bool, got {m.dtype}")
        packed.append(np.packbits(m.reshape(-1), bitorder="little"))
    ends = np.cumsum([0, *(p.size for p in packed)])
    size = int(ends[-1])
    capacity = size if capacity is None else static_int("capacity", capacity)
    if size > min(capacity, INT32_MAX):
        raise ValueError(f"the masks need {size} bytes, capacity is {capacity} (and at most {INT32_MAX})")
    bits = np.zeros(capacity, np.uint8)
    if packed:
        bits[:size] = np.concatenate(packed)
    return bits, ends.astype(np.int32)


def _window(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, (bool, np.bool_, jax.Array)) and hasattr(value, "__index__"):
        number = operator.index(value)
        if number < 0:
            raise ValueError(f"{name} must be at least 0, or None for off; got {number}")
    return static_int(name, value)


def _soft_cap(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, jax.Array):
        raise TypeError("logits_soft_cap is static and must be a Python float, got a jax.Array")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"logits_soft_cap must be a number, or None for off; got {value!r}")
    number = _args.real("logits_soft_cap", value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"logits_soft_cap must be a positive finite number, or None for off; got {number}")
    # Kernels multiply by the cap and by its reciprocal in float32: neither may be subnormal, nor may ordinary logits
    # divided by the cap be, which would be flushed to zero.
    if not 2.0**-126 <= number <= 2.0**100:
        raise ValueError(f"logits_soft_cap must be from 2**-126 to 2**100 (float32), got {number}")
    return number
