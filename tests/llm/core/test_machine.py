"""Scheduler and pool under random orders of events, against a model that cannot be fooled.

The fake cache is indexed by (block, offset) and each entry depends on all before it, so that a wrong
block, one reused too early or a wrong prefix hit changes tokens; what cannot show there (a block read
before its step has run) is checked as the batches are formed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.types import FinishReason, GenerateRequest, ScheduledBatch, TokenDelta

from .fake_runner import VOCAB, FakeRunner, alone, entry, request

FAST = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
HASHES = {
    "constant": lambda tokens: b"same",
    "weak": lambda tokens: bytes([sum(tokens) % 3]),
}


@dataclass
class Expected:
    request: GenerateRequest
    tokens: list[int]
    finish: FinishReason | None = None
    aborted: bool = False
    maybe_bad: bool = False


class Machine(RuleBasedStateMachine):
    hashes = "real"

    def __init__(self) -> None:
        super().__init__()
        self.flights: deque[tuple[ScheduledBatch, set[int]]] = deque()
        self.requests: dict[str, Expected] = {}
        self.held: dict[int, set[int]] = {}
        self.now = 0

    @initialize(
        depth=st.sampled_from([1, 2, 2, 3]),
        num_blocks=st.integers(4, 12),
        max_rows=st.integers(1, 4),
        spare=st.integers(0, 8),
        prefix_cache=st.sampled_from([True, True, True, False]),
        delay_us=st.sampled_from([0, 0, 3]),
        max_waiting=st.sampled_from([0, 0, 2]),
    )
    def start(
        self,
        depth: int,
        num_blocks: int,
        max_rows: int,
        spare: int,
        prefix_cache: bool,
        delay_us: int,
        max_waiting: int,
    ) -> None:
        self.depth = depth
        self.size = 2
        config = SchedulerConfig(
            block_size=self.size,
            max_rows=max_rows,
            max_tokens_per_step=max_rows + spare,
            max_length=24,
            prefix_cache=prefix_cache,
            queue_delay_us=delay_us,
            max_waiting=max_waiting,
            preferred_rows=(2,),
        )
        self.scheduler = Scheduler(config, num_blocks, hash_key=b"test")
        self.runner = FakeRunner(self.size)
        if self.hashes != "real":
            self.scheduler.pool.extend_hashes = self.extend_hashes

    def extend_hashes(self, hashes: list[bytes], tokens: list[int], root: bytes) -> None:
        for index in range(len(hashes), len(tokens) // self.size):
            hashes.append(HASHES[self.hashes](tokens[index * self.size : (index + 1) * self.size]))

    # Events

    @rule(
        start=st.sampled_from([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7, 7, 7, 7], [3, 4, 3, 4]]),
        cut=st.integers(0, 6),
        rest=st.lists(st.integers(0, 2), max_size=5),
        max_tokens=st.sampled_from([1, 2, 5, 9, 14, None]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        salt=st.sampled_from([0, 0, 0, 1]),
        stop=st.sampled_from([None, None, 0, 3]),
        min_tokens=st.integers(0, 3),
        deadline=st.sampled_from([None, None, None, 2000]),
        count=st.integers(1, 3),
    )
    def add(
        self,
        start: list[int],
        cut: int,
        rest: list[int],
        max_tokens: int | None,
        priority: int,
        salt: int,
        stop: int | None,
        min_tokens: int,
        deadline: int | None,
        count: int,
    ) -> None:
        for _ in range(count):
            made = request(
                f"r{len(self.requests)}",
                start[:cut] + rest,
                max_tokens,
                priority=priority,
                salt=str(salt),
                model=salt,
                arrived_ns=self.now,
                deadline_ns=None if deadline is None else self.now + deadline,
                stops=() if stop is None else (stop,),
                min_tokens=min(min_tokens, max_tokens or min_tokens),
            )
            self.requests[made.id] = Expected(made, [])
            refusal = self.scheduler.add(made, self.now)
            if refusal is not None:
                self.take([refusal])

    @precondition(lambda self: self.scheduler.has_work())
    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        names = [name for name, expected in self.requests.items() if expected.finish is None]
        if names:
            name = names[index % len(names)]
            self.requests[name].aborted = True
            assert self.scheduler.abort(name)
            assert not self.scheduler.abort(name)
            self.take(self.scheduler.take_finished())

    @precondition(lambda self: len(self.flights) < self.depth)
    @rule()
    def schedule(self) -> None:
        self.form()

    def form(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(self.now)
        self.take(self.scheduler.take_finished())
        if batch is None:
            waits = self.scheduler.ready_at(self.now) is not None
            assert self.flights or waits or not self.scheduler.has_work(), "nothing moves"
            return None
        self.check_batch(batch)
        return batch

    @precondition(lambda self: self.flights)
    @rule(fail=st.sampled_from([False] * 15 + [True]))
    def update(self, fail: bool) -> None:
        batch, _ = self.flights.popleft()
        sampled = [step.row for step in batch.rows if step.sample]
        bad = tuple(sampled[:1]) if fail else ()
        self.now += 100
        self.take(self.scheduler.update(batch, self.runner.run(batch, bad), self.now))

    @rule(ns=st.sampled_from([1, 1000, 4000]))
    def wait(self, ns: int) -> None:
        self.now += ns

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    # What must hold

    def check_batch(self, batch: ScheduledBatch) -> None:
        config = self.scheduler.config
        assert 0 < batch.num_tokens <= config.max_tokens_per_step
        new = {row.row for row in batch.new}
        decode = [step.sample and step.count == 1 for step in batch.rows if step.row not in new]
        assert decode == sorted(decode, reverse=True), "rows that decode come first"
        for row in batch.freed:
            del self.held[row]
        busy = set[int]().union(*(blocks for _, blocks in self.flights))
        for row in batch.new:
            assert row.row not in self.held
            self.held[row.row] = set(row.blocks)
            entries: list[int] = []
            for position in range(len(row.blocks) * self.size):
                entries.append(entry(position, row.tokens[position], entries, row.params.seed or 0))
                place = row.blocks[position // self.size], position % self.size
                assert self.runner.kv.get(place) == entries[-1], "a prefix hit on what is not there (yet)"
        for step in batch.rows:
            assert not busy.intersection(step.new_blocks), "a block given away while a step in flight uses it"
            self.held[step.row].update(step.new_blocks)
        self.flights.append((batch, set[int]().union(*(self.held[step.row] for step in batch.rows))))

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            expected = self.requests[delta.id]
            assert expected.finish is None, "an answer after the end"
            expected.tokens += delta.tokens
            expected.finish = delta.finish
            params, prompt = expected.request.params, expected.request.tokens
            if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
                capacity = len(self.scheduler.pool.blocks) * self.size + 1
                room = min(self.scheduler.config.max_length, capacity) - len(prompt)
                most = room if params.max_tokens is None else min(room, params.max_tokens)
                assert expected.tokens == self.alone(expected, most)
                assert 0 < delta.exec_share <= 1
            elif expected.tokens:
                assert expected.tokens == self.alone(expected, len(expected.tokens))
            assert (delta.finish is FinishReason.ABORT) == expected.aborted
            assert (delta.finish is FinishReason.ERROR) == (delta.error is not None)
            assert delta.cached_tokens < max(1, len(prompt))

    @staticmethod
    def alone(expected: Expected, count: int) -> list[int]:
        params = expected.request.params
        stops = tuple(params.stop_token_ids)
        return alone(expected.request.tokens, count, params.seed or 0, stops, params.min_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work():
                break
            if len(self.flights) < self.depth and self.form() is not None:
                continue
            if self.flights:
                self.update(False)
            else:
                self.now += 1000
            self.scheduler.check_integrity()
        assert not self.scheduler.has_work(), "no end in sight"
        self.take(self.scheduler.take_finished())
        assert all(expected.finish is not None for expected in self.requests.values())
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert self.scheduler.pool.num_free == len(self.scheduler.pool.blocks)
        self.scheduler.check_integrity()


class ConstantHashMachine(Machine):
    hashes = "constant"


class WeakHashMachine(Machine):
    hashes = "weak"


@pytest.mark.parametrize("machine", [Machine, ConstantHashMachine, WeakHashMachine])
def test_random_orders_of_events(machine: type[Machine]):
    assert VOCAB > 3, "stop tokens must occur, but not always"
    run_state_machine_as_test(machine, settings=FAST)
