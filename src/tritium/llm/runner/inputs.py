"""Rows of live sequences, and what a forward pass needs of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritium.llm.layers.inputs import ForwardInputs
from tritium.llm.types import NewRow, RowStep, ScheduledBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch ready to run.

    Attributes:
        forward: of the model.
        rows_N: row numbers of the sampled rows, in the batch's order.
        lengths_N: tokens of each sampled row before the draw, prompt included.
    """

    forward: ForwardInputs
    rows_N: Ints
    lengths_N: Ints


class RowTable:
    """Tokens and block tables of the rows; the last sampled token of a row stays on the device.

    So a step can be prepared before the tokens of the one before it have reached the host.

    Args:
        max_rows: rows.
        max_length: tokens of the longest sequence.
        block_size: tokens per KV block.
        device: of the forward pass.
    """

    def __init__(self, *, max_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._tokens_RL = np.zeros((max_rows, max_length), np.int32)
        self._blocks_RM = np.zeros((max_rows, -(-max_length // block_size)), np.int32)
        # Tokens that the host knows, and blocks, of each row; -1 tokens for a row that is free.
        self._known_R = np.full(max_rows, -1, np.int64)
        self._num_blocks_R = np.zeros(max_rows, np.int64)
        self._last_R = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def update(self, batch: ScheduledBatch) -> None:
        """Takes in the differences that a batch brings: rows given back, new rows, new blocks."""
        for row in batch.freed:
            self._known_R[row] = -1
        for new in batch.new:
            self._add(new)
        for step in batch.rows:
            self._extend(step)

    def _add(self, new: NewRow) -> None:
        self._tokens_RL[new.row, : len(new.tokens)] = new.tokens
        self._known_R[new.row] = len(new.tokens)
        self._blocks_RM[new.row, : len(new.blocks)] = new.blocks
        self._num_blocks_R[new.row] = len(new.blocks)

    def _extend(self, step: RowStep) -> None:
        if self._known_R[step.row] < 0:
            raise RuntimeError(f"row {step.row} is scheduled but holds no sequence")
        if step.new_blocks:
            begin = self._num_blocks_R[step.row]
            end = begin + len(step.new_blocks)
            self._blocks_RM[step.row, begin:end] = step.new_blocks
            self._num_blocks_R[step.row] = end

    def prepare(
        self, batch: ScheduledBatch, keys: list[Tensor], values: list[Tensor], *, deterministic: bool
    ) -> Prepared:
        """The inputs of a batch that ``update`` has seen. Rows with one token come first in them."""
        size, steps = self.block_size, len(batch.rows)
        rows_B, starts_B, counts_B, sample_B = (
            np.fromiter(column, np.int64, steps)
            for column in zip(*((s.row, s.start, s.count, s.sample) for s in batch.rows), strict=True)
        )
        order = np.argsort(counts_B > 1, kind="stable")
        rows, starts, counts = rows_B[order], starts_B[order], counts_B[order]
        begins = np.zeros(steps + 1, np.int64)
        np.cumsum(counts, out=begins[1:])
        rows_T = np.repeat(rows, counts)
        positions_T = np.arange(begins[-1]) + np.repeat(starts - begins[:-1], counts)
        slots_T = self._blocks_RM[rows_T, positions_T // size].astype(np.int64) * size + positions_T % size
        contexts = starts + counts
        max_context = int(contexts.max())
        place_B = np.empty(steps, np.int64)
        place_B[order] = np.arange(steps)
        sampled = sample_B.astype(bool)
        forward = ForwardInputs(
            tokens_T=self._gather_tokens(rows_T, positions_T),
            positions_T=self._send(positions_T),
            slots_T=self._send(slots_T),
            query_starts_B1=self._send(begins.astype(np.int32)),
            context_lens_B=self._send(contexts.astype(np.int32)),
            block_table_BM=self._send(self._blocks_RM[rows, : -(-max_context // size)]),
            sample_index_N=self._send(begins[place_B[sampled] + 1] - 1),
            keys=keys,
            values=values,
            max_query=int(counts.max()),
            max_context=max_context,
            num_decode=int((counts == 1).sum()),
            deterministic=deterministic,
            spans=list(zip(begins[:-1].tolist(), counts.tolist(), contexts.tolist(), strict=True)),
        )
        return Prepared(forward, rows_B[sampled], (starts_B + counts_B)[sampled])

    def store(self, rows_N: Ints, tokens_N: Tensor) -> None:
        """Keeps the tokens drawn for rows (int64, on the device): the next step computes them."""
        self._last_R[self._send(rows_N)] = tokens_N

    def _gather_tokens(self, rows_T: Ints, positions_T: Ints) -> Tensor:
        drawn = np.flatnonzero(positions_T >= self._known_R[rows_T])
        tokens_T = self._send(self._tokens_RL[rows_T, positions_T].astype(np.int64))
        if drawn.size:
            tokens_T[self._send(drawn)] = self._last_R[self._send(rows_T[drawn])]
        return tokens_T

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
