"""Which heads and head dims there are kernels for: asked by whoever plans a step or compiles kernels ahead of one.

Not here: which of the kernels a call takes (jit/select.py).
"""

from __future__ import annotations

from typing import Any

from ._args import positive

MAX_GROUP_SIZE = 128


def check_heads(num_qo_heads: int, num_kv_heads: int) -> int:
    """The group size, if kernels exist for it."""
    num_qo_heads = positive("num_qo_heads", num_qo_heads)
    num_kv_heads = positive("num_kv_heads", num_kv_heads)
    if num_qo_heads % num_kv_heads != 0:
        raise ValueError(f"num_qo_heads {num_qo_heads} must be a multiple of num_kv_heads {num_kv_heads}")
    group_size = num_qo_heads // num_kv_heads
    if group_size > MAX_GROUP_SIZE:
        raise NotImplementedError(
            f"group size {group_size} (num_qo_heads {num_qo_heads} / num_kv_heads {num_kv_heads}); "
            f"supported: 1 to {MAX_GROUP_SIZE}"
        )
    return group_size


def check_head_dim(head_dim: Any) -> tuple[int, int]:
    """(head_dim_qk, head_dim_vo), if kernels exist for them."""
    pair = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    if len(pair) != 2:
        raise ValueError(f"head_dim must be an int or (head_dim_qk, head_dim_vo), got {head_dim!r}")
    for value in pair:
        if positive("head_dim", value) % 8 != 0 or not 16 <= value <= 256:
            raise NotImplementedError(f"head_dim {value}; supported: every multiple of 8 from 16 to 256")
    return int(pair[0]), int(pair[1])
