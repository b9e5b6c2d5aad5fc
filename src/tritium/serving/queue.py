"""Queue: requests that wait for an execution, by level and in order; and the rule that makes a batch of them.

Plain data without a clock: every method that needs the time is given it, so the rules can be tested by themselves.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tritium.backends.base import Timing
from tritium.backends.config import QueuePolicy
from tritium.errors import Code, TritiumError
from tritium.types import InferRequest, InferResponse

Answer = InferResponse | TritiumError


class Phase(Enum):
    """Where a job is; it only moves on, except that a rescheduled job waits again."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"


@dataclass(slots=True, eq=False)
class Job:
    """One request in a batcher, from its arrival to its last answer.

    Attributes:
        rows: inferences in it: what it takes of a batch.
        shape: jobs with equal shapes may share a batch.
        level: of priority; 0 without levels.
        number: of arrival.
        queued_ns: when it began to wait.
        expires_ns: when its wait is over; 0 for never.
        gone: nobody waits for its answers any more.
        reruns: times that it was run again because its instance died.
        abort: tells the execution that the job is gone; None while it waits.
        taker: called with every answer at once; without one, ``answers`` hands them out.
    """

    request: InferRequest
    timing: Timing
    rows: int = 1
    shape: Hashable = ()
    level: int = 0
    number: int = 0
    queued_ns: int = 0
    expires_ns: int = 0
    phase: Phase = Phase.WAITING
    gone: bool = False
    reruns: int = 0
    abort: Callable[[], None] | None = None
    taker: Callable[[Answer], None] | None = None
    _answers: deque[Answer] | None = None
    _arrival: asyncio.Future[None] | None = None

    async def answers(self, leave: Callable[[Job], None]) -> AsyncGenerator[InferResponse]:
        """The answers up to the final one.

        Args:
            leave: called when nobody wants them any more before that.

        Raises:
            TritiumError: that ended the job instead of a final answer.
        """
        try:
            while True:
                answer = await self.take()
                yield answer
                if answer.final:
                    return
        finally:
            self.forsake(leave)

    def forsake(self, leave: Callable[[Job], None]) -> None:
        """Nobody wants its answers any more; ``leave`` is told unless it has ended."""
        if self.phase is not Phase.ENDED:
            self.gone = True
            if self.abort is not None:
                self.abort()
            leave(self)

    def give(self, answer: Answer) -> None:
        """One answer, or the error that ends the job; after the last one nothing is taken."""
        if self.phase is Phase.ENDED:
            return
        if isinstance(answer, TritiumError) or answer.final:
            self.phase = Phase.ENDED
        if self.gone:
            return
        if self.taker is not None:
            self.taker(answer)
            return
        if self._answers is None:
            self._answers = deque()
        self._answers.append(answer)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> InferResponse:
        """The next answer.

        Raises:
            TritiumError: that ended the job instead of a final answer.
        """
        while not self._answers:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        answer = self._answers.popleft()
        if isinstance(answer, TritiumError):
            raise answer
        return answer


class Queue:
    """Jobs that wait, by priority level; within a level in order of arrival, those that are late behind the others.

    Args:
        levels: number of levels, from 1; 0 for a single one that is called 0.
        policies: of the levels that have one of their own.
        policy: of all others.
    """

    def __init__(
        self, levels: int = 0, policy: QueuePolicy | None = None, policies: dict[int, QueuePolicy] | None = None
    ) -> None:
        self._policy = policy or QueuePolicy()
        self._policies = policies or {}
        numbers = range(1, levels + 1) if levels else range(1)
        self._levels = {level: _Level() for level in numbers}
        self._expiries: list[tuple[int, int, Job]] = []
        self._arrivals = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Job]:
        """The waiting jobs in the order in which they are served."""
        for level in self._levels.values():
            yield from level.on_time
            yield from level.late

    def policy(self, level: int) -> QueuePolicy:
        """What holds for a level."""
        return self._policies.get(level, self._policy)

    def push(self, job: Job, now_ns: int) -> None:
        """Takes a job in.

        Raises:
            TritiumError: UNAVAILABLE when as many as are allowed wait at its level.
        """
        policy, level = self.policy(job.level), self._levels[job.level]
        if policy.max_size and len(level) >= policy.max_size:
            raise TritiumError(
                Code.UNAVAILABLE, f"[request id: {job.request.id or '<id_unknown>'}] Exceeds maximum queue size"
            )
        self._arrivals += 1
        job.number, job.queued_ns = self._arrivals, now_ns
        wait_us = policy.wait_us(job.request.timeout_us)
        if wait_us:
            job.expires_ns = now_ns + wait_us * 1000
            heapq.heappush(self._expiries, (job.expires_ns, job.number, job))
        level.on_time.append(job)
        self._size += 1

    def adopt(self, job: Job, level: int) -> None:
        """Takes over a job that waits in another queue, under the policy of ``level``; it keeps its time and place.

        It was let in there, so it is let in here, also beyond the most that may wait.
        """
        job.level = level
        wait_us = self.policy(level).wait_us(job.request.timeout_us)
        job.expires_ns = job.queued_ns + wait_us * 1000 if wait_us else 0
        if job.expires_ns:
            heapq.heappush(self._expiries, (job.expires_ns, job.number, job))
        self._arrivals = max(self._arrivals, job.number)
        self._levels[level].on_time.append(job)
        self._size += 1

    def put_back(self, job: Job) -> None:
        """Takes a job in again that did not get its execution; it is the next of its level."""
        job.phase = Phase.WAITING
        if job.expires_ns and job.timing.queue_ns and all(one is not job for _, _, one in self._expiries):
            # It has run, and what was to end its wait is gone.
            heapq.heappush(self._expiries, (job.expires_ns, job.number, job))
        self._levels[job.level].on_time.appendleft(job)
        self._size += 1

    def pop(self) -> Job:
        """Takes the first job out; there must be one."""
        for level in self._levels.values():
            for jobs in (level.on_time, level.late):
                if jobs:
                    self._size -= 1
                    return jobs.popleft()
        raise IndexError("the queue is empty")

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it stands; one that is not in it is no error."""
        level = self._levels[job.level]
        for jobs in (level.on_time, level.late):
            # The first one is what is asked for as a rule: a batch is made from the front.
            if jobs and jobs[0] is job:
                jobs.popleft()
                self._size -= 1
                return
        for jobs in (level.on_time, level.late):
            if job in jobs:
                jobs.remove(job)
                self._size -= 1
                return

    def expire(self, now_ns: int) -> list[Job]:
        """Jobs whose wait is over and that end with an error; they are taken out. Others are moved back as late."""
        rejected: list[Job] = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, job = heapq.heappop(self._expiries)
            if job.phase is not Phase.WAITING or job.gone:
                continue
            level = self._levels[job.level]
            if job not in level.on_time:
                continue
            if self.policy(job.level).delay:
                level.on_time.remove(job)
                level.late.append(job)
            else:
                self.remove(job)
                rejected.append(job)
        return rejected

    def next_expiry(self) -> int | None:
        """When ``expire`` has something to do; None for never."""
        while self._expiries and (self._expiries[0][2].phase is not Phase.WAITING or self._expiries[0][2].gone):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None


class Order:
    """Holds answers back until those to all earlier requests have left, where that was promised to them.

    Attributes:
        promised: whether it is promised to requests that come from now on; it still holds for those before.
    """

    def __init__(self, promised: bool = False) -> None:
        self.promised = promised
        self._line: deque[Job] = deque()
        self._held: dict[Job, deque[Answer]] = {}
        self._complete: set[Job] = set()

    def add(self, job: Job) -> None:
        """The next request."""
        if not self.promised or job in self._held:
            return
        self._line.append(job)
        self._held[job] = deque()

    def give(self, job: Job, answer: Answer) -> None:
        """An answer has come; it leaves in its turn."""
        if job not in self._held:
            job.give(answer)
            return
        if job in self._complete:
            return
        self._held[job].append(answer)
        if isinstance(answer, TritiumError) or answer.final:
            self._complete.add(job)
        self._flush()

    def drop(self, job: Job, error: TritiumError) -> None:
        """Ends a request that had no execution; it neither waits for earlier ones nor holds later ones up."""
        job.give(error)
        if job in self._held:
            self._held[job].clear()
            self._complete.add(job)
            self._flush()

    def _flush(self) -> None:
        while self._line:
            job = self._line[0]
            held = self._held[job]
            while held:
                job.give(held.popleft())
            if job not in self._complete:
                return
            self._line.popleft()
            del self._held[job]
            self._complete.discard(job)


@dataclass(slots=True)
class _Level:
    on_time: deque[Job] = field(default_factory=deque[Job])
    late: deque[Job] = field(default_factory=deque[Job])

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)


def timed_out() -> TritiumError:
    """What a request ends with whose wait is over."""
    return TritiumError(Code.UNAVAILABLE, "Request timeout expired")


@dataclass(frozen=True, slots=True)
class BatchRule:
    """When waiting jobs make a batch, and how many of them.

    Attributes:
        max_rows: most inferences in a batch.
        preferred: sizes that are taken as soon as they can be had.
        delay_ns: longest wait of the first job for more.
    """

    max_rows: int
    preferred: frozenset[int] = frozenset()
    delay_ns: int = 0

    def choose(self, jobs: Iterable[Job], now_ns: int) -> tuple[list[Job], int]:
        """The jobs of the next batch: a run of equal shapes from the front, never out of order.

        Returns:
            The jobs, or none and the time at which to ask again (0: when there is another job).
        """
        chosen: list[Job] = []
        rows = best = 0
        full = False
        oldest_ns = now_ns
        for job in jobs:
            if chosen and (job.shape != chosen[0].shape or rows + job.rows > self.max_rows):
                full = True
                break
            chosen.append(job)
            rows += job.rows
            oldest_ns = min(oldest_ns, job.queued_ns)
            if rows in self.preferred:
                best = len(chosen)
            if rows >= self.max_rows:
                full = True
                break
        if best:
            return chosen[:best], 0
        if not chosen:
            return [], 0
        due_ns = oldest_ns + self.delay_ns
        if full or rows >= max(self.preferred, default=0) > 0 or due_ns <= now_ns:
            return chosen, 0
        return [], due_ns
