"""RowTable against a model of it in lists and dicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tritium.llm.runner.inputs import RowTable
from tritium.llm.types import NewRow, RowStep, SamplingParams, ScheduledBatch

MAX_ROWS, MAX_LENGTH, BLOCK = 6, 40, 4
CACHE = [torch.empty(200, 1, BLOCK, 2)]


class Machine(RuleBasedStateMachine):
    """Sequences come, compute chunks, draw tokens, leave; each batch is compared token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(max_rows=MAX_ROWS, max_length=MAX_LENGTH, block_size=BLOCK, device=torch.device("cpu"))
        self.rows: dict[int, dict] = {}
        self.freed: list[int] = []
        self.next_block = 0
        self.step = 0

    def take(self, count: int) -> list[int]:
        taken = [(self.next_block + i) * 7 % 200 for i in range(count)]
        self.next_block += count
        return taken

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.freed.append(row)

    @rule(data=st.data())
    def run_batch(self, data: st.DataObject) -> None:
        new: list[NewRow] = []
        free = [row for row in range(MAX_ROWS) if row not in self.rows]
        for row in free[: data.draw(st.integers(0, len(free)))]:
            tokens = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=20))
            cached = data.draw(st.integers(0, (len(tokens) - 1) // BLOCK))
            blocks = self.take(cached)
            self.rows[row] = {"tokens": list(tokens), "computed": cached * BLOCK, "blocks": list(blocks)}
            new.append(NewRow(row, list(tokens), len(tokens), list(blocks), SamplingParams()))
        steps: list[RowStep] = []
        for row in data.draw(st.permutations(sorted(self.rows))):
            seq = self.rows[row]
            left = len(seq["tokens"]) - seq["computed"]
            if not left or len(seq["tokens"]) >= MAX_LENGTH or data.draw(st.booleans()):
                continue
            count = data.draw(st.integers(1, left))
            needed = -(-(seq["computed"] + count) // BLOCK) - len(seq["blocks"])
            blocks = self.take(max(0, needed))
            seq["blocks"] += blocks
            steps.append(RowStep(row, seq["computed"], count, blocks, count == left))
        self.step += 1
        batch = ScheduledBatch(self.step, self.freed, new, steps, [])
        self.freed = []
        self.table.update(batch)
        if steps:
            self.compare(batch)

    def compare(self, batch: ScheduledBatch) -> None:
        prepared = self.table.prepare(batch, CACHE, CACHE, deterministic=False)
        got = prepared.forward
        order = [s for s in batch.rows if s.count == 1] + [s for s in batch.rows if s.count > 1]
        starts, tokens, positions, slots, last = [0], [], [], [], {}
        for i, step in enumerate(order):
            seq = self.rows[step.row]
            where = range(step.start, step.start + step.count)
            tokens += [seq["tokens"][p] for p in where]
            positions += list(where)
            slots += [seq["blocks"][p // BLOCK] * BLOCK + p % BLOCK for p in where]
            starts.append(len(tokens))
            last[step.row] = len(tokens) - 1
            context = step.start + step.count
            assert got.context_lens_B[i] == context
            count = -(-context // BLOCK)
            assert got.block_table_BM[i, :count].tolist() == seq["blocks"][:count]
        assert got.tokens_T.tolist() == tokens
        assert got.positions_T.tolist() == positions
        assert got.slots_T.tolist() == slots
        assert got.query_starts_B1.tolist() == starts
        sampled = [s for s in batch.rows if s.sample]
        assert got.sample_index_N.tolist() == [last[s.row] for s in sampled]
        assert prepared.rows_N.tolist() == [s.row for s in sampled]
        assert prepared.lengths_N.tolist() == [len(self.rows[s.row]["tokens"]) for s in sampled]
        assert got.num_decode == sum(s.count == 1 for s in order)
        assert got.max_query == max(s.count for s in order)
        assert got.max_context == max(s.start + s.count for s in order)
        spans, got.spans = got.spans, None
        assert got.row_spans() == spans
        drawn = torch.tensor([(s.row * 31 + s.start) % 1000 for s in sampled], dtype=torch.int64)
        self.table.store(prepared.rows_N, drawn)
        for step in batch.rows:
            self.rows[step.row]["computed"] += step.count
        for step, token in zip(sampled, drawn.tolist(), strict=True):
            self.rows[step.row]["tokens"].append(token)


TestRowTable = Machine.TestCase
TestRowTable.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_freed_row_is_not_run() -> None:
    table = RowTable(max_rows=2, max_length=8, block_size=4, device=torch.device("cpu"))
    new = NewRow(1, [1, 2], 2, [0], SamplingParams())
    table.update(ScheduledBatch(1, [], [new], [RowStep(1, 0, 2, [], False)], []))
    with pytest.raises(RuntimeError, match="row 1"):
        table.update(ScheduledBatch(2, [1], [], [RowStep(1, 1, 1, [], True)], []))


def test_prepared_rows_are_numbers_of_rows() -> None:
    table = RowTable(max_rows=3, max_length=8, block_size=4, device=torch.device("cpu"))
    rows = [NewRow(row, [5, 6], 2, [row], SamplingParams()) for row in (2, 0)]
    batch = ScheduledBatch(1, [], rows, [RowStep(2, 0, 2, [], True), RowStep(0, 0, 2, [], True)], [])
    table.update(batch)
    prepared = table.prepare(batch, CACHE, CACHE, deterministic=False)
    assert np.array_equal(prepared.rows_N, [2, 0])
