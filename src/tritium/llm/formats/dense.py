"""Weights as plain numbers, one matrix multiplication per layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium.llm.formats import Parameters, WeightFormat
from tritium.llm.kernels import ops

# Rows of the one product shape of deterministic mode. A decode step of few rows pays for a whole tile, a prompt
# pays for the many small products; at 32 both stay within about 2x of the free choice.
TILE = 32

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold weights of this type in its own order on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


class DenseFormat(WeightFormat):
    """Float weights: packed by oneDNN on a CPU, plain elsewhere.

    Packing halves the time of a bfloat16 product of few rows, since oneDNN would reorder a plain weight in every
    call; in float32 it pays from two rows on.

    Args:
        deterministic: a row of the result depends on that row of ``x`` alone: rows are multiplied in tiles of
            ``TILE``, padded with zeros, so that it is always the same kernel on the same shape. A weight for
            which that does not hold on this machine (it is tried once, at ``finish``) is multiplied row by row.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, deterministic: bool = False) -> None:
        self.name = _DTYPE_NAMES[dtype]
        self.bits = dtype.itemsize * 8
        self.dtype = dtype
        self.device = device
        self.deterministic = deterministic
        self.packs = can_pack(dtype, device)
        self._product = _packed if self.packs else _plain
        self._rows: dict[tuple[int, int], int] = {}  # of a tile, by weight shape

    def make_parameters(self, rows: int, columns: int, *, bias: bool) -> Parameters:
        """Uninitialized ``weight`` and ``bias`` (None without one)."""
        make = torch.empty
        return {
            "weight": make(rows, columns, dtype=self.dtype, device=self.device),
            "bias": make(rows, dtype=self.dtype, device=self.device) if bias else None,
        }

    def load(self, params: Parameters, name: str, tensor: Tensor, row: int) -> None:
        """Copy, with rounding to this format's type."""
        target = params[name]
        assert target is not None, f"no {name} was asked for"
        target[row : row + tensor.shape[0]].copy_(tensor)

    def finish(self, params: Parameters) -> None:
        """Replace the weight by its packed form; the plain one is freed where nobody else holds it."""
        weight = params["weight"]
        assert weight is not None
        shape = (weight.shape[0], weight.shape[1])
        if self.packs:
            params["weight"] = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        if self.deterministic and shape not in self._rows:
            self._rows[shape] = self._tile_rows(params, shape[1])

    def matmul(self, x_TK: Tensor, params: Parameters) -> Tensor:
        """``x @ weight.T + bias``."""
        if not self.deterministic:
            return self._product(x_TK, params)
        weight = params["weight"]
        assert weight is not None
        return self._tiled(x_TK, params, self._rows[weight.shape[0], weight.shape[1]])

    def dequantize(self, params: Parameters) -> Tensor:
        """The weight as float32 [rows, columns]."""
        weight = params["weight"]
        assert weight is not None
        return (weight.to_dense() if weight.is_mkldnn else weight).float()

    def _tiled(self, x_TK: Tensor, params: Parameters, rows: int) -> Tensor:
        count = x_TK.shape[0]
        padding = -count % rows
        x_PK = F.pad(x_TK, (0, 0, 0, padding)) if padding else x_TK.contiguous()
        if x_PK.shape[0] == rows:
            return self._product(x_PK, params)[:count]
        return torch.cat([self._product(tile, params) for tile in x_PK.split(rows)])[:count]

    def _tile_rows(self, params: Parameters, columns: int) -> int:
        """``TILE`` when every place in a tile gives a row the same result, else 1."""
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(columns, generator=generator).to(self.device, self.dtype)
        tile = torch.randn(TILE, columns, generator=generator).to(self.device, self.dtype)
        results: list[Tensor] = []
        for place in range(TILE):
            x = tile.clone()
            x[place] = row
            results.append(self._product(x, params)[place])
        return TILE if all(torch.equal(result, results[0]) for result in results) else 1


class DenseHead(DenseFormat):
    """Weights of the output head: the product is float32 whatever their type.

    BF16 scores would be rounded to 8 bits, so that the best tokens tie and the lowest id wins. Weights of 16 bits
    stay as they were stored (``ops.logits`` reads them so), and a tied head shares the embedding's memory.
    """

    def finish(self, params: Parameters) -> None:
        """Packs float32 alone."""
        if self.dtype == torch.float32:
            super().finish(params)

    def matmul(self, x_TK: Tensor, params: Parameters) -> Tensor:
        """``x @ weight.T`` in float32; a head has no bias."""
        if self.dtype == torch.float32:
            return super().matmul(x_TK, params)
        weight = params["weight"]
        assert weight is not None
        return ops.logits(x_TK, weight)


def _plain(x_TK: Tensor, params: Parameters) -> Tensor:
    weight = params["weight"]
    assert weight is not None
    return F.linear(x_TK, weight, params["bias"])


def _packed(x_TK: Tensor, params: Parameters) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TK, params["weight"], params["bias"], "none", [], "")
