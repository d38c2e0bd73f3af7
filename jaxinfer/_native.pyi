# Types of the compiled module. What its parts do is written in ffi/ and csrc/.
from collections.abc import Callable
from typing import Any

import numpy as np

_Ints = np.ndarray[Any, np.dtype[np.int32]]

xla_ffi_api: tuple[int, int]  # of the headers that the library was built with

def registrations() -> dict[str, dict[str, Any]]: ...
def cpu_isa() -> str: ...
def set_kernel_loader(loader: Callable[[str, str], tuple[bytes, str, int, int, bool, int]]) -> None: ...
def kernel_sources() -> dict[str, str]: ...
def can_start_early(major: int) -> bool: ...
def driver_info() -> dict[str, Any]: ...
def load_kernels(device: int, specs: str) -> None: ...
def choose_num_queues(num_ctas: int, heads: int) -> int: ...

class Planner:
    def __init__(
        self,
        *,
        classes: list[tuple[int, bool, int, int]],  # tile, packed, num_queues, num_ctas
        num_tokens: int,
        num_rows: int,
        num_layouts: int,
        kv_capacity: int,
        page_size: int,
        contiguous: bool,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        element_size: int,
        causal: bool,
        window_left: int | None,
        window_right: int | None,
        runs: bool,
        side_by_side: bool,
        batch_invariant: bool,
        split_tokens: int,
        costs: list[tuple[int, int, int, int, int]] | None = None,  # fixed, alpha, beta, floor, weight
    ) -> None: ...
    # q_start, q_len, kv_start, kv_indices, kv_len, kv_offset, q_pos, block_pos (None: absent)
    def __call__(self, *layout: _Ints | None, num_pages: int | None, out: _Ints) -> None: ...
    @property
    def num_words(self) -> int: ...
    @property
    def merge_capacity(self) -> int: ...
    @property
    def slot_capacity(self) -> int: ...
    @property
    def item_capacity(self) -> tuple[int, ...]: ...
    @property
    def items(self) -> tuple[int, ...]: ...
