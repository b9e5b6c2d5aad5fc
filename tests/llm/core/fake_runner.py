"""A runner whose model is arithmetic, and whose cache shows every mistake of the scheduler in the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from tritium.llm.types import GenerateRequest, NewRow, SamplingParams, ScheduledBatch, StepOutput, TokenLogprob

VOCAB = 7


def entry(position: int, token: int, before: list[int], model: int) -> int:
    """What the cache holds of one position: like keys and values, it depends on all before it."""
    return hash((position, token, model, *before))


def next_token(entries: list[int]) -> int:
    return hash(tuple(entries)) % VOCAB


def alone(prompt: list[int], count: int, model: int = 0, stops: tuple[int, ...] = (), min_tokens: int = 0) -> list[int]:
    """The output of the fake model without any scheduler."""
    entries: list[int] = []
    for position, token in enumerate(prompt):
        entries.append(entry(position, token, entries, model))
    output: list[int] = []
    while len(output) < count:
        output.append(next_token(entries))
        if output[-1] in stops and len(output) > min_tokens:
            break
        entries.append(entry(len(entries), output[-1], entries, model))
    return output


def request(
    name: str,
    tokens: list[int],
    max_tokens: int | None = 4,
    *,
    priority: int = 0,
    salt: str = "",
    arrived_ns: int = 0,
    deadline_ns: int | None = None,
    stops: tuple[int, ...] = (),
    min_tokens: int = 0,
    model: int = 0,
    logprobs: int | None = None,
) -> GenerateRequest:
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=list(stops), min_tokens=min_tokens, seed=model, logprobs=logprobs
    )
    return GenerateRequest(
        id=name,
        tokens=tokens,
        params=params,
        arrived_ns=arrived_ns,
        priority=priority,
        cache_salt=salt,
        queue_deadline_ns=deadline_ns,
    )


@dataclass
class Row:
    new: NewRow
    tokens: list[int]
    blocks: list[int]

    @property
    def model(self) -> int:
        # What requests of different salts see must differ: the seed stands for that.
        return self.new.params.seed or 0


@dataclass
class FakeRunner:
    """The device side: a cache by (block, offset), and one record per row, kept up by differences."""

    block_size: int
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)

    def read(self, row: Row, count: int) -> list[int]:
        return [self.kv[row.blocks[p // self.block_size], p % self.block_size] for p in range(count)]

    def run(self, batch: ScheduledBatch, bad: tuple[int, ...] = ()) -> StepOutput:
        for number in batch.freed:
            del self.rows[number]
        for new in batch.new:
            assert new.row not in self.rows, "row given away before it was freed"
            self.rows[new.row] = Row(new, list(new.tokens), list(new.blocks))
        assert len({step.row for step in batch.rows}) == len(batch.rows)
        # As on a device, every read of the step sees the step's own writes, in no order between the rows.
        output = StepOutput(batch.step, [], [], list(bad), 1000)
        for step in batch.rows:
            row = self.rows[step.row]
            row.blocks += step.new_blocks
            assert step.count > 0
            for position in range(step.start, step.start + step.count):
                before = self.read(row, position)
                place = row.blocks[position // self.block_size], position % self.block_size
                self.kv[place] = entry(position, row.tokens[position], before, row.model)
        for step in batch.rows:
            row = self.rows[step.row]
            end = step.start + step.count
            assert step.sample == (end == len(row.tokens)), "sampling from the wrong place"
            if step.sample:
                token = next_token(self.read(row, end))
                row.tokens.append(token)
                output.tokens.append([] if step.row in bad else [token])
                asked = row.new.params.logprobs is not None
                output.logprobs.append([TokenLogprob(token, -0.5, [])] if asked else None)
        return output
