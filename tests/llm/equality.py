"""One workload through Scheduler and RankGroup under any settings, and the rule by which two runs are equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from tests.tiny import VOCAB
from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.runner.ranks import RankGroup
from tritium.llm.types import (
    FinishReason,
    GenerateRequest,
    MemoryBudget,
    SamplingParams,
    ScheduledBatch,
    TokenDelta,
    TokenLogprob,
)

ROWS = 16
MAX_LENGTH = 256
MAX_TOKENS = 24
WHOLE = 4096
# Kernels that add float32 in another order move the log-probabilities of these models by 2e-6 at most.
TOLERANCE = 1e-4
LARGEST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Way:
    """Settings under which the workload runs.

    Attributes:
        num_blocks: that the scheduler may use; None for as many as there are.
        in_flight: steps that are scheduled before the first one's tokens are known.
        pushed: each sequence is preempted again and again, the first one too, whatever the room.
    """

    chunk: int = WHOLE
    prefix_cache: bool = False
    num_blocks: int | None = None
    in_flight: int = 1
    pushed: bool = False


@dataclass(slots=True)
class Output:
    """All that a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    preemptions: int = 0
    cached: int = 0

    def add(self, delta: TokenDelta) -> None:
        """Takes a delta in; nothing may follow the last one."""
        assert self.finish is None, f"{delta.id} goes on after its end"
        assert delta.error is None, delta.error
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.finish, self.preemptions, self.cached = delta.finish, delta.preemptions, delta.cached_tokens


class Pushing(Scheduler):
    """Preempts every sequence after each few tokens: the one that is first in the order never is otherwise."""

    EVERY = 5

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._lengths: dict[str, int] = {}

    def schedule(self, now_ns: int) -> ScheduledBatch | None:
        """The next step, after some have lost their places."""
        for seq in list(self._running):
            length = self._lengths.setdefault(seq.request.id, seq.num_prompt)
            if len(seq.tokens) >= length + self.EVERY and not seq.exhausted:
                self._lengths[seq.request.id] = len(seq.tokens)
                self._preempt(seq)
        return super().schedule(now_ns)


class Loop:
    """The engine's loop, with the number of steps in flight to choose, and stale blocks made poisonous."""

    def __init__(self, ranks: RankGroup, budget: MemoryBudget, way: Way) -> None:
        config = SchedulerConfig(
            block_size=budget.block_size,
            max_rows=ROWS,
            max_tokens_per_step=way.chunk,
            max_length=MAX_LENGTH,
            prefix_cache=way.prefix_cache,
        )
        make = Pushing if way.pushed else Scheduler
        self.scheduler = make(config, way.num_blocks or budget.num_blocks, hash_key=b"test")
        self._ranks = ranks
        self._in_flight = way.in_flight
        self._flights: deque[tuple[ScheduledBatch, RankGroup.Handle]] = deque()
        self._outputs: dict[str, Output] = {}
        self._now = 0
        self.most_in_flight = 0
        poison(ranks)

    def run(self, requests: Iterable[GenerateRequest]) -> dict[str, Output]:
        """Runs requests that arrive together to their ends."""
        self._outputs = {}
        for request in requests:
            self._outputs[request.id] = Output()
            assert self.scheduler.add(request, self._now) is None
        for _ in range(100_000):
            if not self.scheduler.has_work():
                assert self.scheduler.stats().blocks_used == 0
                self.scheduler.check_integrity()
                return self._outputs
            self._step()
        raise AssertionError("no end")

    def _step(self) -> None:
        self._now += 1
        while len(self._flights) < self._in_flight and (batch := self.scheduler.schedule(self._now)):
            self._flights.append((batch, self._ranks.submit(batch)))
        self.most_in_flight = max(self.most_in_flight, len(self._flights))
        if not self._flights:
            return  # all of them were preempted in mid-flight
        batch, handle = self._flights.popleft()
        for delta in self.scheduler.update(batch, handle.result(), self._now):
            self._outputs[delta.id].add(delta)


def poison(ranks: RankGroup) -> None:
    """Fills the cache with NaN: whoever reads a slot that no step has written gives no usable token."""
    runner = ranks._runner
    assert runner is not None
    for layer in (*runner.cache.keys, *runner.cache.values):
        layer.fill_(float("nan"))


def greedy(seed: int) -> SamplingParams:
    """The best token, and the two best ones to see how close it was; stops now and then."""
    stops = [40 + seed, 90 + seed, 200 + seed]
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, stop_token_ids=stops, min_tokens=4)


def sampled(seed: int) -> SamplingParams:
    """A seeded draw under every filter and penalty, each request with values of its own."""
    return SamplingParams(
        temperature=0.6 + 0.1 * (seed % 8),
        top_k=(0, 40, 7)[seed % 3],
        top_p=(1.0, 0.9, 0.7)[seed % 3],
        min_p=0.02 * (seed % 2),
        presence_penalty=0.3 * (seed % 4),
        frequency_penalty=0.2 * (seed % 5),
        repetition_penalty=1.0 + 0.1 * (seed % 3),
        logit_bias={17 + seed: 2.0},
        stop_token_ids=[60 + seed, 120 + seed],
        min_tokens=6,
        max_tokens=MAX_TOKENS,
        seed=1000 + seed,
        logprobs=seed % 4,
    )


def prompt(seed: int, length: int) -> list[int]:
    """Random ids, the same for a seed and of a longer prompt the same beginning."""
    return np.random.default_rng(seed).integers(3, VOCAB, 4 * MAX_LENGTH)[:length].tolist()


def workload() -> list[GenerateRequest]:
    """16 prompts, no two equal, some with a common beginning; half of them greedy."""
    lengths = (1, 3, 15, 16, 17, 31, 33, 48, 61, 70)
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    shared = prompt(99, 47)
    prompts += [[*shared[:common], *prompt(seed, more)] for seed, common, more in TAILS]
    assert len({tuple(p) for p in prompts}) == ROWS
    return [request(i, p) for i, p in enumerate(prompts)]


TAILS = ((20, 47, 4), (21, 47, 20), (22, 32, 1), (23, 31, 9), (24, 16, 30), (25, 33, 2))


def request(number: int, tokens: list[int]) -> GenerateRequest:
    """Even numbers are greedy, odd ones sampled."""
    params = sampled(number) if number % 2 else greedy(number)
    return GenerateRequest(id=f"r{number}", tokens=tokens, params=params, arrived_ns=0)


@dataclass(slots=True)
class Tally:
    """How often two runs were equal only by the rule of close decisions.

    Attributes:
        positions: tokens that were compared.
        ties: places where they parted while the reference's two best logits were nearly equal.
        draws: places where a sampled request parted (its draw fell on an edge); counted as ties are.
        furthest: largest difference of log-probabilities where the tokens agree.
    """

    positions: int = 0
    ties: int = 0
    draws: int = 0
    furthest: float = 0.0

    def compare(self, request: GenerateRequest, expected: Output, found: Output) -> int | None:
        """Compares two outputs up to where they part; where that is, None when they never do.

        Raises:
            AssertionError: they part where the reference was sure, or log-probabilities are too far apart.
        """
        pairs = zip(expected.tokens, found.tokens, expected.logprobs, found.logprobs, strict=False)
        for place, (token, other, own, its) in enumerate(pairs):
            self.positions += 1
            if token == other:
                self.furthest = max(self.furthest, abs(own.logprob - its.logprob))
                assert self.furthest < TOLERANCE, f"{request.id}[{place}]: {own} and {its}"
                continue
            if request.params.greedy:
                gap = own.top[0][1] - own.top[1][1]
                assert gap < TOLERANCE, f"{request.id}[{place}]: {token} and {other}, but the gap is {gap}"
                self.ties += 1
            else:
                self.draws += 1
            return place
        assert len(expected.tokens) == len(found.tokens), f"{request.id} ends early"
        assert expected.finish is found.finish
        return None

    def check(self) -> None:
        """Raises AssertionError when the rule was needed too often."""
        assert self.ties + self.draws <= LARGEST_SHARE * self.positions, self


def after(request: GenerateRequest, expected: Output, place: int) -> tuple[GenerateRequest, Output] | None:
    """The rest of a greedy request with the reference's tokens forced up to ``place``; None when nothing is left."""
    left = len(expected.tokens) - place - 1
    if not left or not request.params.greedy:
        return None
    params = structs.replace(request.params, max_tokens=left, min_tokens=max(0, request.params.min_tokens - place - 1))
    forced = GenerateRequest(
        id=request.id, tokens=[*request.tokens, *expected.tokens[: place + 1]], params=params, arrived_ns=0
    )
    rest = replace(expected, tokens=expected.tokens[place + 1 :], logprobs=expected.logprobs[place + 1 :])
    return forced, rest
