"""Model: one served name and version, with its state, its running requests and its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from enum import Enum

from tritium.backends.base import Backend, Footprint, LoadContext, TextBackend, Timing
from tritium.backends.config import DynamicBatching, ModelConfig
from tritium.errors import Code, TritiumError
from tritium.llm.types import GenerateRequest, TokenDelta
from tritium.observability import logs
from tritium.observability.metrics import Metrics
from tritium.observability.tracing import Trace
from tritium.serving import warmup
from tritium.serving.cache import Memory, remember
from tritium.serving.changes import on_device, same_load, seen_differently
from tritium.serving.closing import closing, unexpected, unload_quietly
from tritium.serving.config import render
from tritium.serving.config_checks import check_config, without_effect
from tritium.serving.direct import Direct, Done, Submit, none_came, too_many
from tritium.serving.ensemble import EnsembleRunner
from tritium.serving.instances import Instances, Surroundings, make_backend
from tritium.serving.model_files import keep_labels
from tritium.serving.request_checks import check_request
from tritium.serving.stats import ModelStats, observe
from tritium.serving.tally import Tally
from tritium.types import REPORT_COPIES, Copies, InferRequest, InferResponse

_log = logs.get(__name__)


class State(Enum):
    """Where a model is in its life; the values are those of Triton's repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Model:
    """One version of a model.

    Args:
        context: what its backend is told.
        metrics: the registry of the server; None where nobody reads it.
        surroundings: what it shares with the other models of the server.

    Attributes:
        config: as the file says it; once loaded, as the backend completed it.
        created_s: when it became ready, in seconds since the epoch; 0 before.
    """

    def __init__(
        self, context: LoadContext, metrics: Metrics | None = None, surroundings: Surroundings | None = None
    ) -> None:
        self.context = context
        self.name = context.name
        self.version = context.version
        self.config: ModelConfig = context.config
        self.state = State.LOADING
        self.created_s = 0
        self.stats = ModelStats(self.name, self.version)
        self._metrics = metrics
        self._surroundings = surroundings or Surroundings()
        self._memory: Memory | None = None
        self._short: Submit | None = None
        self._backend: Backend | None = None
        self._reason = ""
        self._failed = False
        self._unloading = asyncio.Lock()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def reason(self) -> str:
        """Why it is unavailable, or not ready for the moment; "" when neither."""
        if self.state is State.READY and self._backend is not None:
            return self._backend.reason()
        return self._reason

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return self._running

    def ready(self) -> bool:
        """Whether a request would be answered now."""
        return self.state is State.READY and self._backend is not None and self._backend.ready()

    async def healthy(self) -> bool:
        """Whether it is ready, by the word of the model itself too."""
        return self.ready() and self._backend is not None and await self._backend.healthy()

    @property
    def unloaded(self) -> bool:
        """Whether it went out of service because it was told to."""
        return self.state is State.UNAVAILABLE and not self._failed

    def current(self) -> bool:
        """Whether the models that it is made of are still as they were when it was loaded."""
        return not isinstance(self._backend, EnsembleRunner) or self._backend.current()

    async def load(self) -> None:
        """Loads the backend; ``open`` then makes it READY. Or makes it UNAVAILABLE with the reason.

        Raises:
            TritiumError: why it cannot be loaded.
        """
        try:
            backend = await self._load_backend()
        except TritiumError as error:
            self.fail(error)
            raise
        except Exception as error:
            cause = unexpected(self.name, "load", error)
            self.fail(cause)
            raise cause from error
        except asyncio.CancelledError:
            self.fail(TritiumError(Code.CANCELLED, "the load was given up"))
            raise
        self._backend = backend

    def open(self) -> None:
        """Takes requests from now on, and counts; where a version is replaced, the old one has retired before."""
        if self._backend is None:
            raise self._not_loaded()
        self.created_s = int(time.time())
        self._memory = remember(self._surroundings.cache, self.config, self.context)
        self._shorten(self._backend)
        self._count(self._backend)
        self.state = State.READY

    async def _load_backend(self) -> Backend:
        backend = make_backend(self.context, self._surroundings, self.stats)
        honoured = backend.honours if isinstance(backend, Instances) else ()
        fields = without_effect(self.config.source, honoured)
        if fields:
            _log.warning("fields of the configuration have no effect here", model=self.name, fields=", ".join(fields))
        try:
            config = await backend.complete(self.config)
            check_config(config, complete=True)
            await backend.load()
            if not isinstance(backend, Instances):
                await warmup.through(backend, config, self.version, self.context.model_folder, self.stats)
            self.config = keep_labels(render(on_device(config, backend)), self.config)
        except BaseException:
            await unload_quietly(backend, self.name)
            raise
        return backend

    async def reconfigure(self, context: LoadContext) -> Callable[[], None] | None:
        """What makes it follow other settings of the same files, at once and without fail; None: it takes a load.

        Raises:
            TritiumError: INVALID_ARGUMENT when a load would refuse them too.
        """
        backend, before = self._backend, self.context
        if backend is None or self.state is not State.READY or not same_load(before, context):
            return None
        change = await backend.reconfigure(context)
        if change is None:
            return None
        config = keep_labels(render(on_device(change.config, backend)), change.config)

        def apply() -> None:
            change.apply()
            was, self.context, self.config = self.config, context, config
            if self._memory is None or not config.response_cache:
                self._memory = remember(self._surroundings.cache, config, context)
            self._shorten(backend)
            if seen_differently(was, config):
                self._count(backend)

        return apply

    def _shorten(self, backend: Backend) -> None:
        """Finds out whether requests may go to the batcher without a task of their own."""
        plain = self._memory is None and not self.config.decoupled
        self._short = backend.submitter() if plain and isinstance(backend, Instances) else None

    async def footprint(self, context: LoadContext) -> Footprint:
        """What a load of ``context`` is likely to take beside it."""
        return Footprint() if self._backend is None else await self._backend.footprint(context)

    def fail(self, error: TritiumError) -> None:
        """Makes it UNAVAILABLE, with the reason as Triton writes it: the code in words, then the message."""
        self.state = State.UNAVAILABLE
        self._failed = True
        self._reason = f"{error.code.value.replace('_', ' ').capitalize()}: {error.message}"

    def retire(self) -> None:
        """Takes no new requests from now on; ``unload`` follows."""
        if self.state is State.READY and self._metrics is not None:
            self._metrics.remove_model(self.name, self.version)
        if self.state in (State.READY, State.LOADING):
            self.state = State.UNLOADING

    async def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits until no request is running; False when the time ran out first."""
        if self._idle.is_set():  # said also to who does not wait at all
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def unload(self) -> None:
        """Frees the backend, whose running requests end with an error, and is UNAVAILABLE after that.

        Returns when it is done, also when another call began it. A model that failed stays as it is.
        """
        if self._failed:
            return
        self.retire()
        async with self._unloading:
            backend, self._backend, self._short = self._backend, None, None
            if backend is not None:
                await unload_quietly(backend, self.name)
            self.state = State.UNAVAILABLE
            self._reason = "unloaded"

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answers a request that wants exactly one answer.

        Raises:
            TritiumError: UNIMPLEMENTED for a decoupled model, unless it ``answers_once``; whatever ``stream`` raises.
        """
        if not self.answers_once:
            raise TritiumError(
                Code.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        found: InferResponse | None = None
        async with aclosing(self.stream(request)) as answers:
            async for answer in answers:
                if answer.empty:
                    continue
                if found is not None:
                    raise too_many(self.name)
                found = answer
        if found is None:
            raise none_came(self.name)
        if found.error is not None:
            raise found.error
        return found

    @property
    def direct(self) -> bool:
        """Whether ``submit`` takes requests."""
        return self._short is not None and self.state is State.READY

    def submit(self, request: InferRequest, done: Done, rows: int = 0) -> Callable[[], None] | None:
        """``infer`` without a task: ``done`` is called once with the answer or an error, perhaps before this returns.

        Args:
            rows: inferences in the request, for one that is known to fit the configuration; 0 to look.

        Returns:
            What cancels the request; None when it must take the long way, and nothing has been done.

        Raises:
            TritiumError: the request does not fit the configuration, or is not taken.
        """
        short = self._short
        if (
            short is None
            or self.state is not State.READY
            or request.trace is not None
            or REPORT_COPIES in request.parameters
        ):
            return None
        rows = rows or check_request(self.config, request)
        direct = Direct(request, Tally(self.stats, rows, request.arrived_ns, Timing()), self._left, done)
        self._running += 1
        self._idle.clear()
        return direct.start(self.name, self.version, short)

    def _left(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse]:
        """Answers a request; the last answer, and only that, is ``final``. Closing it cancels the request.

        Raises:
            TritiumError: the request does not fit the configuration, or instead of the final answer.
        """
        rows = check_request(self.config, request)
        report = request.parameters.get(REPORT_COPIES) is True
        if report and request.copies is None:
            request.copies = Copies()
        if request.trace is not None:
            request.trace.hold("TENSOR_QUEUE_INPUT", request.inputs.values())
        with self._run(rows, request.arrived_ns, request.trace) as (run, backend):
            async with closing(self._answers(backend, request, run.timing)) as answers:
                async for answer in answers:
                    answer.model, answer.version, answer.id = self.name, self.version, request.id
                    if report and request.copies is not None:
                        answer.parameters = answer.parameters | request.copies.parameters()
                    run.answered(answer)
                    if answer.final:
                        run.succeed()
                    yield answer
                    if answer.final:
                        return
            raise TritiumError(Code.INTERNAL, f"model '{self.name}' ended without a final answer")

    def _answers(self, backend: Backend, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        """The answers of the backend, or of the response cache before it."""
        if not isinstance(backend, Instances) and isinstance(self.config.batching, DynamicBatching):
            # Who schedules itself has a queue of its own, with one policy.
            request.timeout_us = self.config.batching.policy.wait_us(request.timeout_us)
        if self._memory is None or request.sequence is not None:
            # What answers a request of a sequence depends on those before it, also in a step of an ensemble.
            return backend.stream(request, timing)
        return self._memory.answers(request, timing, lambda: backend.stream(request, timing))

    async def generate(self, request: GenerateRequest, trace: Trace | None = None) -> AsyncGenerator[TokenDelta]:
        """Continues one sequence; the last delta, and only that, has ``finish``. Closing it aborts.

        Raises:
            TritiumError: INVALID_ARGUMENT when this is no language model; or instead of the last delta.
        """
        self.text_backend()
        with self._run(1, request.arrived_ns, trace) as (run, backend):
            assert isinstance(backend, TextBackend)
            async with aclosing(run.timing.watch(request, backend.generate(request))) as deltas:
                async for delta in deltas:
                    if delta.error is not None:
                        raise delta.error.exception()
                    if delta.finish is not None:
                        run.succeed()
                    yield delta
                    if delta.finish is not None:
                        return
            raise TritiumError(Code.INTERNAL, f"model '{self.name}' ended without a finish reason")

    def text_backend(self) -> TextBackend:
        """Its backend, if it is a language model.

        Raises:
            TritiumError: INVALID_ARGUMENT when it is none; UNAVAILABLE when it is not loaded.
        """
        if isinstance(self._backend, TextBackend):
            return self._backend
        if self._backend is None:
            raise self._not_loaded()
        raise TritiumError(Code.INVALID_ARGUMENT, f"model '{self.name}' is not a language model", param="model")

    @property
    def answers_once(self) -> bool:
        """Whether a request that asks for no stream has exactly one answer: so it is with language models."""
        return not self.config.decoupled or (self._backend is not None and self._backend.answers_once)

    @property
    def is_text(self) -> bool:
        """Whether it is a language model that is loaded."""
        return isinstance(self._backend, TextBackend)

    @contextmanager
    def _run(self, rows: int, arrived_ns: int, trace: Trace | None) -> Generator[tuple[Tally, Backend]]:
        """Counts a request from here to its end; an error of any kind becomes a TritiumError."""
        backend = self._backend
        if backend is None or self.state is not State.READY:
            raise self._not_loaded()
        run = Tally(self.stats, rows, arrived_ns, Timing(self.stats.metrics if self.is_text else None), trace)
        self._running += 1
        self._idle.clear()
        try:
            yield run, backend
        except TritiumError as error:
            run.fail(error.code, error.reason)
            raise
        except Exception as error:
            run.fail(Code.INTERNAL)
            raise unexpected(self.name, "answer", error) from error
        finally:
            # Left open by a client that went away (GeneratorExit, CancelledError).
            run.fail(Code.CANCELLED)
            self._left()

    def _not_loaded(self) -> TritiumError:
        return TritiumError(Code.NOT_FOUND, f"Request for unknown model: '{self.name}' has no available versions")

    def _count(self, backend: Backend) -> None:
        """Begins to count; metrics of an earlier load of the same version begin anew, as in Triton."""
        if self._metrics is not None:
            self.stats.attach(observe(self._metrics, self.version, self.config, backend))
