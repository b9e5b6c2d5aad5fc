"""The classification extension: the best classes of an output in place of its numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tritium.backends.config import ModelConfig
from tritium.errors import invalid
from tritium.types import DType, InferRequest, OutputWindow, Tensor


def asked_classes(request: InferRequest) -> dict[str, int]:
    """How many classes are asked for, by output; outputs that are to come as they are have no entry."""
    return {output.name: output.classes for output in request.outputs if output.classes}


def asked_windows(request: InferRequest) -> dict[str, OutputWindow]:
    """The shared memory that outputs shall go to, by output."""
    return {output.name: output.window for output in request.outputs if output.window is not None}


def top_classes(tensor: Tensor, count: int, config: ModelConfig) -> Tensor:
    """``classify`` with the batch and the labels of a model."""
    spec = config.output(tensor.name)
    return classify(tensor, count, batched=config.max_batch_size > 0, labels=spec.labels if spec is not None else ())


def classify(tensor: Tensor, count: int, *, batched: bool, labels: Sequence[str] = ()) -> Tensor:
    """The ``count`` largest values of each row as texts ``value:index`` or ``value:index:label``.

    A row is one element of the batch, or the whole tensor. Equal values come in the order of their index,
    NaN last; floats have six digits.

    Args:
        batched: the first dimension is the batch.
        labels: names of the classes, by index; where one is missing, only its index is shown.

    Returns:
        BYTES of shape [batch, k] or [k], k at most ``count``.

    Raises:
        TritiumError: INVALID_ARGUMENT for an output of BYTES or BF16.
    """
    if tensor.dtype in (DType.BYTES, DType.BF16):
        raise invalid(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.dtype.value}'",
            param=tensor.name,
        )
    num_rows = tensor.shape[0] if batched else 1
    row_size = tensor.size // num_rows if num_rows else 0
    floating = tensor.dtype in (DType.FP16, DType.FP32, DType.FP64)
    texts: list[bytes] = []
    for row in tensor.numpy().reshape(num_rows, row_size):
        # Reversed twice, so that a stable ascending sort gives the largest first and ties by index.
        order = row_size - 1 - np.argsort(row[::-1], kind="stable")[::-1]
        if floating:
            order = np.concatenate([order[~np.isnan(row[order])], order[np.isnan(row[order])]])
        for index in order[:count].tolist():
            value = f"{float(row[index]):f}" if floating else str(int(row[index]))
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            texts.append(f"{value}:{index}{label}".encode())
    kept = min(count, row_size)
    return Tensor.from_strings(tensor.name, texts, (num_rows, kept) if batched else (kept,))
