"""The decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3, by the flags of ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritium.llm.config import TransformerConfig
from tritium.llm.formats.dense import DenseFormat, DenseHead
from tritium.llm.kernels import ops
from tritium.llm.layers.attention import Attention
from tritium.llm.layers.embedding import Embedding
from tritium.llm.layers.inputs import ForwardInputs
from tritium.llm.layers.linear import Linear, Target, tied_linear
from tritium.llm.layers.mlp import Mlp
from tritium.llm.layers.norm import Norm
from tritium.llm.layers.rotary import cos_sin


class Layer:
    """One decoder layer; ``Decoder`` runs its parts, since norms and residuals are fused across layers."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, config: TransformerConfig, format: DenseFormat, index: int, cos_sin_PD: Tensor) -> None:
        self.attention_norm = Norm(config.hidden, config.norm_eps, format.dtype, format.device)
        self.attention = Attention(config, format, index, cos_sin_PD)
        self.mlp_norm = Norm(config.hidden, config.norm_eps, format.dtype, format.device)
        self.mlp = Mlp(config, format)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Places of all weights of the layer."""
        yield from self.attention_norm.targets(f"{prefix}attention_norm")
        yield from self.attention.targets(prefix)
        yield from self.mlp_norm.targets(f"{prefix}mlp_norm")
        yield from self.mlp.targets(prefix)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        parts = (self.attention_norm, self.attention, self.mlp_norm, self.mlp)
        return sum(part.num_bytes for part in parts)


class Decoder:
    """Embedding, layers, final norm, output head.

    Args:
        config: the architecture.
        dtype: of weights and activations.
        device: of weights and activations.
        deterministic: products are batch-invariant (see ``DenseFormat``).
        rope_factors: divides the rotary frequencies, where the checkpoint brings factors of its own.

    Attributes:
        notices: sentences for the operator that came up while loading.
    """

    def __init__(
        self,
        config: TransformerConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool = False,
        rope_factors: Tensor | None = None,
    ) -> None:
        self.config = config
        self.notices: list[str] = []
        format = DenseFormat(dtype, device, deterministic=deterministic)
        self._head_format = DenseHead(dtype, device, deterministic=deterministic)
        self.cos_sin_PD = cos_sin(config.rope, config.max_positions, device, rope_factors)
        self.embed = Embedding(config.vocab, config.hidden, dtype, device)
        self.layers = [Layer(config, format, index, self.cos_sin_PD) for index in range(config.layers)]
        self.norm = Norm(config.hidden, config.norm_eps, dtype, device)
        self.head: Linear | None = None
        if not config.tied:
            self.head = Linear(self._head_format, config.hidden, {"head": config.vocab}, bias=False)

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        """See ``forward``."""
        return self.forward(inputs)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Computes all tokens of the batch, writing their keys and values to the cache.

        Returns:
            Hidden states after the final norm, [N, hidden], of the tokens ``inputs.sample_index_N``.
        """
        # Two sums a layer: in BF16 their roundings would make up most of the error of the logits.
        residual = self.embed(inputs.tokens_T).float()
        first = self.layers[0].attention_norm
        x = ops.rms_norm(residual, first.weight, first.eps)
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            x = layer.attention.o(layer.attention(x, inputs))
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
            norm = following.attention_norm
            x, residual = ops.add_rms_norm(layer.mlp(x), residual, norm.weight, norm.eps)
        # After the last layer's attention only the sampled tokens matter any more.
        layer = self.layers[-1]
        x = layer.attention.o(layer.attention(x, inputs)[inputs.sample_index_N])
        x, residual = ops.add_rms_norm(x, residual[inputs.sample_index_N], layer.mlp_norm.weight, layer.mlp_norm.eps)
        return ops.add_rms_norm(layer.mlp(x), residual, self.norm.weight, self.norm.eps)[0]

    @torch.inference_mode()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Scores of the next token, float32 [N, vocab]."""
        assert self.head is not None, "the model is not loaded"
        return self.head(hidden_NH)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Places of all weights, by our names (``families.stored_name`` translates)."""
        yield from self.embed.targets("embed")
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"layers.{index}.")
        yield from self.norm.targets("norm")
        if self.head is not None:
            yield from self.head.targets("")

    def tie(self) -> None:
        """Make the embedding matrix the output head, once it is loaded."""
        self.head = tied_linear(self._head_format, self.embed.weight)

    @property
    def weights_bytes(self) -> int:
        """Memory of all weights and the rotary table.

        A tied head counts once where it shares the embedding's memory, and on its own where it is packed.
        """
        head = self.head
        shared = head is not None and head.params["weight"] is self.embed.weight
        parts = [self.embed.num_bytes, self.norm.num_bytes, *(layer.num_bytes for layer in self.layers)]
        return sum(parts) + self.cos_sin_PD.nbytes + (0 if head is None or shared else head.num_bytes)
