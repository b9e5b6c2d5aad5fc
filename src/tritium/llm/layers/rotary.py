"""Tables of the rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tritium.llm.config import Rope

# Rows computed at once, so that the temporaries of a table for a million positions stay small.
CHUNK = 65536


def frequencies(rope: Rope, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair, float32 [dim / 2].

    Args:
        factors: divides the unscaled frequencies, as the ``rope_freqs`` tensor of a GGUF file says.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return plain / factors.float().cpu()
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended.

    Source: Meta's ``apply_scaling``, https://github.com/meta-llama/llama-models (models/llama3/model.py).
    """
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    slowed = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, slowed)


def cos_sin(rope: Rope, max_positions: int, device: torch.device, factors: Tensor | None = None) -> Tensor:
    """``[cos | sin]`` of every position below ``max_positions``, float32 [max_positions, dim]."""
    per_position = frequencies(rope, factors)
    half = per_position.shape[0]
    table = torch.empty(max_positions, 2 * half, dtype=torch.float32)
    for start in range(0, max_positions, CHUNK):
        end = min(start + CHUNK, max_positions)
        angles = torch.arange(start, end, dtype=torch.float32).unsqueeze(1) * per_position
        torch.cos(angles, out=table[start:end, :half])
        torch.sin(angles, out=table[start:end, half:])
    return table.to(device)
