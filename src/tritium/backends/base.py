"""What every backend is: it is told a configuration, completes it, loads, answers requests, unloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from tritium.backends.config import ModelConfig
from tritium.llm.types import EngineInfo, EngineStats, GenerateRequest, TokenDelta
from tritium.types import InferRequest, InferResponse

if TYPE_CHECKING:
    from tritium.llm.tokenizer import Tokenizer
    from tritium.settings import Effective


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a backend is told of the model that it shall load.

    Attributes:
        version: of the model, as it is written on the wire.
        version_folder: ``<repository>/<model>/<version>``; None when a checkpoint is served without a repository.
        model_folder: ``<repository>/<model>``; None likewise.
        config: as the file says it, with the server's own completions but not yet the backend's.
        triton_config: the ``triton_config.json`` of the model, those of the version folder winning; empty without one.
        checkpoint: the checkpoint that the operator named outright; None when the backend finds it.
        settings: settings of the server for every model (the command line's engine flags, by field name);
            only those that were given. The model's own ``parameters`` win over them.
        auto_complete: whether a backend may add to the configuration what its model says (it is off with
            ``--disable-auto-complete-config``).
        backend_config: what ``--backend-config`` says to this backend, texts by key.
        files: a digest of the files that a load reads, all but those that hold settings; "" when it is not known.
        content: the same by what they hold, also on another machine, where answers are cached; otherwise "".
    """

    name: str
    version: str
    config: ModelConfig
    version_folder: Path | None = None
    model_folder: Path | None = None
    triton_config: Mapping[str, object] = field(default_factory=dict[str, object])
    checkpoint: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    auto_complete: bool = True
    backend_config: Mapping[str, str] = field(default_factory=dict[str, str])
    files: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """New settings that a live backend can follow.

    Attributes:
        config: the configuration then, completed as by ``Backend.complete``.
        apply: makes it so, at once; it cannot fail.
    """

    config: ModelConfig
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a load takes, in bytes.

    Attributes:
        gpus: by index of the device, as ``CUDA_VISIBLE_DEVICES`` counts.
    """

    host: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict[str, int])


class TokenObserver(Protocol):
    """Where times of single tokens go; ``observability.metrics.ModelMetrics`` has this shape."""

    def observe_queue(self, seconds: float) -> None:
        """A sequence waited that long for its first step."""
        ...

    def observe_first_token(self, seconds: float) -> None:
        """A sequence had its first token that long after its arrival."""
        ...

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """``count`` tokens followed their forerunners, each ``seconds`` after the one before."""
        ...


@dataclass(slots=True)
class Timing:
    """Times and executions of one inference request; the server makes it, the backend fills it in.

    Attributes:
        queue_ns: from arrival to the first step; the longest of the rows.
        input_ns: spent on making the backend's own form of the inputs.
        output_ns: spent on making the answers.
        infer_ns: spent computing; 0 where it is the rest of the time.
        executions: the request's share of the backend's executions: 1 / (rows that ran together), summed over
            the rows of the request, so that inferences / executions is the mean batch. 0 where a batcher counts
            whole executions (``ModelStats.executed``).
        cache: whether the response cache had the answer; "" where it was not asked.
        cache_ns: what the cache took: the look-up, and after a miss the insertion too.
    """

    observer: TokenObserver | None = None
    queue_ns: int = 0
    input_ns: int = 0
    output_ns: int = 0
    infer_ns: int = 0
    executions: float = 0.0
    cache: Literal["", "hit", "miss"] = ""
    cache_ns: int = 0

    async def watch(self, request: GenerateRequest, deltas: AsyncIterator[TokenDelta]) -> AsyncGenerator[TokenDelta]:
        """Passes the deltas of one sequence on and takes its times from them.

        A backend puts it around each sequence that it starts for an ``InferRequest``; around
        ``TextBackend.generate`` the server does so itself. Closing it closes ``deltas``.
        """
        last_ns = 0
        try:
            async for delta in deltas:
                if delta.tokens:
                    last_ns = self._tokens(request, delta, last_ns)
                if delta.finish is not None:
                    self.executions += delta.exec_share
                yield delta
        finally:
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()

    def _tokens(self, request: GenerateRequest, delta: TokenDelta, last_ns: int) -> int:
        now = monotonic_ns()
        count = len(delta.tokens)
        if not last_ns:
            self.queue_ns = max(self.queue_ns, delta.queue_ns)
            if self.observer is not None:
                first_ns = delta.first_token_ns or now
                self.observer.observe_queue(delta.queue_ns / 1e9)
                self.observer.observe_first_token(max(0, first_ns - request.arrived_ns) / 1e9)
        elif self.observer is not None:
            self.observer.observe_inter_token((now - last_ns) / count / 1e9, count)
        return now


class Backend(ABC):
    """One loaded version of a model.

    Life: constructed with its context, ``complete``, ``load``, any number of requests, ``unload`` (also after
    a ``load`` that failed or was cancelled). All methods are called on the event loop; what blocks belongs in
    a thread or a process of the backend.

    Attributes:
        answers_once: a request that asks for no stream has one answer, also where the configuration is decoupled.
    """

    answers_once: bool = False

    def __init__(self, context: LoadContext) -> None:
        self.context = context

    async def complete(self, config: ModelConfig) -> ModelConfig:
        """Fills in what the file leaves open, most of all inputs and outputs; checks what only the backend knows.

        Called once, before ``load``. Returns ``dataclasses.replace(config, ...)``; ``source`` is brought
        into step by the server.

        Raises:
            TritiumError: INVALID_ARGUMENT naming the field, the value and what was expected.
        """
        return config

    @abstractmethod
    async def load(self) -> None:
        """Makes the model ready to answer; returns when a request would be answered.

        Raises:
            TritiumError: the model cannot be loaded; the message is shown to the operator.
        """

    @abstractmethod
    async def unload(self) -> None:
        """Frees everything; requests that still run end with an UNAVAILABLE error. The second time it does nothing."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether requests make progress now."""

    async def healthy(self) -> bool:
        """Whether it is ready by the word of the model itself too, where that has one."""
        return self.ready()

    def reason(self) -> str:
        """Why it is not ready; "" when it is."""
        return ""

    async def reconfigure(self, context: LoadContext) -> Change | None:
        """What it takes to follow another context of the same files without loading them again; None: it takes a load.

        Called while it is loaded and answers. Nothing has changed when this returns.

        Raises:
            TritiumError: INVALID_ARGUMENT when a load would refuse the new settings too.
        """
        return None

    async def footprint(self, context: LoadContext) -> Footprint:
        """An estimate of what a load of ``context`` would take beside this one; nothing where it is little."""
        return Footprint()

    @abstractmethod
    def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        """Answers one request that fits the completed configuration.

        The backend schedules it. Exactly one answer, the last, is ``final``; ``model``, ``version`` and ``id``
        of the answers are filled in by the server. ``request.timeout_us`` is the longest wait that the
        queue policy and the request agree on, 0 for no limit. Closing the iterator cancels the request and
        frees what it holds.

        Raises:
            TritiumError: instead of the final answer.
        """


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """What an ``InstanceBackend`` is told of the copy of the model that it shall be.

    Attributes:
        version: of the model, as it is written on the wire.
        model_folder: ``<repository>/<model>``.
        version_folder: ``<repository>/<model>/<version>``.
        instance: name of the copy, ``<group name>_<number>``.
        device_id: index of the GPU; 0 on the CPU.
        settings: what ``--backend-config`` says to the backend.
        auto_complete: whether ``complete`` may add what the model itself says.
    """

    model: str
    version: str
    model_folder: Path
    version_folder: Path
    instance: str
    kind: Literal["cpu", "gpu", "model"] = "cpu"
    device_id: int = 0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    auto_complete: bool = True


Placement = Literal["process", "thread"]


class Send(Protocol):
    """The way back for the requests of one batch; may be called from any thread, also after ``execute``."""

    def __call__(self, index: int, response: InferResponse, failed: bool = False) -> None:
        """Answers request number ``index``; ``failed`` when the model broke down rather than refused."""
        ...

    def reschedule(self, index: int) -> None:
        """Ends request number ``index`` for now: the model wants to see it again."""
        ...

    def cancelled(self, index: int) -> bool:
        """Whether nobody waits for request number ``index`` any more."""
        ...


class InstanceBackend(ABC):
    """One executing copy of a model, in a host process or a thread; batches are made for it by the server.

    Life: constructed, ``complete`` (the first copy of a model only), ``load``, any number of ``execute``, ``unload``.
    All methods are called one after the other in one thread and may block. A configuration is in the form of
    ``ModelConfig.to_json``.

    Attributes:
        joined: ``execute`` gets one request with the tensors of the whole batch, joined along the first dimension
            by the server, in place of a list of requests.
        placements: where a copy may run; the first is where it does unless asked otherwise.
        honours: fields of the configuration that have a meaning for this backend and not for all.
    """

    joined: ClassVar[bool] = False
    placements: ClassVar[tuple[Placement, ...]] = ("process",)
    honours: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, context: InstanceContext) -> None:
        self.context = context

    @classmethod
    def uses_gpu(cls) -> bool:
        """Whether a group that leaves the device open shall run on the GPUs, where there are some.

        Asked in the server's own process: it may look at what is installed but import none of it.
        """
        return False

    def connect(self, server: object) -> None:  # noqa: B027
        """Told once, before ``complete``, of the way to the server: ``backends.host.Host`` in a host process.

        Wherever the copy runs, the object has ``log(level, message)``.
        """

    def complete(self, config: dict[str, Any]) -> dict[str, Any]:
        """Fills in what the file leaves open.

        Raises:
            TritiumError: the model contradicts the file, or cannot be read.
        """
        return config

    @abstractmethod
    def load(self, config: dict[str, Any]) -> None:
        """Makes the model ready.

        Raises:
            TritiumError: the message is shown to the operator.
        """

    @abstractmethod
    def execute(self, requests: Sequence[InferRequest], send: Send) -> Sequence[InferResponse | None] | None:
        """Runs a batch.

        Returns:
            One final answer for each request; None (in place of one, or of all) where ``send`` answers.

        Raises:
            TritiumError: becomes the final answer of every request that has none yet.
        """

    def well(self) -> bool:
        """Whether the model itself says that it is ready."""
        return True

    def unload(self) -> None:  # noqa: B027
        """Frees everything; also after a ``load`` that failed."""


class TextBackend(Backend):
    """A backend that continues sequences of tokens; the attributes hold once ``load`` has returned.

    Attributes:
        max_length: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        sampling_defaults: what ``llm.params.make_params`` takes as the model's own values.
    """

    answers_once = True
    tokenizer: Tokenizer
    max_length: int
    vocab_size: int
    sampling_defaults: Mapping[str, object]

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Continues one sequence; the last delta, and only that, has ``finish``. Closing the iterator aborts.

        Raises:
            TritiumError: instead of the last delta.
        """

    @abstractmethod
    def engine_stats(self) -> list[EngineStats]:
        """Levels and counters of each engine, always in the same order and number once loaded."""

    @abstractmethod
    def engine_infos(self) -> list[EngineInfo]:
        """What each engine said of itself when it became ready, in the order of ``engine_stats``."""

    def engine_info(self) -> EngineInfo:
        """What the first one said."""
        return self.engine_infos()[0]

    def engine_settings(self) -> Mapping[str, Effective]:
        """Settings of this model that are not those of the server as they were given, and by whose word."""
        return {}
