"""Self-attention over the paged cache: one fused q, k, v product, rotation, attention, output product."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tritium.llm.config import TransformerConfig
from tritium.llm.formats.dense import DenseFormat
from tritium.llm.kernels import ops
from tritium.llm.layers.inputs import ForwardInputs
from tritium.llm.layers.linear import Linear, Target
from tritium.llm.layers.norm import Norm


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) of one layer.

    Args:
        layer: its number, which is its place in ``ForwardInputs.keys``.
        cos_sin_PD: the rotary table, shared by all layers.
    """

    __slots__ = (
        "cos_sin_PD",
        "head_dim",
        "heads",
        "interleaved",
        "k_norm",
        "kv_heads",
        "layer",
        "o",
        "q_norm",
        "qkv",
        "scale",
        "window",
    )

    def __init__(self, config: TransformerConfig, format: DenseFormat, layer: int, cos_sin_PD: Tensor) -> None:
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        windowed = config.window_layers is None or config.window_layers[layer]
        self.window = config.window if windowed else None
        self.interleaved = config.rope.interleaved
        self.cos_sin_PD = cos_sin_PD
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = Linear(format, config.hidden, {"q": query, "k": kv, "v": kv}, bias=config.qkv_bias)
        self.o = Linear(format, query, {"o": config.hidden}, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(self.head_dim, config.norm_eps, format.dtype, format.device)
            self.k_norm = Norm(self.head_dim, config.norm_eps, format.dtype, format.device)

    def __call__(self, x_TH: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, heads * head_dim]: what the heads gathered, before the output product ``o``."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x_TH).view(x_TH.shape[0], heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm.weight, self.q_norm.eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.k_norm.eps)
        ops.rope_and_write(q, k, v, self.cos_sin_PD, inputs, self.layer, self.interleaved)
        return ops.attention(q, inputs, self.layer, self.scale, self.window).flatten(1)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Places of q, k, v, o and their norms."""
        yield from self.qkv.targets(prefix)
        yield from self.o.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(f"{prefix}q_norm")
            yield from self.k_norm.targets(f"{prefix}k_norm")

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        norms = [norm.num_bytes for norm in (self.q_norm, self.k_norm) if norm is not None]
        return self.qkv.num_bytes + self.o.num_bytes + sum(norms)
