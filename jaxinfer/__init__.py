"""jaxinfer: the attention engine for serving language models from JAX.

Build a layout (which tokens see which KV blocks), plan the step on the host, and inside `jax.jit` append to the
paged cache and attend over it. Models, benchmarks and the command line are subpackages and not imported here.
"""

from __future__ import annotations

# ffi comes first: it loads jaxlib before the compiled library (the other order crashed), and says what is missing.
from . import ffi as ffi
from . import reference
from .attention import attention
from .cache import append_kv
from .layout import BlockSparse, check, compose, from_block_mask, from_block_table, paged, ragged
from .plan import Plan, plan
from .state import AttentionState, lse_from_log2, lse_to_log2, merge, merge_many
from .variant import Variant, pack_masks

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "BlockSparse",
    "Plan",
    "Variant",
    "append_kv",
    "attention",
    "check",
    "compose",
    "from_block_mask",
    "from_block_table",
    "lse_from_log2",
    "lse_to_log2",
    "merge",
    "merge_many",
    "pack_masks",
    "paged",
    "plan",
    "ragged",
    "reference",
]
