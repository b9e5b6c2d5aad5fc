"""Lane: one instance as a batcher sees it, free or not, and the run of one batch on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving import batch
from tritium.serving.instance import Reply, Times
from tritium.serving.limiter import Allowance
from tritium.serving.queue import Answer, Job, Phase
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse

# A model's parameter: requests inside an instance that dies run once more.
RERUN = "retry_on_crash"

_log = logs.get(__name__)


class Running(Protocol):
    """What is used of ``instance.Execution``."""

    @property
    def times(self) -> Times | None:
        """What it took; None until the model's ``execute`` has returned."""
        ...

    async def some(self) -> list[Reply]:
        """Replies that have come, at least one; [] at the end."""
        ...

    def cancel(self, index: int) -> None:
        """Nobody waits for that request any more."""
        ...

    async def aclose(self) -> None:
        """Cancels what is not final."""
        ...


class Executor(Protocol):
    """What is used of ``instance.Instance``."""

    @property
    def name(self) -> str:
        """As error messages show it."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it would take a batch, now or once the running one is through."""
        ...

    @property
    def life(self) -> int:
        """Changes when the model was loaded anew, and knows nothing of what it was told before."""
        ...

    async def free(self) -> None:
        """Returns when it is ready and idle."""
        ...

    def execute(self, requests: Sequence[InferRequest]) -> Running:
        """Runs a batch."""
        ...


class Owner(Protocol):
    """The batcher of a lane."""

    def kick(self) -> None:
        """Something has changed: a batch may be due."""
        ...

    def done(self, lane: Lane, job: Job) -> None:
        """A job has ended, or waits again (``Phase.WAITING``) because its model wants to see it again."""
        ...

    def crashed(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """The instance died; these jobs shall run again."""
        ...

    def deliver(self, job: Job, answer: Answer) -> None:
        """An answer has come."""
        ...


class Lane:
    """One instance.

    Args:
        config: of the model, completed.
        joined: the backend takes one request with the tensors of the whole batch, instead of a list.
        stats: where executions are counted.

    Attributes:
        free: whether a batch may be started.
        allowance: of the rate limiter; set by ``Lane``'s maker before ``open``, see ``exchange``.
    """

    def __init__(
        self, executor: Executor, config: ModelConfig, stats: ModelStats, owner: Owner, *, joined: bool = False
    ) -> None:
        self.executor = executor
        self.free = False
        self.allowance: Allowance | None = None
        self._config = config
        self._stats = stats
        self._owner = owner
        self._joined = joined
        self._rerun = config.parameters.get(RERUN, "").lower() in ("1", "true", "yes")
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: Allowance | None = None
        self._closed = False

    def open(self) -> None:
        """Offers the lane as soon as its instance is free."""
        self._spawn(self._become_free())

    async def close(self) -> None:
        """Ends what runs on it; jobs inside get an UNAVAILABLE error."""
        self._closed, self.free = True, False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
        if self.allowance is not None and not self.allowance.acquire():
            return False
        self._held = self.allowance
        self.free = False
        rows = [1 if job is None else job.rows for job in jobs]
        try:
            prepared = [
                batch.reshape_inputs(self._config, one) for one in batch.add_inputs(self._config, requests, rows)
            ]
            joined = [batch.join(self._config, prepared, rows)] if self._joined else prepared
            running = self.executor.execute(joined)
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
        self._stats.pending(-sum(job is not None for job in jobs))
        run.begin()
        self._spawn(self._run(run))
        return True

    async def _run(self, run: _Batch) -> None:
        # A decoupled model may answer on while its instance takes the next batch already.
        if self._config.decoupled:
            self._spawn(self._become_free(release=True))
        died: TritiumError | None = None
        try:
            while replies := await run.running.some():
                self._count(run)
                for reply in replies:
                    self._reply(run, reply)
        except TritiumError as error:
            died = error
        except asyncio.CancelledError:
            died = TritiumError(Code.UNAVAILABLE, f"model '{self._config.name}' was unloaded")
        finally:
            self._count(run, last=True)
        if not self._config.decoupled and not self._closed:
            self._spawn(self._become_free(release=True))
        self._bury(run, died)

    def _bury(self, run: _Batch, died: TritiumError | None) -> None:
        """Ends the jobs that the execution left open."""
        left = [job for job in run.jobs if job in run.open]
        if not left:
            return
        if died is None:
            died = TritiumError(Code.INTERNAL, f"model '{self._config.name}' ended without a final answer")
        elif self._rerun and not self._closed:
            again = [job for job in left if not job.gone and not job.reruns and not run.answered(job)]
            for job in again:
                job.reruns, job.phase, job.abort = 1, Phase.WAITING, None
            left = [job for job in left if job not in again]
            if again:
                self._stats.pending(len(again))
                self._owner.crashed(self, again)
        for job in left:
            self._end(job, died)

    def _reply(self, run: _Batch, reply: Reply) -> None:
        if reply.rescheduled or reply.response is None:
            for job in run.jobs_of(reply.index):
                if job in run.open:
                    # Before anything else: the next run of the job may begin at once.
                    run.open.discard(job)
                    job.phase, job.abort = Phase.WAITING, None
                    self._stats.pending(1)
                    self._owner.done(self, job)
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
            batch.reshape_outputs(self._config, answer)
            run.seen.add(job)
            if answer.final:
                run.open.discard(job)
                job.abort = None
            self._owner.deliver(job, answer)
            if answer.final:
                self._owner.done(self, job)

    def _end(self, job: Job, error: TritiumError) -> None:
        job.abort = None
        self._owner.deliver(job, error)
        self._owner.done(self, job)

    def _count(self, run: _Batch, *, last: bool = False) -> None:
        """Counts the execution once, as soon as its times are known."""
        times = run.running.times
        if run.counted or (times is None and not last):
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

    async def _become_free(self, *, release: bool = False) -> None:
        try:
            await self.executor.free()
        except TritiumError as error:
            # It was stopped; the batcher is about to be.
            _log.debug("instance takes no more batches", instance=self.executor.name, error=error.message)
            return
        finally:
            if release:
                self._release()
        if not self._closed:
            self.free = True
            self._owner.kick()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()
            if held is not self.allowance:
                held.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Batch:
    """A batch that runs: which job has which place in it.

    Attributes:
        open: jobs that it still owes a final answer.
        seen: jobs that have had an answer.
    """

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
        self.open = {job for job in jobs if job is not None}
        self.seen: set[Job] = set()
        self._rows = rows
        self._requests = requests
        self._joined = joined
        self._config = config

    def begin(self) -> None:
        """Marks the jobs as running."""
        now_ns = time.monotonic_ns()
        for index, job in enumerate(self.jobs):
            if job is None:
                continue
            job.phase = Phase.RUNNING
            job.abort = self._aborts(index)
            if not job.timing.queue_ns:
                job.timing.queue_ns = max(1, now_ns - job.queued_ns)

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

    def _aborts(self, index: int) -> Callable[[], None]:
        def abort() -> None:
            if not self._joined:
                self.running.cancel(index)
            elif all(job is None or job.gone or job.phase is Phase.ENDED for job in self.jobs):
                self.running.cancel(0)

        return abort


def _unexpected(model: str, error: Exception) -> TritiumError:
    if isinstance(error, TritiumError):
        return error
    _log.exception("batch cannot be made", model=model)
    return TritiumError(Code.INTERNAL, f"batch for model '{model}' cannot be made: {type(error).__name__}")
