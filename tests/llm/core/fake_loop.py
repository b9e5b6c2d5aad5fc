"""An engine loop around a scheduler and the fake model, in slow motion."""

from __future__ import annotations

from collections import deque

from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.types import ScheduledBatch, TokenDelta

from .fake_runner import FakeRunner, request

SIZE = 4


class Loop:
    """Schedules and updates by hand; keeps what each request was told."""

    def __init__(self, num_blocks: int = 32, depth: int = 1, **settings: object) -> None:
        values = {"block_size": SIZE, "max_rows": 4, "max_tokens_per_step": 16, "max_length": 64} | settings
        self.scheduler = Scheduler(SchedulerConfig(**values), num_blocks, hash_key=b"test")  # type: ignore[arg-type]
        self.runner = FakeRunner(SIZE)
        self.depth = depth
        self.now = 0
        self.flights: deque[ScheduledBatch] = deque()
        self.deltas: dict[str, list[TokenDelta]] = {}

    def add(self, name: str, tokens: list[int], max_tokens: int | None = 4, **rest: object) -> TokenDelta | None:
        rest.setdefault("arrived_ns", self.now)
        return self.scheduler.add(request(name, tokens, max_tokens, **rest), self.now)  # type: ignore[arg-type]

    def schedule(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.flights.append(batch)
        self.keep(self.scheduler.take_finished())
        self.scheduler.check_integrity()
        return batch

    def update(self, bad: tuple[int, ...] = ()) -> list[TokenDelta]:
        batch = self.flights.popleft()
        self.now += 1000
        deltas = self.scheduler.update(batch, self.runner.run(batch, bad), self.now)
        self.keep(deltas)
        self.scheduler.check_integrity()
        return deltas

    def step(self) -> ScheduledBatch | None:
        batch = self.schedule()
        if len(self.flights) == self.depth or (batch is None and self.flights):
            self.update()
        return batch

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work():
                assert self.scheduler.pool.num_free == len(self.scheduler.pool.blocks)
                return
            self.step()
        raise AssertionError("no end")

    def keep(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.id, []).append(delta)

    def output(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.tokens]

    def last(self, name: str) -> TokenDelta:
        finished = [delta for delta in self.deltas[name] if delta.finish is not None]
        assert finished == self.deltas[name][-1:]
        return finished[0]


def rows(batch: ScheduledBatch | None) -> list[tuple[int, int, int, bool]]:
    assert batch is not None
    return [(step.row, step.start, step.count, step.sample) for step in batch.rows]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))
