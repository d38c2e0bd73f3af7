"""Manual mesh axes inside `jax.shard_map`: which a value varies over, and letting values vary together.

JAX checks them (`check_vma`): operands of one primitive, and a loop's carry before and after its body, must agree.
Not here: who is sharded over which axis, which is the caller's `in_specs`.
"""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(*operands: Any) -> frozenset[Any]:
    """Axes that at least one of the operands varies over; outside shard_map none."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))


def vary(x: Any, axes: frozenset[Any]) -> Any:
    """`x` as a value that varies over `axes`, too."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
