"""RMS norm: the weight only; the arithmetic is fused into its neighbours by ``kernels.ops``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritium.llm.layers.linear import Target


class Norm:
    """A weight [size] and its epsilon."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """The one tensor, ``<name>.weight``."""

        def load(tensor: Tensor) -> None:
            self.weight.copy_(tensor)

        yield f"{name}.weight", Target((self.weight.shape[0],), load)

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes
