"""Lane: one instance as a batcher sees it, free or not, and the run of one batch on it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving import batch
from tritium.serving.execution import Reply, Times
from tritium.serving.executor import Executor, Owner, Running
from tritium.serving.limiter import Allowance
from tritium.serving.queue import Job, Phase
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse

# A model's parameter: requests inside an instance that dies run once more.
RERUN = "retry_on_crash"

_log = logs.get(__name__)


class Lane:
    """One instance.

    Args:
        config: of the model, completed.
        joined: the backend takes one request with the tensors of the whole batch, instead of a list.
        stats: where executions are counted.

    Attributes:
        free: whether a batch may be started.
        depth: batches that the instance may have at a time. It runs one; the others wait in front of it, so that it
            need not wait for us. What has not begun is not lost with the instance.
        allowance: of the rate limiter; set by ``Lane``'s maker before ``open``, see ``exchange``.
    """

    def __init__(
        self, executor: Executor, config: ModelConfig, stats: ModelStats, owner: Owner, *, joined: bool = False
    ) -> None:
        self.executor = executor
        self.free = False
        self.depth = 1
        self.allowance: Allowance | None = None
        self._config = config
        self._stats = stats
        self._owner = owner
        self._joined = joined
        self._rerun = config.parameters.get(RERUN, "").lower() in ("1", "true", "yes")
        self._plain_inputs = not config.batch_inputs and all(spec.reshape is None for spec in config.inputs)
        self._plain_outputs = all(spec.reshape is None for spec in config.outputs)
        self._simple = self._plain_outputs and not joined and not self._rerun
        self._held: Allowance | None = None
        self._closed = False
        # Batches that have not returned from the model, in order; and all that still owe an answer.
        self._inside: deque[_Batch] = deque()
        self._batches: set[_Batch] = set()

    @property
    def limited(self) -> bool:
        """Whether an execution takes resources of the rate limiter."""
        return self.allowance is not None and bool(self.allowance.needs)

    @property
    def ahead(self) -> int:
        """Batches that wait in front of the instance, and that somebody still wants."""
        return sum(not run.begun and run.wanted for run in self._inside)

    def open(self) -> None:
        """Offers the lane as soon as its instance is free."""
        self.executor.on_free = self._freed
        if self.executor.idle:
            # Not at once: the owner may be starting batches just now.
            asyncio.get_running_loop().call_soon(self._freed)

    async def close(self) -> None:
        """Ends what runs on it; jobs inside get an UNAVAILABLE error."""
        self._closed, self.free = True, False
        for run in self._inside:
            self._begin(run)
        for run in list(self._batches):
            self._bury(run, TritiumError(Code.UNAVAILABLE, f"model '{self._config.name}' was unloaded"), started=True)
        self._release()
        if self.allowance is not None:
            self.allowance.close()

    def exchange(self, allowance: Allowance) -> None:
        """Other needs from now on; what runs holds what it has taken until its end."""
        before, self.allowance = self.allowance, allowance
        if before is not None and before is not self._held:
            before.close()

    def start(self, jobs: Sequence[Job | None], requests: Sequence[InferRequest]) -> bool:
        """Starts a batch at once; False when it cannot be started now and the jobs keep waiting.

        Args:
            jobs: one for each request; None where a request only fills a place.
            requests: as the model shall see them.
        """
        if self.allowance is not None and self.allowance.needs:
            if not self.allowance.acquire():
                return False
            self._held = self.allowance
        self.free = False
        inside = self._inside
        rows = [1 if job is None else job.rows for job in jobs]
        try:
            prepared = self._prepare(requests, rows)
            joined = [batch.join(self._config, prepared, rows)] if self._joined else prepared
            running = self.executor.execute(joined, ahead=bool(inside))
        except Exception as error:
            self._release()
            self.open()
            if isinstance(error, TritiumError) and error.code is Code.UNAVAILABLE:
                return False
            cause = _unexpected(self._config.name, error)
            self._stats.pending(-sum(job is not None for job in jobs))
            for job in jobs:
                if job is not None:
                    self._end(job, cause)
            return True
        run = _Batch(self, running, jobs, rows, prepared, self._joined, self._config)
        self._batches.add(run)
        inside.append(run)
        if len(inside) == 1:
            self._begin(run)
        self.free = len(inside) < self.depth
        running.listen(run)
        return True

    def _prepare(self, requests: Sequence[InferRequest], rows: list[int]) -> Sequence[InferRequest]:
        """The requests as the backend sees them."""
        if self._plain_inputs:
            return requests
        return [batch.reshape_inputs(self._config, one) for one in batch.add_inputs(self._config, requests, rows)]

    def _begin(self, run: _Batch) -> None:
        """The model sees the batch from now on."""
        run.begun = run.begin()
        self._stats.waiting -= run.begun

    def _freed(self) -> None:
        """The instance has become ready, or a batch has returned from its model."""
        inside = self._inside
        while inside and inside[0].running.returned:
            inside.popleft()
        if self._closed:
            return
        if inside:
            self._begin(inside[0])
        else:
            self._release()
        if len(inside) < self.depth:
            self.free = True
            self._owner.kick()

    def replied(self, run: _Batch, replies: list[Reply]) -> None:
        """Replies to a batch have come."""
        if not run.counted:
            self._count(run)
        if self._simple and len(replies) == 1 and len(run.jobs) == 1 and self._reply_simply(run, replies[0]):
            return
        for reply in replies:
            self._reply(run, reply)

    def _reply_simply(self, run: _Batch, reply: Reply) -> bool:
        """``_reply`` for the usual: the one final answer to the one request of a batch; False when it is not that."""
        answer, job = reply.response, run.jobs[0]
        if answer is None or answer.error is not None or not answer.final or job is None or job not in run.open:
            return False
        run.open.clear()
        job.abort = None
        self._owner.deliver(job, answer)
        self._owner.done(self, job)
        return True

    def ended(self, run: _Batch, error: TritiumError | None, started: bool) -> None:
        """Nothing more comes of a batch."""
        if error is None and run.counted and not run.open:
            self._batches.discard(run)
            return
        if started:
            self._count(run, last=True)
        if error is not None and run in self._inside:
            self._inside.remove(run)
            self.free = False
        self._bury(run, error, started=started)

    def _bury(self, run: _Batch, died: TritiumError | None, *, started: bool) -> None:
        """Ends the jobs that the execution left open; those that it had not begun run again."""
        self._batches.discard(run)
        if not run.open:
            return
        left = [job for job in run.jobs if job in run.open]
        run.open.clear()
        if died is None:
            died = TritiumError(Code.INTERNAL, f"model '{self._config.name}' ended without a final answer")
        elif not self._closed and (self._rerun or not started):
            again = [job for job in left if not job.gone and not (started and (job.reruns or run.answered(job)))]
            for job in again:
                if started:
                    job.reruns = 1
                    self._stats.pending(1)
                job.phase, job.abort = Phase.WAITING, None
            left = [job for job in left if job not in again]
            if again:
                self._owner.crashed(self, again)
        for job in left:
            self._end(job, died)

    def _reply(self, run: _Batch, reply: Reply) -> None:
        if reply.rescheduled or reply.response is None:
            self._wait_again(run, reply.index)
            return
        try:
            answers = run.split(reply.index, reply.response)
        except TritiumError as error:
            for job in run.jobs_of(reply.index):
                if job in run.open:
                    run.open.discard(job)
                    self._end(job, error)
            return
        for job, answer in answers:
            if job not in run.open:
                continue
            if reply.failed and answer.error is not None and answer.final:
                run.open.discard(job)
                self._end(job, answer.error)
                continue
            if not self._plain_outputs:
                batch.reshape_outputs(self._config, answer)
            if self._rerun:
                run.seen.add(job)
            if answer.final:
                run.open.discard(job)
                job.abort = None
            self._owner.deliver(job, answer)
            if answer.final:
                self._owner.done(self, job)

    def _wait_again(self, run: _Batch, index: int) -> None:
        for job in run.jobs_of(index):
            if job in run.open:
                # Before anything else: the next run of the job may begin at once.
                run.open.discard(job)
                job.phase, job.abort = Phase.WAITING, None
                self._stats.pending(1)
                self._owner.done(self, job)

    def _end(self, job: Job, error: TritiumError) -> None:
        job.abort = None
        self._owner.deliver(job, error)
        self._owner.done(self, job)

    def _count(self, run: _Batch, *, last: bool = False) -> None:
        """Counts the execution once, as soon as its times are known."""
        times = run.running.times
        if run.counted or not run.begun or (times is None and not last):
            return
        run.counted = True
        times = times or Times()
        self._stats.executed(
            sum(job.rows for job in run.jobs if job is not None),
            input_ns=times.input_ns,
            infer_ns=times.infer_ns,
            output_ns=times.output_ns,
        )
        for job in run.jobs:
            if job is not None:
                timing = job.timing
                timing.input_ns += times.input_ns
                timing.infer_ns += times.infer_ns
                timing.output_ns += times.output_ns

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()
            if held is not self.allowance:
                held.close()


class _Batch:
    """A batch that runs: which job has which place in it.

    Attributes:
        begun: jobs that the model has seen; 0 while the batch waits, and for one that nobody wanted any more.
        open: jobs that it still owes a final answer.
        seen: jobs that have had an answer; kept only where a job may run again.
    """

    __slots__ = (
        "_config",
        "_joined",
        "_requests",
        "_rows",
        "begun",
        "counted",
        "jobs",
        "lane",
        "open",
        "running",
        "seen",
    )

    def __init__(
        self,
        lane: Lane,
        running: Running,
        jobs: Sequence[Job | None],
        rows: list[int],
        requests: Sequence[InferRequest],
        joined: bool,
        config: ModelConfig,
    ) -> None:
        self.lane = lane
        self.running = running
        self.jobs = jobs
        self.counted = False
        self.begun = 0
        self.open = {job for job in jobs if job is not None}
        self.seen: set[Job] = set()
        self._rows = rows
        self._requests = requests
        self._joined = joined
        self._config = config
        for index, job in enumerate(jobs):
            if job is not None:
                job.abort = partial(self._abort, index)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for it."""
        return any(job is not None and job.phase is not Phase.ENDED for job in self.jobs)

    def begin(self) -> int:
        """Marks the jobs as running; how many there are. (What was dropped before is not one of them.)"""
        now_ns = time.monotonic_ns()
        begun = 0
        for job in self.jobs:
            if job is None or job.phase is not Phase.WAITING:
                continue
            begun += 1
            job.phase = Phase.RUNNING
            if not job.timing.queue_ns:
                job.timing.queue_ns = max(1, now_ns - job.queued_ns)
        return begun

    def replies(self, found: list[Reply]) -> None:
        """For the execution: replies have come."""
        self.lane.replied(self, found)

    def ended(self, error: TritiumError | None, started: bool) -> None:
        """For the execution: nothing more comes."""
        self.lane.ended(self, error, started)

    def answered(self, job: Job) -> bool:
        """Whether the job has had an answer already."""
        return job in self.seen

    def jobs_of(self, index: int) -> list[Job]:
        """The jobs that a reply is for."""
        found = self.jobs if self._joined else [self.jobs[index]]
        return [job for job in found if job is not None]

    def split(self, index: int, response: InferResponse) -> list[tuple[Job, InferResponse]]:
        """Each job's own part of a reply."""
        if not self._joined:
            job = self.jobs[index]
            return [] if job is None else [(job, response)]
        parts = batch.split(self._config, response, self._requests, self._rows)
        return [(job, part) for job, part in zip(self.jobs, parts, strict=True) if job is not None]

    def _abort(self, index: int) -> None:
        if not self._joined:
            self.running.cancel(index)
        elif all(job is None or job.gone or job.phase is Phase.ENDED for job in self.jobs):
            self.running.cancel(0)


def _unexpected(model: str, error: Exception) -> TritiumError:
    if isinstance(error, TritiumError):
        return error
    _log.exception("batch cannot be made", model=model)
    return TritiumError(Code.INTERNAL, f"batch for model '{model}' cannot be made: {type(error).__name__}")
