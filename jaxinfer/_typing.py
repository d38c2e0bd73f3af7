"""Array annotations with shapes. jaxtyping checks them in the tests; without it they are plain names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8
else:
    try:
        from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8
    except ModuleNotFoundError:
        Array = Bool = Float = Int = Shaped = UInt8 = Any

__all__ = ["Array", "Bool", "Float", "Int", "Shaped", "UInt8"]
