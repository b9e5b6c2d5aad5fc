"""What a weight looks like at run time."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Parameters = dict[str, Tensor | None]


class WeightFormat(ABC):
    """How the weights of a linear layer are held and multiplied.

    Attributes:
        name: of the format.
        bits: per weight.
        group: weights that share a scale; None for formats without scales.
    """

    name: str
    bits: int
    group: int | None = None

    @abstractmethod
    def make_parameters(self, rows: int, columns: int, *, bias: bool) -> Parameters:
        """Memory for a weight [rows, columns] and, when asked for, a bias [rows]."""

    @abstractmethod
    def load(self, params: Parameters, name: str, tensor: Tensor, row: int) -> None:
        """Write a checkpoint tensor (``name`` is ``weight`` or ``bias``) into the rows from ``row`` on."""

    @abstractmethod
    def finish(self, params: Parameters) -> None:
        """All rows are in: bring them into the form that ``matmul`` reads fastest."""

    @abstractmethod
    def matmul(self, x_TK: Tensor, params: Parameters) -> Tensor:
        """``x @ weight.T + bias``, [T, rows] in the type of ``x``."""

    @abstractmethod
    def dequantize(self, params: Parameters) -> Tensor:
        """The weight as float32 [rows, columns]."""

    def num_bytes(self, params: Parameters) -> int:
        """Memory that the parameters take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in params.values() if tensor is not None)


def check_values(name: str, tensor: Tensor, dtype: torch.dtype) -> str | None:
    """Why a tensor's values cannot be held in ``dtype``; None when they can. One pass, no copy."""
    if not tensor.is_floating_point():
        return f"tensor '{name}' holds {tensor.dtype}, expected floating point values"
    if tensor.numel() == 0:
        return None
    low, high = (float(value) for value in torch.aminmax(tensor))
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # also false for NaN, which aminmax passes on
        return f"tensor '{name}' holds values that are not finite"
    if max(-low, high) > torch.finfo(dtype).max:
        return f"tensor '{name}' holds {max(-low, high):g}, which does not fit in {str(dtype).removeprefix('torch.')}"
    return None
