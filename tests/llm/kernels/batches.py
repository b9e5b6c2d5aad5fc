"""Random ragged batches over a paged cache whose unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritium.llm.layers.inputs import ForwardInputs


@dataclass
class Case:
    inputs: ForwardInputs
    q: Tensor
    rows: list[tuple[int, int]]


def make_case(
    rows: list[tuple[int, int]],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 1,
) -> Case:
    """A batch of (tokens to compute, context) rows; those with one token must come first."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(blocks_of) + 1
    # Entries past a context point at a block of NaN.
    table = torch.full((len(rows), width), order[-1], dtype=torch.int32)
    shape = (num_blocks, kv_heads, block_size, dim)
    keys = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(layers)]
    values = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(layers)]
    slots: list[Tensor] = []
    for row, (count, context) in enumerate(rows):
        mine = [order.pop(0) for _ in range(blocks_of[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        at = torch.arange(context)
        slot = torch.tensor(mine)[at // block_size] * block_size + at % block_size
        for cache in (*keys, *values):
            values_now = torch.randn((context, kv_heads, dim), generator=generator).to(dtype)
            cache[slot // block_size, :, slot % block_size] = values_now
        slots.append(slot[context - count :])
    inputs = make_inputs(rows, table, torch.cat(slots), keys, values)
    q = torch.randn((inputs.tokens_T.shape[0], heads, dim), generator=generator).to(dtype)
    return Case(inputs, q, rows)


def make_inputs(
    rows: list[tuple[int, int]], table: Tensor, slots_T: Tensor, keys: list[Tensor], values: list[Tensor]
) -> ForwardInputs:
    """Inputs of (tokens to compute, context) rows."""
    ends = torch.tensor([n for n, _ in rows]).cumsum(0)
    return ForwardInputs(
        tokens_T=torch.zeros(len(slots_T), dtype=torch.long),
        positions_T=torch.cat([torch.arange(context - count, context) for count, context in rows]),
        slots_T=slots_T,
        query_starts_B1=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        context_lens_B=torch.tensor([c for _, c in rows], dtype=torch.int32),
        block_table_BM=table,
        sample_index_N=ends - 1,
        keys=keys,
        values=values,
        max_query=max(n for n, _ in rows),
        max_context=max(c for _, c in rows),
        num_decode=sum(1 for n, _ in rows if n == 1),
        deterministic=True,
    )


def only_row(case: Case, row: int) -> Case:
    """The same row alone, over the same cache."""
    return only_tokens(case, row, 0, case.rows[row][0])


def only_tokens(case: Case, row: int, begin: int, end: int) -> Case:
    """Tokens ``begin`` to ``end`` of one row as a chunk of their own, over the same cache."""
    first, count, context = case.inputs.row_spans()[row]
    rows = [(end - begin, context - count + end)]
    part = slice(first + begin, first + end)
    old = case.inputs
    table = old.block_table_BM[row : row + 1]
    return Case(make_inputs(rows, table, old.slots_T[part], old.keys, old.values), case.q[part], rows)
