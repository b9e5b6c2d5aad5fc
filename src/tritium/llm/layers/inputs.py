"""What one forward pass works on: a ragged batch of rows, passed down as the only argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class ForwardInputs:
    """One ragged batch: T tokens of B rows, N of which are sampled from. Rows lie one after another in T.

    There is no prefill phase and no decode phase: a row has ``query_starts_B1[b + 1] - query_starts_B1[b]``
    tokens to compute, the last ones of the ``context_lens_B[b]`` positions that it has then.

    Attributes:
        tokens_T: int64 ids.
        positions_T: int64 position of each token in its sequence.
        slots_T: int64 place of each token's key and value: block * block_size + offset.
        query_starts_B1: int32, first token of each row in T, then T.
        context_lens_B: int32, tokens of each row with keys and values after this pass.
        block_table_BM: int32 block ids of each row; entries past its context are undefined. Rows may be strided.
        sample_index_N: int64 indices into T whose hidden states are wanted.
        keys: per layer ``[num_blocks, kv_heads, block_size, head_dim]``.
        values: like ``keys``.
        max_query: most tokens of a row.
        max_context: longest context of a row.
        num_decode: rows with one token, which come first.
        deterministic: results of a row must not depend on the rest of the batch.
        spans: (first token in T, tokens, context) of each row on the host; made on demand, see ``row_spans``.
        prepared: what a kernel computed once for all layers of this pass; owned by ``kernels``.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts_B1: Tensor
    context_lens_B: Tensor
    block_table_BM: Tensor
    sample_index_N: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    max_query: int
    max_context: int
    num_decode: int
    deterministic: bool
    spans: list[tuple[int, int, int]] | None = field(default=None, repr=False)
    prepared: Any = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the pass runs."""
        return self.tokens_T.device

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.keys[0].shape[2]

    def row_spans(self) -> list[tuple[int, int, int]]:
        """(first token in T, tokens, context) of each row; copies from the device once if nobody gave it."""
        if self.spans is None:
            starts = self.query_starts_B1.tolist()
            contexts = self.context_lens_B.tolist()
            self.spans = [(a, b - a, c) for a, b, c in zip(starts, starts[1:], contexts, strict=False)]
        return self.spans
