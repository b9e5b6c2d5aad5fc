"""Token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium.llm.layers.linear import Target


class Embedding:
    """A matrix [vocab, hidden], one row per token id."""

    __slots__ = ("weight",)

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab, hidden, dtype=dtype, device=device)

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """[T, hidden], new memory. Ids must be below the vocabulary size."""
        return F.embedding(tokens_T, self.weight)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """The one tensor, ``<name>.weight``."""

        def load(tensor: Tensor) -> None:
            self.weight.copy_(tensor)

        yield f"{name}.weight", Target(tuple(self.weight.shape), load)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self.weight.nbytes
