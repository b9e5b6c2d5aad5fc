"""The decoder against transformers on tiny random models, and its sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.llm.models.paged import Paged, logits
from tests.tiny import FAMILIES, VOCAB, make_checkpoint
from tritium.llm.checkpoint import open_checkpoint
from tritium.llm.kernels import ops
from tritium.llm.models.decoder import Decoder
from tritium.llm.models.families import resolve
from tritium.llm.models.load import load

CPU = torch.device("cpu")
PROMPT = torch.randint(0, VOCAB, (48,), generator=torch.Generator().manual_seed(7)).tolist()
# Measured: at most 2.0e-5 where logits reach 65 (tied heads), 2.2e-6 where they stay below 5.
TOLERANCE = 1e-4

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES} | {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-head-group": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-gelu-erf": ("llama", {"hidden_act": "gelu"}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}


@pytest.fixture(autouse=True, params=["reference", "chosen"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: a second thread costs more than it brings
    if request.param == "reference":
        ops.use("reference")
    else:
        ops.choose(CPU, deterministic=False)
    yield
    torch.set_num_threads(threads)


def ours(folder: Path, dtype: torch.dtype = torch.float32, *, deterministic: bool = False) -> Decoder:
    checkpoint = open_checkpoint(folder)
    return load(resolve(checkpoint.metadata), checkpoint, dtype=dtype, device=CPU, deterministic=deterministic)


def theirs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(tmp_path / variant, family, shards=2, **overrides)
    expected = theirs(folder, PROMPT)
    model = ours(folder)
    for chunks in ([48], [1], [17, 1], [5, 16, 3]):
        worst = (logits(model, PROMPT, chunks) - expected).abs().max().item()
        assert worst < TOLERANCE, (chunks, worst)


def test_only_sampled_rows_are_returned(tmp_path: Path) -> None:
    model = ours(make_checkpoint(tmp_path))
    everything = logits(model, PROMPT, [48])
    inputs = Paged(model.config, torch.float32).inputs(PROMPT)
    inputs.sample_index_N = torch.tensor([47, 3])
    assert torch.allclose(model.logits(model(inputs)), everything[[47, 3]], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_near_float32(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, dtype="bfloat16")
    exact = logits(ours(folder), PROMPT, [48])
    rounded = logits(ours(folder, torch.bfloat16), PROMPT, [20, 1], torch.bfloat16)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert error < 0.03, error


@pytest.mark.parametrize("chunks", [[40], [30, 1]], ids=["prefill", "decode"])
def test_a_token_outside_the_window_has_no_effect(tmp_path: Path, chunks: list[int]) -> None:
    """One layer, so that nothing passes on through other tokens: the query at i sees keys i - 11 .. i."""
    model = ours(make_checkpoint(tmp_path, "mistral", num_hidden_layers=1, sliding_window=12))
    tokens = PROMPT[:40]
    before = logits(model, tokens, chunks)
    changed = list(tokens)
    changed[20] = (changed[20] + 1) % VOCAB
    after = logits(model, changed, chunks)
    assert torch.equal(after[32:], before[32:])  # 32 - 12 = 20 is just outside
    assert not torch.equal(after[31], before[31])  # and 31 - 11 = 20 just inside
    assert torch.equal(after[:20], before[:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_deterministic_logits_do_not_depend_on_chunks(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    ops.choose(CPU, deterministic=True)
    model = ours(make_checkpoint(tmp_path, family), dtype, deterministic=True)
    whole = logits(model, PROMPT, [48], dtype)
    for chunks in ([1], [17, 1], [33, 5]):
        assert torch.equal(logits(model, PROMPT, chunks, dtype), whole), chunks
