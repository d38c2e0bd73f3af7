"""The run-time compiler: specs, rendering, NVRTC, the disk cache, and lowering for a GPU that is not there.

What the kernels compute is tested where the operators are, on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend import has_nvrtc
from jax import export

import jaxinfer
from jaxinfer.jit import nvrtc, registry, render, select, warmup
from jaxinfer.jit.sources import headers
from jaxinfer.jit.spec import FunctorSource, KernelSpec, join, padded_head_dim
from jaxinfer.plan import choose_tiles

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
TILE_64 = KernelSpec(
    "attention_mma", "bfloat16", head_dim_qk=128, head_dim_vo=128, tile=64, packed=True, rules=1 | 32
)
APPEND = KernelSpec("append", "bfloat16")
ALIBI = """__device__ float logits(float s, const Row& row, const Col& col) const {
  return s + params.slopes[row.qo_head] * (col.kv_pos - row.q_pos);
}"""


@pytest.fixture
def compiler() -> None:
    if not has_nvrtc():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache and a loader that remembers nothing."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(registry, "_entries", {})
    return tmp_path / "kernels"


# --- specs


def test_spec_survives_its_string() -> None:
    functor = FunctorSource(ALIBI, (("slopes", "float"),), (("strength", "float"), ("n", "int")))
    for spec in (TILE_64, APPEND, KernelSpec("attention_simt", "float32", 64, 96, 1, functor=functor)):
        text = spec.to_json()
        assert KernelSpec.from_json(text) == spec
        assert "\n" not in text  # lines separate specs
    assert len(join([TILE_64, APPEND]).splitlines()) == 2
    assert len(APPEND.to_json()) < 60


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"kernel":"append","dtype":"bfloat16","novel":1}', '{"kernel":"x","dtype":"float32"}'],
)
def test_string_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a kernel spec of this version"):
        KernelSpec.from_json(text)


def test_head_dims_are_padded_up() -> None:
    assert [padded_head_dim(d) for d in (16, 64, 72, 96, 104, 128, 136, 192, 200, 256)] == [
        64, 64, 96, 96, 128, 128, 192, 192, 256, 256,
    ]  # fmt: skip
    with pytest.raises(NotImplementedError, match="264"):
        padded_head_dim(264)


# --- rendering


def test_rendered_text_holds_the_spec() -> None:
    rendered = render.render(TILE_64, "sm_90a")
    for constant in (
        "kDType = DType::kBF16",
        "kHeadDimQk = 128",
        "kTile = 64",
        "kPacked = true",
        "kContiguous = false",
        "kRules = 33u",
    ):
        assert f" {constant};" in rendered.text
    assert f"kNumThreads = {rendered.num_threads};" in rendered.text
    assert f"kSmemBytes = {rendered.smem_bytes};" in rendered.text
    assert rendered.entry == "jaxinfer_attention_mma"


def test_functor_is_woven_in() -> None:
    functor = FunctorSource(ALIBI, (("slopes", "float"),), (("strength", "float"),))
    text = render.render(
        KernelSpec("attention_mma", "bfloat16", 128, 128, 64, True, functor=functor), "sm_90a"
    ).text
    assert re.search(r"struct VariantOperands \{\s+const float\* slopes;\s+float strength;\s+\};", text)
    assert '#line 1 "from_cuda"\n' + ALIBI in text
    assert "kLogits = true" in text and "kMask = true" not in text


# --- NVRTC


@pytest.mark.parametrize("arch", ARCHS)
def test_headers_compile_for_every_architecture(compiler: None, arch: str) -> None:
    for spec in (TILE_64, APPEND, KernelSpec("merge", "bfloat16", head_dim_vo=128, rules=32)):
        rendered, cubin, log = registry.compile_spec(spec, arch)
        assert cubin.startswith(b"\x7fELF")
        assert rendered.entry.encode() in cubin
        assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}


def test_parameter_structs_have_the_hosts_layout(compiler: None) -> None:
    """NVRTC's own idea of the size, against the one that the host compiler prints."""
    if not any(shutil.which(name) for name in ("g++", "c++")):
        pytest.skip("needs a C++ compiler")
    structs = (
        "AttentionParams",
        "AppendParams",
        "VariantParams",
        "CacheStrides",
        "PlanFormat",
        "ClassFormat",
        "Item",
        "TensorMaps",
    )
    source = '#include "params.h"\n#include <cstdio>\nusing namespace jaxinfer;\nint main() {\n'
    host = _run_cpp(source + "".join(f'std::printf("%zu ", sizeof({name}));\n' for name in structs) + "}\n")
    text = '#include "params.h"\nusing namespace jaxinfer;\n' + "".join(
        f"static_assert(sizeof({name}) == {size});\n" for name, size in zip(structs, host, strict=True)
    )
    nvrtc.compile_cubin("layout.cu", text, headers(), registry.options("sm_90a"))
    assert host[0] < 4096


def _run_cpp(source: str) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "a.cc").write_text(source)
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler is not None
        subprocess.run(
            [compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", str(path / "a.cc"), "-o", str(path / "a")],
            check=True,
        )
        return [
            int(n)
            for n in subprocess.run(
                [str(path / "a")], check=True, capture_output=True, text=True
            ).stdout.split()
        ]


def test_users_compile_error_names_their_line(compiler: None, fresh: Path) -> None:
    broken = ALIBI.replace("slopes[row", "slops[row")  # line 2
    functor = FunctorSource(broken, (("slopes", "float"),))
    spec = KernelSpec("attention_mma", "bfloat16", 128, 128, 64, True, rules=32, functor=functor)
    with pytest.raises(nvrtc.CompileError, match=r"(?s)given to Variant.from_cuda.*from_cuda\(2\).*slops"):
        registry.load(spec.to_json(), "sm_90a")
    assert not list(fresh.glob("*"))


def test_a_newer_gpu_falls_back_within_its_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: nvrtc.Nvrtc(None, "/x", (12, 0), (80, 86, 90)))
    assert nvrtc.best_arch("sm_90a") == "sm_90a"
    assert nvrtc.best_arch("sm_89") == "sm_86"
    with pytest.raises(nvrtc.NvrtcNotFoundError, match=r"NVRTC 12\.0 .* cannot compile for sm_120"):
        nvrtc.best_arch("sm_120")


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    nvrtc.find.cache_clear()
    monkeypatch.setenv(nvrtc.ENV_LIBRARY, "/nowhere/libnvrtc.so")
    try:
        with pytest.raises(
            nvrtc.NvrtcNotFoundError, match=r"(?s)pip install .*jax\[cuda13\].*/nowhere/libnvrtc.so"
        ):
            registry.load(APPEND.to_json(), "sm_90a")
    finally:
        nvrtc.find.cache_clear()


def test_old_gpu_is_refused(fresh: Path) -> None:
    with pytest.raises(RuntimeError, match=r"8\.0 .* sm_75.*reference"):
        registry.load(APPEND.to_json(), "sm_75")


# --- what a GPU call carries


def _export(
    dtype: str, tiles: tuple[int, ...], variant: jaxinfer.Variant, **options: str
) -> list[dict[str, object]]:
    """Lowers append and attention for CUDA; the specs of all kernels in the program."""
    layout = jaxinfer.from_block_table(
        np.arange(8).reshape(2, 4), np.array([30, 64]), np.array([0, 3, 4]), 16, num_tokens=8
    )
    plan = jaxinfer.plan(
        layout,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=72,
        dtype=dtype,
        variant=variant,
        tiles=tiles,
        num_ctas=8,
    )

    def step(q, k, v, k_new, v_new, slots, layout, plan, variant):  # type: ignore[no-untyped-def]
        k, v = jaxinfer.append_kv(k, v, k_new, v_new, slots)
        return jaxinfer.attention(q, k, v, layout, plan, variant=variant, **options)

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    pool, rows = shape(8, 16, 2, 72), shape(8, 2, 72)
    checks = [
        export.DisabledSafetyCheck.custom_call(name) for name in ("jaxinfer_attention", "jaxinfer_append")
    ]
    exported = export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)(
        shape(8, 8, 72), pool, pool, rows, rows, jax.ShapeDtypeStruct((8,), jnp.int32), layout, plan, variant
    )
    attributes = re.findall(r'kernels = "((?:[^"\\]|\\.)*)"', exported.mlir_module())
    text = "\n".join(a.replace("\\22", '"').replace("\\0A", "\n").replace("\\\\", "\\") for a in attributes)
    return [json.loads(line) for line in text.splitlines()]


def test_program_for_a_gpu_is_made_without_one() -> None:
    specs = _export("bfloat16", (16, 64), jaxinfer.Variant(causal=True))
    assert specs == [
        {"kernel": "append", "dtype": "bfloat16"},
        *(
            {
                "dtype": "bfloat16",
                "head_dim_qk": 96,
                "head_dim_vo": 96,
                "packed": True,
                "rules": 33,
                **own,
            }
            for own in (
                {"kernel": "attention_mma", "tile": 16},
                {"kernel": "attention", "tile": 64, "page_box": 16},
            )
        ),
        {"kernel": "merge", "dtype": "bfloat16", "head_dim_vo": 96, "rules": 32},
    ]


def test_float32_runs_on_tile_1_alone() -> None:
    specs = _export("float32", (1,), jaxinfer.Variant())
    assert [s["kernel"] for s in specs] == ["append", "attention_simt", "merge"]
    with pytest.raises(ValueError, match=r"tile 16, dtype is float32.*tiles=\(1,\)"):
        _export("float32", (16,), jaxinfer.Variant())


def test_implementations_on_a_gpu() -> None:
    assert [s["kernel"] for s in _export("bfloat16", (16,), jaxinfer.Variant(), implementation="mma")][
        1
    ] == "attention_mma"
    with pytest.raises(ValueError, match="has no tile 1"):
        _export("bfloat16", (1,), jaxinfer.Variant(), implementation="mma")
    assert _export("bfloat16", (192,), jaxinfer.Variant())[1]["kernel"] == "attention"
    assert _export("bfloat16", (128,), jaxinfer.Variant())[1]["kernel"] == "attention"
    assert _export("bfloat16", (64,), jaxinfer.Variant())[1]["kernel"] == "attention"
    assert _export("bfloat16", (32,), jaxinfer.Variant())[1]["kernel"] == "attention_mma"
    wgmma = _export("bfloat16", (128,), jaxinfer.Variant(), implementation="wgmma")[1]
    assert (wgmma["kernel"], wgmma["page_box"]) == ("attention_wgmma", 16)
    with pytest.raises(ValueError, match="'wgmma' has no tile 16"):
        _export("bfloat16", (16,), jaxinfer.Variant(), implementation="wgmma")


def test_warmup_covers_what_plans_choose() -> None:
    specs = warmup.model_kernels(warmup.AttentionHeads(32, 8, 128), [jaxinfer.Variant(causal=True)])
    tiles = {KernelSpec.from_json(s).tile for s in specs}
    for capacity in itertools.product((1, 4, 64, 2048), (1, 3, 64), (1, 2)):
        assert set(choose_tiles(capacity, 4, "bfloat16", 128, 128, True)) <= tiles
    assert sum(KernelSpec.from_json(s).kernel == "merge" for s in specs) == 1


def test_warmup_takes_rules_that_change_inputs_at_every_head_dim() -> None:
    """The tile of three warpgroups cannot have them, so no plan chooses it."""
    hole = "template <int kCount> __device__ void query(float (&x)[kCount], int dim, const Row& row) const {}"
    heads = warmup.AttentionHeads(32, 8, 64)
    for variant, widest in ((jaxinfer.Variant(), 192), (jaxinfer.Variant.from_cuda(hole), 128)):
        assert max(KernelSpec.from_json(s).tile for s in warmup.model_kernels(heads, [variant])) == widest


# --- rules written by the user


def test_from_cuda_reads_params_in_order() -> None:
    slopes = np.arange(8, dtype=np.float32)
    ids = np.zeros((4, 4), np.int32)
    variant = jaxinfer.Variant.from_cuda(
        ALIBI, {"slopes": slopes, "strength": 0.5, "ids": ids, "n": 3}, causal=True
    )
    assert variant.functor is not None and variant.causal
    assert variant.functor.source.pointers == (("slopes", "float"), ("ids", "int"))
    assert variant.functor.source.scalars == (("strength", "float"), ("n", "int"))
    assert variant.functor.scalar_bytes() == np.float32(0.5).tobytes() + np.int32(3).tobytes()
    leaves, tree = jax.tree.flatten(variant)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).functor == variant.functor


@pytest.mark.parametrize(
    ("source", "params", "message"),
    [
        ("__device__ int f() const;", {}, "fills no hole"),
        (ALIBI, {"a b": 1}, "not a name"),
        (ALIBI, {"x": np.zeros(2)}, "float64"),
        (ALIBI, {"x": 2**40}, "int32"),
        (ALIBI, {"x": True}, "bool"),
    ],
)
def test_from_cuda_refuses(source: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxinfer.Variant.from_cuda(source, params)


def test_users_rules_travel_in_the_program() -> None:
    variant = jaxinfer.Variant.from_cuda(ALIBI, {"slopes": np.zeros(8, np.float32), "strength": 0.5})
    specs = _export("bfloat16", (16,), variant)
    assert specs[1]["functor"] == {
        "text": ALIBI,
        "pointers": [["slopes", "float"]],
        "scalars": [["strength", "float"]],
    }
    assert "functor" not in specs[2]  # the merge computes none of it


def test_users_rules_need_a_gpu() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU is there")
    layout = jaxinfer.ragged(np.array([0, 2]), np.array([0, 4]))
    variant = jaxinfer.Variant.from_cuda(ALIBI, {"slopes": np.zeros(2, np.float32)})
    plan = jaxinfer.plan(
        layout, num_qo_heads=2, num_kv_heads=1, head_dim=16, dtype="float32", variant=variant
    )
    q, k = np.zeros((2, 2, 16), np.float32), np.zeros((4, 1, 16), np.float32)
    with pytest.raises(NotImplementedError, match="CUDA text need a GPU kernel; this program is for cpu"):
        jaxinfer.attention(q, k, k, layout, plan, variant=variant)


class AlibiTwin:
    """ALIBI in Python, and a mask that drops every third KV token."""

    @staticmethod
    def logits(s: Any, row: Any, col: Any, params: Any) -> Any:
        return s + params.slopes[row.qo_head] * (col.kv_pos - row.q_pos)

    @staticmethod
    def mask(row: Any, col: Any, params: Any) -> Any:
        return col.kv_index % params.keep != 1


MASK = (
    "\n__device__ bool mask(const Row& row, const Col& col) const { return col.kv_index % params.keep != 1; }"
)


def test_reference_runs_the_python_twin() -> None:
    rng = np.random.default_rng(3)
    layout = jaxinfer.ragged([0, 3], [0, 9])
    slopes = np.array([0.5, 0.1, 0.3, 0.2], np.float32)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4, 16), (9, 2, 16), (9, 2, 16)))
    variant = jaxinfer.Variant.from_cuda(
        ALIBI + MASK, {"slopes": slopes, "keep": 3}, twin=AlibiTwin, causal=True
    )
    plan = jaxinfer.plan(
        layout, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", variant=variant
    )
    o = np.asarray(jaxinfer.attention(q, k, v, layout, plan, variant=variant, implementation="reference"))
    for token in range(3):
        distance = np.arange(9) - (6 + token)
        see = (distance <= 0) & (np.arange(9) % 3 != 1)
        for head in range(4):
            s = k[:, head // 2].astype(np.float64) @ q[token, head] / 4 + slopes[head] * distance
            w = np.where(see, np.exp(s), 0.0)
            np.testing.assert_allclose(o[token, head], w @ v[:, head // 2] / w.sum(), rtol=1e-5, atol=1e-6)
    alone = dataclasses.replace(variant, functor=dataclasses.replace(variant.functor, twin=None))
    with pytest.raises(NotImplementedError, match="twin"):
        jaxinfer.attention(q, k, v, layout, plan, variant=alone, implementation="reference")


def test_selection_of_merge_follows_the_output_hole() -> None:
    text = (
        "template <int kCount> __device__ void output(float (&x)[kCount], int dim, const Row& row) const {}"
    )
    kernels = select.attention_kernels(
        dtype="bfloat16", head_dim_qk=64, head_dim_vo=64, classes=[(16, True)], merges=True, contiguous=False,
        page_size=16, rules=32, functor=FunctorSource(text), implementation=None,
    )  # fmt: skip
    assert KernelSpec.from_json(kernels.splitlines()[-1]).functor == FunctorSource(text)
