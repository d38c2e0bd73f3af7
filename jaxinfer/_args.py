"""Reading integer arguments that may be host values or traced: dtype, rank and (host only) value checks.

Only conversions and checks with their messages live here; what the numbers mean is the caller's business.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Array = np.ndarray[Any, np.dtype[Any]] | jax.Array
"""An array on the host (numpy) or on a device, traced or not."""

IntLike = ArrayLike | list[int] | list[list[int]] | tuple[int, ...]

INT32_MAX = 2**31 - 1


def all_host(*arrays: Any) -> bool:
    """Whether no array is a jax.Array; tracers are jax.Arrays too."""
    return not any(isinstance(a, jax.Array) for a in arrays)


def check_array(name: str, value: Any) -> None:
    """Checks that `value` is an array, on the host or on a device.

    Raises:
      TypeError: it is something else, such as a list.
    """
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def host(name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """`value` as a numpy array: a host array, a number, or lists of them."""
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            f"{name} is a {type(value).__name__} that holds traced values; give one array (jnp.stack of them)"
        ) from None
    except ValueError as error:  # a list of lists of different lengths
        raise ValueError(f"{name} must be an array: {error}") from None


def ints(name: str, value: Any, ndim: int) -> Array:
    """`value` as int32 of rank `ndim`: a private numpy copy of host values, jnp of traced ones.

    Host values that int32 cannot hold are refused; traced ones saturate, so that an id that is out of range
    stays out of range.
    """
    if isinstance(value, jax.Array):
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be an integer array, got {value.dtype}")
        if value.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension(s), got shape {value.shape}")
        if value.dtype.itemsize >= 4 and value.dtype != jnp.int32:
            least = 0 if jnp.issubdtype(value.dtype, jnp.unsignedinteger) else -INT32_MAX - 1
            value = jnp.clip(value, least, INT32_MAX)
        return jnp.asarray(value, jnp.int32)
    arr = host(name, value)
    if arr.ndim != ndim:
        came = f"shape {arr.shape}" if arr.ndim else repr(value)
        raise ValueError(f"{name} must have {ndim} dimension(s), got {came}")
    if arr.dtype == np.int32:
        return arr.copy()  # the caller may reuse its buffer while a dispatched step still reads ours
    if arr.dtype.kind not in "iu":
        if arr.size or isinstance(value, np.ndarray):  # [] has no dtype of its own
            raise ValueError(f"{name} must be an integer array, got {arr.dtype}")
    elif arr.size and (arr.max() > INT32_MAX or arr.min() < -INT32_MAX - 1):
        worst = arr.max() if arr.max() > INT32_MAX else arr.min()
        raise ValueError(f"{name} must be int32, got {worst}, which int32 cannot hold")
    return arr.astype(np.int32)


def indptr(name: str, value: Any) -> Array:
    """`value` as int32 [rows + 1]; on the host it must start at 0 and never decrease."""
    arr = ints(name, value, 1)
    if arr.shape[0] == 0:
        raise ValueError(f"{name} must have rows + 1 entries, got none")
    if all_host(arr):
        if arr[0] != 0:
            raise ValueError(f"{name} must start at 0, got {arr[0]}")
        down = arr[1:] < arr[:-1]
        if down.any():
            r = int(down.argmax())
            raise ValueError(f"{name} decreases at row {r}: {arr[r]} then {arr[r + 1]}")
    return arr


def lengths(name: str, value: Any) -> Array:
    """`value` as int32 [rows]; on the host none may be negative."""
    arr = ints(name, value, 1)
    if all_host(arr) and arr.size and arr.min() < 0:
        r = int(arr.argmin())
        raise ValueError(f"{name}[{r}] = {arr[r]} is negative")
    return arr


def index(name: str, value: Any) -> int:
    """`value` as a Python int of any size; bools, floats and traced values are no static ints."""
    if isinstance(value, jax.Array):
        raise TypeError(f"{name} is static and must be a Python int, got a jax.Array")
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None


def static_int(name: str, value: Any, least: int = 0) -> int:
    """`value` as a Python int in [least, INT32_MAX]."""
    number = index(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > INT32_MAX:
        raise ValueError(f"{name} must be at most {INT32_MAX}, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a Python bool; numbers and traced values are none."""
    if isinstance(value, jax.Array):
        raise TypeError(f"{name} is static and must be a Python bool, got a jax.Array")
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def real(name: str, value: Any) -> float:
    """A number as a Python float."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be finite in float32, got an int of {value.bit_length()} bits"
        ) from None


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value` if it is one of the names `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def positive(name: str, value: Any) -> int:
    """`value` as a Python int >= 1."""
    return static_int(name, value, least=1)


def capacity(name: str, value: Any, ptr_name: str, ptr: Array) -> int:
    """The static capacity `value`, by default the last entry of the indptr, which it must cover."""
    if value is None:
        if not all_host(ptr):
            raise TypeError(
                f"{name}=None needs {ptr_name} on the host; with a jax.Array give {name} as an int"
            )
        return int(ptr[-1])
    number = static_int(name, value)
    if all_host(ptr) and number < ptr[-1]:
        raise ValueError(f"{name} {number} is smaller than {ptr_name}[-1] = {ptr[-1]}")
    return number
