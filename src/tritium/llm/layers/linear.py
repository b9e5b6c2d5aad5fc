"""Linear layers, several of which may be fused into one product (q, k and v; gate and up)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tritium.llm.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Target:
    """A place for one tensor of a checkpoint.

    Attributes:
        shape: that the tensor must have.
        load: takes the tensor, of any float type.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]


class Linear:
    """``y = x W^T + b`` for the parts of one fused weight.

    Args:
        columns: size of ``x``.
        parts: names and sizes of the outputs, in their order in ``y``.
        bias: each part has one.
    """

    __slots__ = ("_missing", "bias", "columns", "format", "params", "parts")

    def __init__(self, format: WeightFormat, columns: int, parts: dict[str, int], *, bias: bool) -> None:
        self.format = format
        self.columns = columns
        self.parts = parts
        self.bias = bias
        self.params = format.make_parameters(sum(parts.values()), columns, bias=bias)
        self._missing = len(parts) * (2 if bias else 1)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[T, sum of the parts], in the type of ``x``."""
        return self.format.matmul(x_TK, self.params)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Where each checkpoint tensor goes, by ``<prefix><part>.<weight or bias>``; each loads once."""
        row = 0
        for part, size in self.parts.items():
            yield f"{prefix}{part}.weight", Target((size, self.columns), self._loader("weight", row))
            if self.bias:
                yield f"{prefix}{part}.bias", Target((size,), self._loader("bias", row))
            row += size

    def _loader(self, name: str, row: int) -> Callable[[Tensor], None]:
        def load(tensor: Tensor) -> None:
            self.format.load(self.params, name, tensor, row)
            self._missing -= 1
            if not self._missing:
                self.format.finish(self.params)

        return load

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.format.num_bytes(self.params)


def tied_linear(format: WeightFormat, weight_VH: Tensor) -> Linear:
    """The output head that is the embedding matrix; shares its memory unless the format packs its weights."""
    linear = Linear.__new__(Linear)
    linear.format, linear.columns, linear.bias = format, weight_VH.shape[1], False
    linear.parts, linear.params, linear._missing = {"head": weight_VH.shape[0]}, {"weight": weight_VH, "bias": None}, 0
    format.finish(linear.params)
    return linear
