"""The warpgroup kernel as far as it goes without a GPU: who gets it, its geometry, and what the compiler says of it.

What it computes is tested by tests/cuda/test_prefill.cc, on a GPU.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from backend import has_nvrtc

from jaxinfer.jit import registry, render, select, tiles
from jaxinfer.jit.spec import PADDED_HEAD_DIMS, FunctorSource, KernelSpec
from jaxinfer.plan import choose_tiles

REGISTER_FILE = 65536
SHARED_MEMORY = 227 * 1024
KEY_HOLE = FunctorSource(
    "template <int kCount> __device__ void key(float (&x)[kCount], int dim, const Row& row, const Col& col) const {}"
)


def chosen(tile: int, page_size: int = 16, contiguous: bool = False, **changes: Any) -> KernelSpec:
    """What a bfloat16 call of head dim 128 with one tile class asks for."""
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "classes": [(tile, True)],
        "merges": False,
        "contiguous": contiguous,
        "page_size": page_size,
        "rules": 33,
        "functor": None,
        "implementation": None,
    }
    return KernelSpec.from_json(select.attention_kernels(**(options | changes)))


@pytest.mark.parametrize(
    ("page_size", "box"), [(16, 16), (64, 16), (48, 16), (8, 8), (24, 8), (1, 0), (3, 0), (4, 0), (12, 0)]
)
def test_pages_of_whole_swizzle_patterns_come_as_boxes(page_size: int, box: int) -> None:
    spec = chosen(128, page_size, implementation="wgmma")
    assert (spec.kernel, spec.page_box) == ("attention_wgmma", box)
    assert chosen(128, page_size, implementation="mma").page_box == 0


def test_contiguous_caches_have_no_boxes() -> None:
    assert chosen(192, 1, contiguous=True, implementation="wgmma").page_box == 0


def test_a_tile_too_wide_for_registers_is_refused_when_lowered() -> None:
    wide = {"head_dim_qk": 256, "head_dim_vo": 256}
    with pytest.raises(
        NotImplementedError, match=r"head_dim_vo 256 in tile 192 .*; plan with tiles up to 128"
    ):
        chosen(192, **wide)
    assert chosen(128, **wide).tile == 128


@pytest.mark.parametrize(
    ("implementation", "tile"), [("wgmma", 1), ("wgmma", 16), ("wgmma", 64), ("mma", 1), ("mma", 192)]
)
def test_tiles_that_an_implementation_lacks(implementation: str, tile: int) -> None:
    with pytest.raises(ValueError, match=f"implementation='{implementation}' has no tile {tile}; plan with"):
        chosen(tile, implementation=implementation)


def test_the_gpu_decides_who_runs_large_tiles() -> None:
    """A program may be lowered on a machine without one."""
    assert chosen(32).kernel == "attention_mma"
    assert chosen(64).kernel == "attention"
    for tile in (128, 192):
        assert chosen(tile).kernel == "attention"
        assert chosen(tile, implementation="wgmma").kernel == "attention_wgmma"
    assert chosen(128, implementation="mma").kernel == "attention_mma"


def test_one_warpgroup_runs_tile_64_where_it_was_measured() -> None:
    for spec in (chosen(64), chosen(64, 8, dtype="float16")):
        assert render.template(spec, "sm_90a") == "attention_wgmma"
        assert render.template(spec, "sm_80") == "attention_mma"
    score_hole = FunctorSource(
        "__device__ float logits(float s, const Row& row, const Col& col) const { return s; }"
    )
    for spec in (
        chosen(64, 5),
        chosen(64, 1, contiguous=True),
        chosen(64, head_dim_qk=64, head_dim_vo=64),
        chosen(64, head_dim_qk=192),
        chosen(64, functor=score_hole),
        chosen(64, implementation="mma"),
    ):
        assert render.template(spec, "sm_90a") == "attention_mma"


def test_the_template_follows_the_gpu_and_the_rules() -> None:
    spec = KernelSpec("attention", "bfloat16", 128, 128, 128, True, rules=33)
    assert render.template(spec, "sm_90a") == "attention_wgmma"
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert render.template(spec, arch) == "attention_mma"
    # K goes from the copy engine straight into the products: a rule that changes it cannot come between.
    changed = KernelSpec("attention", "bfloat16", 128, 128, 128, True, rules=33, functor=KEY_HOLE)
    assert render.template(changed, "sm_90a") == "attention_mma"
    with pytest.raises(NotImplementedError, match=r"tile 192 .* for sm_80"):
        render.template(KernelSpec("attention", "bfloat16", 64, 64, 192, True, rules=33), "sm_80")
    with pytest.raises(NotImplementedError, match="rules that change key"):
        render.template(
            KernelSpec("attention_wgmma", "bfloat16", 64, 64, 192, True, rules=33, functor=KEY_HOLE), "sm_90a"
        )


def test_every_geometry_fits_a_multiprocessor() -> None:
    """A role that asks for more registers than its CTA was launched with waits for ever."""
    fits = 0
    loaders = ((True, 0), (False, 16), (False, 8), (False, 0))
    for qk, vo, tile, (contiguous, box), (plain, functor) in itertools.product(
        PADDED_HEAD_DIMS,
        PADDED_HEAD_DIMS,
        (128, 192),
        loaders,
        ((True, False), (False, False), (False, True)),
    ):
        try:
            config = tiles.wgmma_config(
                head_dim_qk=qk,
                head_dim_vo=vo,
                tile=tile,
                contiguous=contiguous,
                page_box=box,
                plain=plain,
                capped=False,
                functor=functor,
            )
        except NotImplementedError:
            assert tile == 192 and vo > 64
            continue
        fits += 1
        launched = REGISTER_FILE // config.num_threads // 8 * 8 * config.num_threads
        producer, consumer = config.constant("kProducerRegisters"), config.constant("kConsumerRegisters")
        assert 128 * producer + (config.num_threads - 128) * consumer <= launched
        assert config.smem_bytes <= SHARED_MEMORY
    assert fits > 200


def test_default_tiles_on_warpgroups() -> None:
    large = {
        dims: choose_tiles(None, 4, "bfloat16", *dims, True, True)[-1] for dims in ((64, 64), (128, 128))
    }
    assert large == {(64, 64): 192, (128, 128): 128}
    for wide, tile in ((64, 192), (96, 192), (104, 128), (128, 128), (256, 128)):
        assert choose_tiles(None, 4, "bfloat16", wide, 64, True, True, True)[-1] == tile
    assert choose_tiles(None, 4, "bfloat16", 256, 256, True, True)[-1] == 128
    assert choose_tiles(None, 4, "bfloat16", 256, 256, True, False)[-1] == 64


@pytest.mark.parametrize(("box", "packed"), [(0, True), (16, False)])
def test_it_compiles_without_spills(box: int, packed: bool) -> None:
    if not has_nvrtc():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    spec = KernelSpec("attention_wgmma", "bfloat16", 128, 128, 128, packed, page_box=box, rules=33)
    rendered, cubin, log = registry.compile_spec(spec, "sm_90a")
    assert rendered.tensor_maps and rendered.kv_box_rows == box
    assert rendered.entry.encode() in cubin
    assert re.search(r"\b0 bytes spill stores", log) and "serializ" not in log.lower()


@pytest.mark.parametrize(("kernel", "tile", "box"), [("attention_wgmma", 128, 16), ("attention_mma", 16, 0)])
def test_delays_are_injected_on_request(
    kernel: str, tile: int, box: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KernelSpec(kernel, "bfloat16", 128, 128, tile, True, page_box=box, rules=33)
    assert "JAXINFER_INJECT_DELAYS" not in render.render(spec, "sm_90a").text
    monkeypatch.setenv(render.ENV_INJECT_DELAYS, "7")
    assert "#define JAXINFER_INJECT_DELAYS 7\n" in render.render(spec, "sm_90a").text
