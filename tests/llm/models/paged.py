"""Runs one sequence through a decoder over a paged cache whose blocks are out of order."""

from __future__ import annotations

import torch
from torch import Tensor

from tritium.llm.config import TransformerConfig
from tritium.llm.layers.inputs import ForwardInputs
from tritium.llm.models.decoder import Decoder

BLOCK = 4


class Paged:
    """One sequence and its cache."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, max_tokens: int = 96) -> None:
        count = -(-max_tokens // BLOCK)
        shape = (count, config.kv_heads, BLOCK, config.head_dim)
        # NaN in unwritten slots: reading one would show.
        self.keys = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.layers)]
        self.table = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.length = 0

    def inputs(self, tokens: list[int]) -> ForwardInputs:
        """The next tokens of the sequence; all are sampled."""
        count = len(tokens)
        positions = torch.arange(self.length, self.length + count)
        self.length += count
        return ForwardInputs(
            tokens_T=torch.tensor(tokens),
            positions_T=positions,
            slots_T=self.table[positions // BLOCK].long() * BLOCK + positions % BLOCK,
            query_starts_B1=torch.tensor([0, count], dtype=torch.int32),
            context_lens_B=torch.tensor([self.length], dtype=torch.int32),
            block_table_BM=self.table[None],
            sample_index_N=torch.arange(count),
            keys=self.keys,
            values=self.values,
            max_query=count,
            max_context=self.length,
            num_decode=1 if count == 1 else 0,
            deterministic=False,
        )


def logits(model: Decoder, tokens: list[int], chunks: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of every position, computed in chunks of the given sizes (the last one repeats), [T, vocab]."""
    paged = Paged(model.config, dtype)
    results: list[Tensor] = []
    start = 0
    while start < len(tokens):
        size = chunks[min(len(results), len(chunks) - 1)]
        results.append(model.logits(model.forward(paged.inputs(tokens[start : start + size]))))
        start += size
    return torch.cat(results)
