"""Sizing of the KV cache, to the byte, and copies of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tritium.errors import Code, TritiumError
from tritium.llm.config import EngineConfig, Rope, TransformerConfig
from tritium.llm.runner.kv_cache import KvCache, Size, activations_bytes, plan, usable_bytes

MODEL = TransformerConfig(
    family="llama",
    hidden=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=384,
    max_positions=256,
    norm_eps=1e-5,
    activation="silu",
    rope=Rope(theta=10000.0, dim=16),
    tied=True,
)
CONFIG = EngineConfig(model="m", max_rows=4, max_tokens_per_step=32)
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4
BLOCK_BYTES = 16 * TOKEN_BYTES
WEIGHTS = 1_000_000
FIXED = WEIGHTS + activations_bytes(CONFIG, MODEL, torch.float32)
PLENTY = 1 << 32


def size(usable: int = PLENTY, device: str = "cpu", **changes) -> Size:
    config = replace(CONFIG, **changes)
    return plan(config, MODEL, dtype=torch.float32, device=torch.device(device), usable=usable, weights=WEIGHTS)


def refusal(usable: int = PLENTY, **changes) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        size(usable, **changes)
    return caught.value


def test_default_is_what_is_needed() -> None:
    got = size()
    assert got.budget.num_blocks == 4 * 256 // 16
    assert got.budget.kv_bytes_per_token == TOKEN_BYTES
    assert got.budget.kv_bytes == 64 * BLOCK_BYTES
    assert got.max_length == 256 and got.notices == []
    parts = got.budget.weights_bytes + got.budget.activations_bytes + got.budget.kv_bytes + got.budget.margin_bytes
    assert parts == PLENTY


def test_a_cpu_gives_a_quarter_at_most() -> None:
    usable = FIXED + 40 * BLOCK_BYTES
    got = size(usable)
    assert got.budget.num_blocks == usable // 4 // BLOCK_BYTES < 40
    assert size(usable, "cuda").budget.num_blocks == 40


def test_asked_for() -> None:
    assert size(num_blocks=17).budget.num_blocks == 17
    assert size(kv_cache_bytes=20 * BLOCK_BYTES + 5).budget.num_blocks == 20
    assert size(kv_cache_bytes=20 * BLOCK_BYTES, num_blocks=18).budget.num_blocks == 18


def test_length_follows_a_small_cache() -> None:
    got = size(num_blocks=5)
    assert got.max_length == 80
    assert "lowered from the model's 256 to 80" in got.notices[0]
    assert size(num_blocks=5, max_length=80).notices == []


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"num_blocks": 5, "max_length": 81}, "max_length", "holds 80 tokens"),
        ({"max_length": 300}, "max_length", "expected 2 to 256"),
        ({"max_length": 1}, "max_length", "expected 2 to 256"),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes", f"at least {BLOCK_BYTES}"),
        ({"num_blocks": 0}, "num_blocks", "at least 1"),
        ({"max_rows": 0}, "max_rows", "at least 1"),
        ({"usable": FIXED + BLOCK_BYTES - 1}, "memory_fraction", "does not fit"),
        ({"usable": FIXED + 9 * BLOCK_BYTES, "num_blocks": 10}, "num_blocks", "9 blocks"),
        ({"usable": FIXED + 9 * BLOCK_BYTES, "kv_cache_bytes": 10 * BLOCK_BYTES}, "kv_cache_bytes", "9 blocks"),
    ],
)
def test_refusals_say_what_fits(changes: dict, param: str, words: str) -> None:
    error = refusal(**changes)
    assert error.param == param and words in error.message
    assert error.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01, float("nan")])
def test_memory_fraction(fraction: float) -> None:
    with pytest.raises(TritiumError, match="memory_fraction"):
        usable_bytes(replace(CONFIG, memory_fraction=fraction), torch.device("cpu"))
    assert usable_bytes(replace(CONFIG, memory_fraction=0.5), torch.device("cpu")) > 0


def test_copies() -> None:
    cache = KvCache(MODEL, 6, 4, torch.float32, torch.device("cpu"))
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in (*cache.keys, *cache.values)]
    cache.copy([(0, 3), (3, 5), (1, 0)])
    for layer, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(layer, old[[1, 1, 2, 0, 4, 3]])
    cache.copy([])
