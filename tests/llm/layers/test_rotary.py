from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tritium.llm.config import Rope
from tritium.llm.layers.rotary import CHUNK, cos_sin, frequencies

POSITIONS = [0, 1, 8191, 8192, CHUNK - 1, CHUNK, 100000]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(10000.0, 64), {"rope_type": "default"}),
        (Rope(1000000.0, 128), {"rope_type": "default"}),
        (Rope(10000.0, 64, "linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (Rope(500000.0, 128, "llama3", 8.0, 1.0, 4.0, 8192), {"rope_type": "llama3", **LLAMA3}),
    ],
)
def test_table_equals_transformers(rope: Rope, parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=rope.dim,
        num_attention_heads=1,
        head_dim=rope.dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": rope.theta, **parameters},
    )
    embedding = LlamaRotaryEmbedding(config)
    assert torch.equal(frequencies(rope), embedding.inv_freq)
    cos, sin = embedding(torch.zeros(1), torch.tensor([POSITIONS]))
    half = rope.dim // 2
    table = cos_sin(rope, 100001, torch.device("cpu"))
    assert table.dtype == torch.float32
    assert table.shape == (100001, rope.dim)
    assert torch.equal(table[POSITIONS, :half], cos[0, :, :half])
    assert torch.equal(table[POSITIONS, half:], sin[0, :, :half])


def test_factors_of_a_gguf_divide_the_frequencies() -> None:
    plain = Rope(500000.0, 128)
    scaled = Rope(500000.0, 128, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = frequencies(plain) / frequencies(scaled)
    torch.testing.assert_close(frequencies(plain, factors), frequencies(scaled))
