"""What differs between backends in tests: the accuracy that results are judged by, tiles that have a kernel, tests of
one backend alone.

The same tests judge the CPU and a GPU; nothing here is a reason to skip what both can do.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.jit import nvrtc


@functools.cache
def on_gpu() -> bool:
    """Whether calls run on a GPU unless they say otherwise."""
    return jax.default_backend() in ("gpu", "cuda")


@functools.cache
def on_hopper() -> bool:
    """Whether calls run on a GPU with warpgroup instructions."""
    return on_gpu() and getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def bounds() -> dict[str, float]:
    """Largest relative error of o against float64, by dtype: the documented accuracy."""
    return {"float32": 2e-5 if on_gpu() else 1e-5, "float16": 1e-3, "bfloat16": 4e-3}


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test that looks at something which only the CPU has."""
    return pytest.mark.skipif(on_gpu(), reason=f"about the CPU: {reason}")


def usable(dtype: Any, **options: Any) -> dict[str, Any]:
    """Options of `jaxinfer.plan`, with the nearest tiles that have a kernel for `dtype` on this backend.

    On a GPU float32 runs on tile 1 alone, and tile 192 on Hopper alone.
    """
    tiles = options.get("tiles")
    if tiles is None or not on_gpu():
        return options
    float32 = np.dtype(dtype) == np.float32
    nearest = (1,) if float32 else tuple(dict.fromkeys(min(tile, 128) for tile in tiles))
    ctas = options.get("num_ctas")
    if isinstance(ctas, tuple) and len(ctas) != len(nearest):
        options = {**options, "num_ctas": ctas[: len(nearest)]}
    return {**options, "tiles": nearest}


def assert_close(got: Any, want: Any, *, rtol: float = 1e-7, atol: float = 0.0, err_msg: str = "") -> None:
    """`numpy.testing.assert_allclose`, on a GPU with its float32 accuracy where less was asked for.

    Its exponentials and logarithms are approximate to a few units in the last place.
    """
    if on_gpu():
        rtol, atol = max(rtol, 2e-5), max(5 * atol, 5e-6)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=err_msg)


def expect_accurate(o: Any, lse: Any, want_o: Any, want_lse: Any, dtype: Any, note: str = "") -> None:
    """o, in q's dtype, and lse (None without softmax) within the documented accuracy of the oracle's.

    o [num_tokens, num_qo_heads, head_dim] is judged by the norm of all of it, lse number by number; tokens that see
    nothing have exactly the empty state.
    """
    assert o.dtype == dtype and o.shape == want_o.shape, f"{o.dtype}{o.shape}; {note}"
    got = np.asarray(o).astype(np.float64)
    assert np.isfinite(got).all(), note
    error, norm = np.linalg.norm(got - want_o), np.linalg.norm(want_o)
    assert error <= bounds()[str(o.dtype)] * norm, f"relative error {error / max(norm, 1e-300)}; {note}"
    if lse is None:
        empty = ~want_o.any(axis=-1)
    else:
        empty = np.isneginf(want_lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg=note)
        want = want_lse[~empty]
        excess = np.abs(np.asarray(lse)[~empty].astype(np.float64) - want) - (2e-3 + 1e-6 * np.abs(want))
        assert (excess <= 0).all(), f"lse is off by {excess.max()} more than allowed; {note}"
    assert not got[empty].any(), note


@functools.cache
def has_nvrtc() -> bool:
    """Whether CUDA text can be compiled here, with or without a GPU."""
    try:
        nvrtc.nvrtc()
    except nvrtc.NvrtcNotFoundError:
        return False
    return True


def need_tile(tile: int) -> None:
    """Skips the test where the GPU has no kernel for tiles of that many rows."""
    if tile == 192 and on_gpu() and not on_hopper():
        pytest.skip("tile 192 needs compute capability 9.0")
