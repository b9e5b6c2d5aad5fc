"""DynamicBatcher: requests of a stateless model, put together when an instance is free for them.

It binds late: nothing is decided about a request while it waits, so a request that comes late can still join the
next batch, and an instance that dies takes nothing with it but what runs inside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from functools import partial

from tritium.backends.base import Timing
from tritium.backends.config import DynamicBatching, ModelConfig
from tritium.errors import Code, TritiumError
from tritium.serving.batch import shape_rule
from tritium.serving.executor import Executor
from tritium.serving.lane import Lane
from tritium.serving.queue import Answer, BatchRule, Job, Order, Phase, Queue, timed_out
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse

# Batches that an instance gets at a time, where that decides nothing.
DEPTH = 8


def _alone(request: InferRequest) -> Hashable:
    return ()


class DynamicBatcher:
    """The scheduler of every model without sequences; without ``dynamic_batching`` each request is a batch.

    Args:
        executors: the instances.
        joined: whether the backend takes whole batches as tensors.

    Attributes:
        lanes: one for each instance, in order; their ``allowance`` may be set before ``start``.
    """

    def __init__(
        self, config: ModelConfig, executors: Sequence[Executor], stats: ModelStats, *, joined: bool = False
    ) -> None:
        self._order = Order()
        self._follow(config)
        self._name = config.name
        self._stats = stats
        self._timer: asyncio.TimerHandle | None = None
        self._kicking = self._again = self._stopped = False
        self.lanes = [Lane(executor, config, stats, self, joined=joined) for executor in executors]

    def _follow(self, config: ModelConfig) -> None:
        """Sets up queue and rules; the queue is empty."""
        batching = config.batching if isinstance(config.batching, DynamicBatching) else None
        self._batching = batching
        # Requests that are batches by themselves need not be compared.
        self._shape = _alone if batching is None else shape_rule(config)
        self._queue = Queue()
        self._rule = BatchRule(0)
        self._order.promised = batching is not None and batching.preserve_order
        if batching is not None:
            self._queue = Queue(batching.levels, batching.policy, dict(batching.level_policies))
            self._rule = BatchRule(config.max_batch_size, frozenset(batching.preferred), batching.delay_us * 1000)

    def reconfigure(self, config: ModelConfig) -> None:
        """Other batching and queues for the same model; requests that wait stay, under the new rules."""
        waiting = sorted(self._queue, key=lambda job: job.number)
        self._follow(config)
        self._set_depth()
        for job in waiting:
            job.shape = self._shape(job.request)
            self._queue.adopt(job, self._level(job.request))
            self._order.add(job)
        self.kick()

    def _level(self, request: InferRequest) -> int:
        return 0 if self._batching is None else self._batching.level_of(request.priority)

    @property
    def pending(self) -> int:
        """Requests that wait."""
        return len(self._queue) + sum(lane.ahead for lane in self.lanes)

    async def start(self) -> None:
        """Begins to run batches."""
        self._set_depth()
        for lane in self.lanes:
            lane.open()

    def _set_depth(self) -> None:
        """Requests wait in front of the instance where waiting decides nothing: no batch, no choice, no resources."""
        for lane in self.lanes:
            plain = self._batching is None and len(self.lanes) == 1 and not lane.limited
            lane.depth = DEPTH if plain else 1

    async def stop(self) -> None:
        """Ends every request with an UNAVAILABLE error; takes no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for job in list(self._queue):
            self._drop(job, TritiumError(Code.UNAVAILABLE, f"model '{self._name}' was unloaded"))
        await asyncio.gather(*(lane.close() for lane in self.lanes))

    def stream(self, request: InferRequest, timing: Timing, rows: int = 1) -> AsyncIterator[InferResponse]:
        """Answers one request; closing the iterator cancels it.

        Args:
            rows: inferences in it.

        Raises:
            TritiumError: UNAVAILABLE when the queue is full or the wait is over; whatever the model says.
        """
        job = self._add(request, timing, rows, None)
        return job.answers(self._leave)

    def submit(
        self, request: InferRequest, timing: Timing, rows: int, take: Callable[[Answer], None]
    ) -> Callable[[], None]:
        """``stream`` without an iterator: ``take`` is called with each answer, perhaps before this returns.

        Returns:
            What cancels it.

        Raises:
            TritiumError: as ``stream`` does; what comes later goes to ``take``.
        """
        return partial(self._add(request, timing, rows, take).forsake, self._leave)

    def _add(self, request: InferRequest, timing: Timing, rows: int, take: Callable[[Answer], None] | None) -> Job:
        if self._stopped:
            raise TritiumError(Code.UNAVAILABLE, f"model '{self._name}' is being unloaded")
        job = Job(request, timing, rows, self._shape(request), self._level(request), taker=take)
        now_ns = time.monotonic_ns()
        if self._batching is None and not len(self._queue):
            job.queued_ns = now_ns
            for lane in self.lanes:
                if lane.free:
                    self._stats.pending(1)
                    if lane.start((job,), (request,)):
                        return job
                    self._stats.pending(-1)
        self._queue.push(job, now_ns)
        self._stats.pending(1)
        self._order.add(job)
        self.kick()
        return job

    # -- for the lanes --------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Starts every batch that is due, and sets the timer for the next one that will be."""
        if not len(self._queue) and self._timer is None:
            return
        if self._kicking:
            self._again = True
            return
        self._kicking = True
        try:
            self._again = True
            while self._again and not self._stopped:
                self._again = False
                self._serve()
        finally:
            self._kicking = False

    def deliver(self, job: Job, answer: Answer) -> None:
        """Gives an answer to its request, in its turn where order is promised."""
        self._order.give(job, answer)

    def done(self, lane: Lane, job: Job) -> None:
        """A job has ended; one that is to run again goes to the front."""
        if job.phase is Phase.WAITING:
            self.crashed(lane, [job])

    def crashed(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """Jobs run again, before those that came later."""
        for job in reversed(jobs):
            # The rules may be others than those it came under.
            job.level, job.shape = self._level(job.request), self._shape(job.request)
            self._queue.put_back(job)
        self.kick()

    # -- inside ---------------------------------------------------------------------------------------------

    def _serve_alone(self) -> None:
        """``_serve`` where each request is a batch: nothing is compared, and nobody's wait runs out."""
        queue = self._queue
        for lane in self.lanes:
            while lane.free and len(queue):
                job = queue.pop()
                if not lane.start((job,), (job.request,)):
                    queue.put_back(job)
                    break

    def _serve(self) -> None:
        if self._batching is None:
            self._serve_alone()
            return
        now_ns = time.monotonic_ns()
        for job in self._queue.expire(now_ns):
            self._drop(job, timed_out())
        due_ns = 0
        for lane in self.lanes:
            while lane.free and len(self._queue):
                chosen, due_ns = self._rule.choose(self._queue, now_ns)
                if not chosen:
                    break
                # The lane ends jobs itself when their batch cannot be made.
                for job in chosen:
                    self._queue.remove(job)
                if not lane.start(chosen, [job.request for job in chosen]):
                    for job in reversed(chosen):
                        self._queue.put_back(job)
                    break
        self._set_timer(due_ns, now_ns)

    def _set_timer(self, due_ns: int, now_ns: int) -> None:
        expiry = self._queue.next_expiry()
        if not due_ns and expiry is None and self._timer is None:
            return
        wakes = [at for at in (due_ns, expiry) if at]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakes and not self._stopped:
            delay_s = max(0, min(wakes) - now_ns) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.kick)

    def _leave(self, job: Job) -> None:
        """Nobody waits for a job any more: forget it, or let its execution run out."""
        if job.phase is Phase.WAITING:
            self._drop(job, TritiumError(Code.CANCELLED, "request was cancelled"))
            self.kick()

    def _drop(self, job: Job, error: TritiumError) -> None:
        """Ends a job that waits. Its error does not wait for earlier answers: nothing came of it to be ordered."""
        self._queue.remove(job)
        self._stats.pending(-1)
        self._order.drop(job, error)
