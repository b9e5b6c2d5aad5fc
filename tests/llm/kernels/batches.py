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
    positions: list[Tensor] = []
    starts = [0]
    for row, (count, context) in enumerate(rows):
        mine = [order.pop(0) for _ in range(blocks_of[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        at = torch.arange(context)
        slot = torch.tensor(mine)[at // block_size] * block_size + at % block_size
        for layer in range(layers):
            for cache in (keys[layer], values[layer]):
                values_now = torch.randn((context, kv_heads, dim), generator=generator).to(dtype)
                cache[slot // block_size, :, slot % block_size] = values_now
        slots.append(slot[context - count :])
        positions.append(at[context - count :])
        starts.append(starts[-1] + count)
    inputs = ForwardInputs(
        tokens_T=torch.zeros(starts[-1], dtype=torch.long),
        positions_T=torch.cat(positions),
        slots_T=torch.cat(slots),
        query_starts_B1=torch.tensor(starts, dtype=torch.int32),
        context_lens_B=torch.tensor([c for _, c in rows], dtype=torch.int32),
        block_table_BM=table,
        sample_index_N=torch.tensor(starts[1:]) - 1,
        keys=keys,
        values=values,
        max_query=max(n for n, _ in rows),
        max_context=max(c for _, c in rows),
        num_decode=sum(1 for n, _ in rows if n == 1),
        deterministic=True,
    )
    q = torch.randn((starts[-1], heads, dim), generator=generator).to(dtype)
    return Case(inputs, q, rows)


def only_row(case: Case, row: int) -> Case:
    """The same row alone, over the same cache."""
    start, count, context = case.inputs.row_spans()[row]
    old = case.inputs
    inputs = ForwardInputs(
        tokens_T=old.tokens_T[start : start + count],
        positions_T=old.positions_T[start : start + count],
        slots_T=old.slots_T[start : start + count],
        query_starts_B1=torch.tensor([0, count], dtype=torch.int32),
        context_lens_B=torch.tensor([context], dtype=torch.int32),
        block_table_BM=old.block_table_BM[row : row + 1],
        sample_index_N=torch.tensor([count - 1]),
        keys=old.keys,
        values=old.values,
        max_query=count,
        max_context=context,
        num_decode=1 if count == 1 else 0,
        deterministic=True,
    )
    return Case(inputs, case.q[start : start + count], [(count, context)])


def only_tokens(case: Case, row: int, begin: int, end: int) -> Case:
    """Tokens ``begin`` to ``end`` of one row as a chunk of their own, over the same cache."""
    alone = only_row(case, row)
    _, count, context = alone.inputs.row_spans()[0]
    chunk = make_chunk(alone.inputs, begin, end, context - count + end)
    return Case(chunk, alone.q[begin:end], [(end - begin, context - count + end)])


def make_chunk(old: ForwardInputs, begin: int, end: int, context: int) -> ForwardInputs:
    """Part of a one-row batch."""
    return ForwardInputs(
        tokens_T=old.tokens_T[begin:end],
        positions_T=old.positions_T[begin:end],
        slots_T=old.slots_T[begin:end],
        query_starts_B1=torch.tensor([0, end - begin], dtype=torch.int32),
        context_lens_B=torch.tensor([context], dtype=torch.int32),
        block_table_BM=old.block_table_BM,
        sample_index_N=torch.tensor([end - begin - 1]),
        keys=old.keys,
        values=old.values,
        max_query=end - begin,
        max_context=context,
        num_decode=1 if end - begin == 1 else 0,
        deterministic=True,
    )
