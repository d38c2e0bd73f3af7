"""Models on the GPU: the CPU's greedy tokens from SmolLM2, and a model of 8B shape that serves 64 requests in place.

SmolLM2 comes from $JAXINFER_MODEL: a GGUF file, or a folder with one or with its parts (joined in order of name).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import run_python

from jaxinfer.bench.step import LLAMA_8B
from jaxinfer.models import Generator, LlamaConfig, Model, init_params

pytestmark = pytest.mark.gpu

#: An English paragraph in SmolLM2's tokens.
TEXT = [
    504, 1463, 282, 260, 33059, 5634, 986, 1092, 260, 808, 11637, 436, 2837, 30, 41717, 579, 617, 2422,
    1478, 281, 260, 3605, 5328, 327, 9935, 338, 480, 3168, 1150, 335, 260, 27372, 28, 284, 19547, 5940, 327,
    967, 9935, 351, 253, 2419, 282, 732, 502, 4891, 30, 330, 2892, 335, 260, 2118, 314, 1759, 288, 963, 429,
    1869, 2025, 28, 588, 701, 1830, 357, 335, 253, 3941, 282, 8989, 28, 284, 965, 335, 253, 11637, 30, 378,
    11637, 282, 23472, 436, 563, 582, 3822, 13897, 904, 30, 32304, 5443, 3869, 638, 624, 1420, 436, 1135,
    30, 2015, 6578, 3287, 282, 253, 11558, 282, 26048, 17974, 28, 1449, 282, 8110, 2664, 30,
]  # fmt: skip
LENGTHS = (1, 2, 16, 17, 33, 64, 90, 100)  # around pages of 16 tokens

GREEDY = """
import json, sys
from jaxinfer.models import Generator, Model
from jaxinfer.models.gguf_loader import load_gguf
config, params, _ = load_gguf(PATH, "float32", progress=False)
generator = Generator(Model(config, params), max_batch=8, num_pages=8 * 12, max_seq_len=192)
done = generator.generate(PROMPTS, max_tokens=64, ignore_eos=True)
import jax
print(jax.default_backend())
print(json.dumps([completion.tokens for completion in done]))
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="reading the model needs the gguf package")
    given = os.environ.get("JAXINFER_MODEL")
    if given is None:
        pytest.skip(
            "set JAXINFER_MODEL to SmolLM2-135M-Instruct as GGUF: a file, a folder, or a folder of parts"
        )
    path = Path(given)
    if path.is_file():
        return path
    whole = sorted(path.glob("*.gguf"))
    if whole:
        return whole[0]
    parts = sorted(p for p in path.iterdir() if p.is_file())
    joined = tmp_path_factory.mktemp("model") / "model.gguf"
    with joined.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    return joined


def test_smollm2_gives_the_cpus_tokens(smollm2: Path) -> None:
    """Eight prompts together, 64 greedy tokens each, float32."""
    prompts = [TEXT[3 * i % 5 :][:n] for i, n in enumerate(LENGTHS)]
    code = f"PATH, PROMPTS = {str(smollm2)!r}, {prompts!r}\n{GREEDY}"
    tokens = {}
    for platform in ("cuda", "cpu"):
        backend, line = run_python(code, JAX_PLATFORMS=platform)[0].splitlines()[-2:]
        tokens[backend] = json.loads(line)
    assert set(tokens) == {"gpu", "cpu"}
    for length, got, want in zip(LENGTHS, tokens["gpu"], tokens["cpu"], strict=True):
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        assert first is None, f"prompt of {length} tokens differs from token {first} on: {got} {want}"


def decode_in_place(config: LlamaConfig, batch: int, *, num_pages: int, chunk_tokens: int) -> None:
    """Prefills `batch` prompts, then decodes all of them for 20 steps on the same memory and two traces."""
    model = Model(config, init_params(config, jax.random.key(0), jnp.bfloat16))
    generator = Generator(
        model, max_batch=batch, num_pages=num_pages, max_seq_len=160, chunk_tokens=chunk_tokens
    )
    rng = np.random.default_rng(0)
    for length in rng.integers(1, 101, batch):
        prompt = rng.integers(0, config.vocab_size, length).tolist()
        generator.submit(prompt, max_tokens=48, ignore_eos=True)
    while generator.num_steps["decode"] == 0:
        generator.step()
    at = [pool.unsafe_buffer_pointer() for pool in generator.pools]
    for _ in range(20):
        events = generator.step()
        assert len(events) == batch
        assert all(0 <= event.token < config.vocab_size for event in events)
        assert [pool.unsafe_buffer_pointer() for pool in generator.pools] == at
    assert generator.num_steps["decode"] == 21
    assert generator.num_traces == {"mixed": 1, "decode": 1}
    used = np.asarray(generator.pools[0][-1, :4], np.float32)
    assert np.isfinite(used).all()


def test_a_model_of_8b_shape_decodes_in_place() -> None:
    """32 layers, hidden 4096, 32/8 heads, random bfloat16 weights, 64 requests."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 60 * 2**30:
        pytest.skip(f"needs 60 GiB of GPU memory, there are {limit / 2**30:.0f}")
    config = dataclasses.replace(LLAMA_8B, vocab_size=2048, max_position=8192)
    decode_in_place(config, 64, num_pages=64 * 10, chunk_tokens=1024)
