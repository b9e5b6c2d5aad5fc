"""Gated feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202): one fused gate and up product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from tritium.llm.config import TransformerConfig
from tritium.llm.formats import WeightFormat
from tritium.llm.kernels import ops
from tritium.llm.layers.linear import Linear, Target

ACTIVATIONS = {
    "silu": ops.silu_and_mul,
    "gelu": partial(ops.gelu_and_mul, tanh=False),
    "gelu_tanh": partial(ops.gelu_and_mul, tanh=True),
}


class Mlp:
    """``down(activation(gate(x)) * up(x))``."""

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, config: TransformerConfig, format: WeightFormat) -> None:
        inner = config.intermediate
        self.gate_up = Linear(format, config.hidden, {"gate": inner, "up": inner}, bias=config.mlp_bias)
        self.down = Linear(format, inner, {"down": config.hidden}, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, hidden]."""
        return self.down(self.activation(self.gate_up(x_TH)))

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Places of gate, up and down."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.gate_up.num_bytes + self.down.num_bytes
