from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tests.tiny_gguf import permute
from tritium.llm.checkpoint.gguf import GGML_TYPES
from tritium.llm.formats.gguf import SLICE, dequantize, undo_rope_permutation

QUANTIZED = {name: sizes for name, *sizes in GGML_TYPES.values() if name not in ("F32", "F16", "BF16")}


@pytest.mark.parametrize("name", QUANTIZED)
def test_equals_the_gguf_package(name: str) -> None:
    """Random bytes are random codes and scales; several slices, the last one short."""
    block, block_bytes = QUANTIZED[name]
    columns = 1024
    rows = 2 * SLICE // columns + 3
    raw = np.random.default_rng(1).integers(0, 60, rows * columns // block * block_bytes, np.uint8)
    expected = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[name])
    result = dequantize(torch.from_numpy(raw), {"type": name, "shape": (rows, columns)})
    assert result.dtype == torch.float32
    assert np.array_equal(result.numpy(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_undoes_quantization(name: str) -> None:
    weight = np.random.default_rng(2).standard_normal((5, 256), np.float32)
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name])
    result = dequantize(torch.from_numpy(raw.reshape(-1)), {"type": name, "shape": weight.shape}).numpy()
    assert np.abs(result - weight).max() < {"Q8_0": 0.02, "Q4_0": 0.5, "Q4_1": 0.3}[name]


@pytest.mark.parametrize("shape", [(48, 8), (48,)])
def test_rope_permutation(shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(3).standard_normal(shape, np.float32)
    assert np.array_equal(undo_rope_permutation(torch.from_numpy(permute(weight, 3)), 3).numpy(), weight)
