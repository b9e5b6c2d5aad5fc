"""SequenceBatcher: requests of a stateful model; those of one sequence go to one instance, in order, one at a time.

A sequence that begins takes a slot of an instance and keeps it until its last request, or until it has been idle for
too long. *Direct*: the slot is a place in the batch of the instance. *Oldest*: the oldest requests of all slots of
the instance make the batch. Sequences for which there is no slot wait, in order, with all their requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tritium.backends.base import Timing
from tritium.backends.config import Direct, ModelConfig, Oldest, SequenceBatching
from tritium.errors import LOST, Code, TritiumError, invalid
from tritium.serving.batch import shape_rule
from tritium.serving.executor import Executor
from tritium.serving.lane import Lane
from tritium.serving.queue import Answer, BatchRule, Job, Order, Phase
from tritium.serving.slots import Lost, Run, Slot, check_sequence
from tritium.serving.state import Teller
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse, RequestedOutput, SequenceRef


class SequenceBatcher:
    """The scheduler of a model with ``sequence_batching``.

    Args:
        executors: the instances.
        folder: of the model, for the files of initial states.
        joined: whether the backend takes whole batches as tensors.

    Attributes:
        lanes: one for each instance; their ``allowance`` may be set before ``start``.

    Raises:
        TritiumError: INVALID_ARGUMENT for an initial state that cannot be read.
    """

    def __init__(
        self,
        config: ModelConfig,
        batching: SequenceBatching,
        executors: Sequence[Executor],
        stats: ModelStats,
        *,
        folder: Path | None = None,
        joined: bool = False,
    ) -> None:
        self._config = config
        self._stats = stats
        self._joined = joined
        self._teller = Teller(config, batching, folder)
        self._shape = shape_rule(config)
        most = max(1, config.max_batch_size)
        self._order = Order()
        self._follow(batching)
        strategy = batching.strategy
        places = strategy.candidates if isinstance(strategy, Oldest) else most
        self.lanes = [Lane(executor, config, stats, self, joined=joined) for executor in executors]
        # Filled crosswise, so that sequences spread over the instances.
        self._slots = [Slot(lane, index) for index in range(places) for lane in self.lanes]
        self._by_lane = {lane: [slot for slot in self._slots if slot.lane is lane] for lane in self.lanes}
        self._runs: dict[int | str, Run] = {}
        self._backlog: deque[Run] = deque()
        self._jobs: dict[Job, Run] = {}
        self._lost = Lost()
        self._numbers = 0
        self._own_ids = 0
        self._kicking = self._again = self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._reaper: asyncio.TimerHandle | None = None

    def _follow(self, batching: SequenceBatching) -> None:
        """Sets up the rules."""
        self._batching = batching
        most, strategy = max(1, self._config.max_batch_size), batching.strategy
        self._rule = BatchRule(most)
        if isinstance(strategy, Oldest):
            self._rule = BatchRule(most, frozenset(strategy.preferred), strategy.delay_us * 1000)
        self._order.promised = isinstance(strategy, Oldest) and strategy.preserve_order

    def reconfigure(self, batching: SequenceBatching) -> None:
        """Other delays, sizes and promises for the same sequences; strategy, slots, controls and states stay."""
        self._follow(batching)
        self.kick()

    @property
    def pending(self) -> int:
        """Requests that wait."""
        return sum(job.phase is Phase.WAITING for job in self._jobs)

    @property
    def active(self) -> int:
        """Sequences that have a slot or wait for one."""
        return sum(slot.run is not None for slot in self._slots) + len(self._backlog)

    async def start(self) -> None:
        """Begins to run batches."""
        for lane in self.lanes:
            lane.open()

    async def stop(self) -> None:
        """Ends every request with an UNAVAILABLE error; takes no more."""
        self._stopped = True
        for timer in filter(None, (self._timer, self._reaper)):
            timer.cancel()
        error = TritiumError(Code.UNAVAILABLE, f"model '{self._config.name}' was unloaded")
        for job in [job for job in self._jobs if job.phase is Phase.WAITING]:
            self._drop(job, error)
        await asyncio.gather(*(lane.close() for lane in self.lanes))

    def stream(self, request: InferRequest, timing: Timing, rows: int = 1) -> AsyncIterator[InferResponse]:
        """Answers one request of a sequence; closing the iterator cancels it.

        Raises:
            TritiumError: INVALID_ARGUMENT when it has no sequence, does not begin one that is not there, or has
                more than one row; UNAVAILABLE when the sequence waited too long for a slot or was lost; whatever
                the model says.
        """
        if self._stopped:
            raise TritiumError(Code.UNAVAILABLE, f"model '{self._config.name}' is being unloaded")
        request = dataclasses.replace(request, sequence=self._sequence(request, rows))
        assert request.sequence is not None
        run = self._run_of(request.sequence)
        self._numbers += 1
        now_ns = time.monotonic_ns()
        job = Job(request, timing, 1, self._shape(request), number=self._numbers, queued_ns=now_ns)
        run.used_ns = now_ns
        run.jobs.append(job)
        self._jobs[job] = run
        self._order.add(job)
        self._stats.pending(1)
        if request.sequence.end:
            # From here on the id stands for a sequence that is still to begin.
            run.ended = True
            self._runs.pop(run.id, None)
        self._set_reaper()
        self.kick()
        return job.answers(self._leave)

    # -- for the lanes --------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Gives slots to sequences that wait and starts every batch that is due."""
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
        """Gives an answer to its request, without the state, which stays with the sequence."""
        run = self._jobs.get(job)
        if run is not None and isinstance(answer, InferResponse):
            self._teller.take(answer, run.states)
        self._order.give(job, answer)

    def done(self, lane: Lane, job: Job) -> None:
        """A job has ended, or its model wants to see it again."""
        run = self._jobs[job]
        run.running = None
        run.used_ns = time.monotonic_ns()
        if job.phase is Phase.WAITING:
            assert job.request.sequence is not None
            job.request.sequence = dataclasses.replace(job.request.sequence, start=False)
            if job.gone:
                self._drop(job, TritiumError(Code.CANCELLED, "request was cancelled"))
            else:
                run.jobs.appendleft(job)
        else:
            # With a promised order its last answer may still be held back; the sequence need not wait for that.
            del self._jobs[job]
        self._close_if_over(run)
        self.kick()

    def crashed(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """Jobs that shall run again, if what their model knew of the sequence is not lost with it."""
        for job in jobs:
            run = self._jobs[job]
            run.running = None
            run.jobs.appendleft(job)
        self.kick()

    # -- sequences ------------------------------------------------------------------------------------------

    def _sequence(self, request: InferRequest, rows: int) -> SequenceRef:
        check_sequence(self._config.name, request, rows, optional=self._batching.iterative)
        if request.sequence is not None and request.sequence.id:
            return request.sequence
        self._own_ids += 1
        return SequenceRef(self._own_ids, start=True, end=True)

    def _run_of(self, sequence: SequenceRef) -> Run:
        """The sequence that a request belongs to, begun if it says so."""
        run = self._runs.get(sequence.id)
        if sequence.start:
            self._lost.discard(sequence.id)
            if run is None:
                run = Run(sequence.id, time.monotonic_ns())
                self._runs[run.id] = run
                self._backlog.append(run)
            return run
        if run is None:
            name = self._config.name
            if sequence.id in self._lost:
                raise TritiumError(
                    Code.UNAVAILABLE,
                    f"sequence {sequence.id} of model '{name}' was lost with its instance, start it anew",
                    param="sequence_id",
                )
            raise invalid(
                f"inference request for sequence {sequence.id} to model '{name}' must specify the START flag on the "
                "first request of the sequence",
                param="sequence_start",
            )
        return run

    def _close_if_over(self, run: Run) -> None:
        if run.ended and not run.jobs and run.running is None:
            self._close(run)

    def _close(self, run: Run) -> None:
        """The sequence is over: its slot is free for the next one."""
        if run.slot is not None:
            run.slot.run, run.slot = None, None
        elif run in self._backlog:
            self._backlog.remove(run)
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    def _lose(self, run: Run) -> None:
        """The instance died with what its model knew of a sequence: what follows cannot be answered rightly."""
        if not run.ended:
            self._lost.add(run.id)
        run.ended = True
        why = f"sequence {run.id} of model '{self._config.name}' was lost with its instance"
        error = TritiumError(Code.UNAVAILABLE, why, reason=LOST)
        for job in list(run.jobs):
            self._drop(job, error)
        self._close(run)

    # -- batches --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._fill_slots()
        now_ns = time.monotonic_ns()
        due_ns = 0
        for lane in self.lanes:
            if not lane.free:
                continue
            jobs, due = self._choose(lane, now_ns)
            due_ns = min(x for x in (due_ns, due) if x) if due_ns or due else 0
            if jobs:
                self._start(lane, jobs)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns:
            self._timer = asyncio.get_running_loop().call_later(max(0, due_ns - now_ns) / 1e9, self.kick)

    def _fill_slots(self) -> None:
        while self._backlog:
            slot = next((slot for slot in self._slots if slot.run is None and slot.lane.executor.ready), None)
            if slot is None:
                return
            run = self._backlog.popleft()
            slot.run, run.slot = run, slot

    def _choose(self, lane: Lane, now_ns: int) -> tuple[list[Job], int]:
        ready = [slot.job for slot in self._by_lane[lane]]
        jobs = sorted((job for job in ready if job is not None), key=lambda job: job.number)
        if not jobs:
            return [], 0
        strategy = self._batching.strategy
        if isinstance(strategy, Direct):
            jobs = [job for job in jobs if job.shape == jobs[0].shape]
            wanted = strategy.min_utilization * len(self._by_lane[lane])
            due_ns = jobs[0].queued_ns + strategy.delay_us * 1000
            return (jobs, 0) if len(jobs) >= wanted or due_ns <= now_ns else ([], due_ns)
        return self._rule.choose(jobs, now_ns)

    def _start(self, lane: Lane, jobs: list[Job]) -> None:
        told: list[Job] = []
        requests: list[InferRequest] = []
        for job in jobs:
            if job not in self._jobs:
                continue
            run = self._jobs[job]
            if self._is_lost(run, job, lane):
                self._lose(run)
                continue
            try:
                requests.append(self._told(self._jobs[job], job))
                told.append(job)
            except TritiumError as error:
                self._drop(job, error)
        if not told:
            self._again = True
            return
        places, requests = self._placed(lane, told, requests)
        for job in told:
            run = self._jobs[job]
            run.jobs.popleft()
            run.running = job
        if not lane.start(places, requests):
            for job in told:
                run = self._jobs[job]
                run.jobs.appendleft(job)
                run.running = None

    def _is_lost(self, run: Run, job: Job, lane: Lane) -> bool:
        """Whether the model that knew the sequence died; state that the server keeps survives that."""
        life = lane.executor.life
        if job.request.sequence is not None and job.request.sequence.start:
            run.life = life
        return run.life != life and not self._batching.states

    def _told(self, run: Run, job: Job) -> InferRequest:
        """The request as the model shall see it."""
        request = job.request
        sequence = request.sequence
        assert sequence is not None
        if sequence.start:
            run.states = self._teller.initial()
        inputs = {**request.inputs, **self._teller.inputs(sequence, run.states)}
        outputs = request.outputs
        if outputs and self._batching.states:
            outputs = [*outputs, *(RequestedOutput(state.output) for state in self._batching.states)]
        return dataclasses.replace(request, inputs=inputs, outputs=outputs)

    def _placed(
        self, lane: Lane, jobs: list[Job], requests: list[InferRequest]
    ) -> tuple[list[Job | None], list[InferRequest]]:
        """With *direct*, each request at the place of its slot, and fillers between them that are not ready."""
        if not isinstance(self._batching.strategy, Direct) or not (self._joined or self._teller.has_ready):
            return list(jobs), requests
        slots = [self._jobs[job].slot for job in jobs]
        taken = {slot.index: at for at, slot in enumerate(slots) if slot is not None}
        order = [taken.get(index) for index in range(max(taken) + 1)]
        filler = self._teller.filler
        return (
            [None if at is None else jobs[at] for at in order],
            [filler(jobs[0].request) if at is None else requests[at] for at in order],
        )

    # -- ends -----------------------------------------------------------------------------------------------

    def _leave(self, job: Job) -> None:
        """Nobody waits for a job any more. One that waits is forgotten; its sequence goes on without it."""
        if job.phase is not Phase.WAITING or job not in self._jobs:
            return
        run, sequence = self._jobs[job], job.request.sequence
        self._drop(job, TritiumError(Code.CANCELLED, "request was cancelled"))
        if sequence is not None and sequence.start and run.life < 0:
            # Its model never learns that it begins.
            self._lose(run)
        self.kick()

    def _drop(self, job: Job, error: TritiumError) -> None:
        run = self._jobs.pop(job)
        if job in run.jobs:
            run.jobs.remove(job)
        self._stats.pending(-1)
        self._order.drop(job, error)
        self._close_if_over(run)

    def _set_reaper(self) -> None:
        if self._reaper is None and not self._stopped and (self._runs or self._backlog):
            delay_s = max(0.001, self._batching.idle_us / 1e6 / 4)
            self._reaper = asyncio.get_running_loop().call_later(delay_s, self._reap)

    def _reap(self) -> None:
        """Ends sequences that have been idle for too long, and those that waited for a slot for that long."""
        self._reaper = None
        before_ns = time.monotonic_ns() - self._batching.idle_us * 1000
        late = TritiumError(Code.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
        for run in [run for run in self._backlog if run.used_ns <= before_ns]:
            run.ended = True
            for job in list(run.jobs):
                self._drop(job, late)
            self._close(run)
        for run in [slot.run for slot in self._slots if slot.run is not None]:
            if run.used_ns <= before_ns and not run.jobs and run.running is None:
                self._close(run)
        self._set_reaper()
        self.kick()
