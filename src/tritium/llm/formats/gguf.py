"""Dequantization of GGUF tensors, by the ``gguf`` package in parallel slices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements of a slice: its temporaries stay in the second-level cache, and numpy's calls are worth their overhead.
SLICE = 2**18


def dequantize(raw: Tensor, quant: dict[str, Any]) -> Tensor:
    """The float32 values of a quantized tensor.

    Args:
        raw: uint8 bytes [num_bytes], rows one after another.
        quant: ``{"type": ggml type name, "shape": shape}`` as ``Checkpoint.tensors`` gives it.
    """
    from gguf import GGMLQuantizationType, quants

    kind, shape = GGMLQuantizationType[quant["type"]], quant["shape"]
    source = raw.numpy().reshape(-1, raw.numel() // max(1, int(np.prod(shape[:-1]))))
    result = np.empty((source.shape[0], shape[-1]), np.float32)
    step = max(1, SLICE // shape[-1])

    def convert(start: int) -> None:
        part = source[start : start + step]
        result[start : start + step] = quants.dequantize(part, kind)

    starts = range(0, source.shape[0], step)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(convert, starts))
    return torch.from_numpy(result).reshape(shape)


def undo_rope_permutation(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a llama GGUF's q or k (weight or bias) in Hugging Face's order.

    llama.cpp's converter brings each head's pairs (i, i + d/2) together for its interleaved rotary embedding
    (``LlamaModel.permute`` in convert_hf_to_gguf.py); this is the inverse.
    """
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, half, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
