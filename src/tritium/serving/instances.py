"""Instances: the executing copies of a model and the batcher before them, as one ``Backend``."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tritium.backends import find
from tritium.backends.base import Backend, Change, Footprint, InstanceBackend, LoadContext, Placement, Timing
from tritium.backends.config import Ensemble, InstanceGroup, ModelConfig, SequenceBatching
from tritium.errors import Code, TritiumError, invalid
from tritium.serving import batch, warmup
from tritium.serving.cache import Cache
from tritium.serving.changes import followed
from tritium.serving.direct import Submit
from tritium.serving.dynamic import DynamicBatcher
from tritium.serving.ensemble import EnsembleRunner
from tritium.serving.instance import Instance
from tritium.serving.limiter import RateLimiter
from tritium.serving.memory import resident_bytes
from tritium.serving.sequence import SequenceBatcher
from tritium.serving.services import Services
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse

# Where Linux lists the GPUs that its NVIDIA driver serves.
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")

# What a model may take to say whether it is ready, in seconds.
ASK_S = 5.0
# A model's parameter and a backend's setting: where copies run, of a backend that leaves the choice.
PLACEMENT = "placement"

Kind = Literal["cpu", "gpu", "model"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all models of a server share.

    Attributes:
        services: what models in host processes may ask of the server; None where there is no server.
        cache: of responses; None for none.
        steps: the configuration of a model that is served, by name and version (-1 for any), for ensembles.
    """

    services: Services | None = None
    limiter: RateLimiter = field(default_factory=RateLimiter)
    cache: Cache | None = None
    steps: Callable[[str, int], ModelConfig] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one copy runs."""

    name: str
    kind: Kind
    device: int
    group: InstanceGroup


class Instances(Backend):
    """A model whose copies are made and whose requests are put together by the server.

    Args:
        kind: its ``InstanceBackend``.

    Attributes:
        honours: fields of the configuration that have a meaning for that backend.

    Raises:
        TritiumError: INVALID_ARGUMENT when the model asks for a placement that it cannot have.
    """

    def __init__(
        self,
        context: LoadContext,
        kind: type[InstanceBackend],
        surroundings: Surroundings,
        stats: ModelStats,
    ) -> None:
        super().__init__(context)
        self.honours = kind.honours
        self._target = f"{kind.__module__}:{kind.__qualname__}"
        self._placement: Placement = _placement(kind, context)
        self._gpu = kind.uses_gpu()
        self._surroundings = surroundings
        self._stats = stats
        self._joined = kind.joined
        self._config = context.config
        self._instances: list[Instance] = []
        self._batcher: DynamicBatcher | SequenceBatcher | None = None

    async def complete(self, config: ModelConfig) -> ModelConfig:
        """Starts the first copy, which completes the configuration.

        Raises:
            TritiumError: it cannot be started, or a group wants a GPU where there is none.
        """
        config = _placed(config, self._gpu)
        first = self._make(_places(config)[0])
        self._config = _labelled(_placed(await first.start(), self._gpu), config)
        return self._config

    async def load(self) -> None:
        """Starts the other copies, warms all of them up, and opens the queue.

        Raises:
            TritiumError: a copy cannot be started or answers a warm-up sample with an error.
        """
        config = self._config
        places = _places(config)
        others = [self._make(place) for place in places[1:]]
        await asyncio.gather(*(one.start(config) for one in others))
        for instance in self._instances:
            await self._warm_up(instance)
        batcher = self._make_batcher()
        self._allow(batcher, places)
        self._batcher = batcher
        await batcher.start()

    async def unload(self) -> None:
        """Ends the requests that are left with an UNAVAILABLE error, and all copies."""
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            await batcher.stop()
        instances, self._instances = self._instances, []
        await asyncio.gather(*(instance.stop() for instance in instances))

    async def reconfigure(self, context: LoadContext) -> Change | None:
        """Other queues, batches and needs of the rate limiter for the same copies."""
        batcher = self._batcher
        config = followed(self._config, self.context.config, context.config)
        if batcher is None or config is None:
            return None
        places = _places(config)
        limiter = self._surroundings.limiter
        for place in places:
            limiter.needs(place.name, place.group.resources, place.device)

        def apply() -> None:
            self.context, self._config = context, config
            self._allow(batcher, places)
            if isinstance(batcher, SequenceBatcher):
                assert isinstance(config.batching, SequenceBatching)
                batcher.reconfigure(config.batching)
            else:
                batcher.reconfigure(config)

        return Change(config, apply)

    async def footprint(self, context: LoadContext) -> Footprint:
        """As many copies as ``context`` wants, each as large as the largest that runs."""
        sizes = await asyncio.to_thread(lambda: [resident_bytes(pid) for pid in self.pids()])
        return Footprint(max(sizes, default=0) * len(_places(context.config)))

    def pids(self) -> list[int]:
        """The processes of the copies that run."""
        return [one.pid for one in self._instances if one.pid is not None]

    def ready(self) -> bool:
        """Whether a copy takes requests."""
        return self._batcher is not None and any(instance.ready for instance in self._instances)

    async def healthy(self) -> bool:
        """Whether no copy that runs says that it is not ready (``is_ready`` of a Python model), or is silent."""
        if not self.ready():
            return False
        try:
            async with asyncio.timeout(ASK_S):
                return all(await asyncio.gather(*(one.healthy() for one in self._instances if one.ready)))
        except TimeoutError:
            return False

    def reason(self) -> str:
        """Why none does; "" when one does."""
        if self.ready():
            return ""
        return next((one.reason for one in self._instances if one.reason), "it is not loaded")

    def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        """Answers one request, together with others as the configuration says."""
        if self._batcher is None:
            raise TritiumError(Code.UNAVAILABLE, f"model '{self.context.name}' is not loaded")
        return self._batcher.stream(request, timing, batch.rows_of(self._config, request))

    def submitter(self) -> Submit | None:
        """What takes requests by callbacks instead of ``stream``; None where requests depend on each other."""
        return self._batcher.submit if isinstance(self._batcher, DynamicBatcher) else None

    def _make(self, place: _Place) -> Instance:
        services = self._surroundings.services
        if services is None:
            raise TritiumError(Code.INTERNAL, f"model '{self.context.name}' needs a server around it")
        instance = Instance(
            self.context,
            place.name,
            services,
            backend=self._target,
            kind=place.kind,
            device_id=place.device,
            placement=self._placement,
        )
        self._instances.append(instance)
        return instance

    def _allow(self, batcher: DynamicBatcher | SequenceBatcher, places: Sequence[_Place]) -> None:
        """Tells the rate limiter what each copy holds while it executes."""
        for lane, place in zip(batcher.lanes, places, strict=True):
            group = place.group
            lane.exchange(
                self._surroundings.limiter.register(
                    place.name, group.resources, group.priority, batcher.kick, place.device
                )
            )

    def _make_batcher(self) -> DynamicBatcher | SequenceBatcher:
        config = self._config
        if isinstance(config.batching, SequenceBatching):
            return SequenceBatcher(
                config,
                config.batching,
                self._instances,
                self._stats,
                folder=self.context.model_folder,
                joined=self._joined,
            )
        return DynamicBatcher(config, self._instances, self._stats, joined=self._joined)

    async def _warm_up(self, instance: Instance) -> None:
        for sample in self._config.warmup:
            for _ in range(sample.count):
                requests = warmup.requests_of(self._config, sample, self.context.version, self.context.model_folder)
                try:
                    await self._run(instance, requests)
                except TritiumError as error:
                    raise warmup.failed(sample, error) from error

    async def _run(self, instance: Instance, requests: Sequence[InferRequest]) -> None:
        """One execution outside the batcher; it counts like any other."""
        begin_ns = time.monotonic_ns()
        await instance.free()
        rows = [batch.rows_of(self._config, request) for request in requests]
        made = [batch.reshape_inputs(self._config, r) for r in batch.add_inputs(self._config, requests, rows)]
        execution = instance.execute([batch.join(self._config, made, rows)] if self._joined else made)
        while replies := await execution.some():
            for reply in replies:
                if reply.response is not None and reply.response.error is not None:
                    raise reply.response.error
        times = execution.times
        timing = Timing(queue_ns=1)
        if times is not None:
            timing.input_ns, timing.infer_ns, timing.output_ns = times.input_ns, times.infer_ns, times.output_ns
        self._stats.executed(
            len(requests), input_ns=timing.input_ns, infer_ns=timing.infer_ns, output_ns=timing.output_ns
        )
        for _ in requests:
            self._stats.succeeded(1, time.monotonic_ns() - begin_ns, timing)


def gpu_count() -> int:
    """GPUs that the driver lists; found without a library that would need one."""
    try:
        return sum(1 for _ in GPU_FOLDER.iterdir())
    except OSError:
        return 0


def _placement(kind: type[InstanceBackend], context: LoadContext) -> Placement:
    """Where the copies run: as the model's parameter says, the backend's setting, or as the backend does by itself."""
    known: Sequence[Placement] = kind.placements
    asked = context.config.parameters.get(PLACEMENT) or context.backend_config.get(PLACEMENT)
    if asked is None or len(known) == 1:
        # Not an option of this backend: the name is the model's own, if it has such a parameter.
        return known[0]
    for one in known:
        if one == asked:
            return one
    raise invalid(f"{PLACEMENT} of model '{context.name}' is '{asked}', expected {' or '.join(known)}", param=PLACEMENT)


def _placed(config: ModelConfig, gpu: bool = False) -> ModelConfig:
    """Groups that leave the device open run on the CPU, or on GPUs if the backend uses them and there are some."""
    count = gpu_count() if gpu else 0
    groups = tuple(
        g
        if g.device != "auto"
        else dataclasses.replace(g, device="gpu", gpus=g.gpus or tuple(range(count)))
        if count
        else dataclasses.replace(g, device="cpu", gpus=())
        for g in config.instances
    )
    return dataclasses.replace(config, instances=groups)


def _labelled(config: ModelConfig, given: ModelConfig) -> ModelConfig:
    """The labels of ``given``, which no message carries."""
    labels = {spec.name: spec.labels for spec in given.outputs}
    outputs = tuple(dataclasses.replace(spec, labels=labels.get(spec.name, ())) for spec in config.outputs)
    return dataclasses.replace(config, outputs=outputs)


def _places(config: ModelConfig) -> list[_Place]:
    """One place for each copy, named as Triton does.

    Raises:
        TritiumError: INVALID_ARGUMENT for a group on GPUs that are not there.
    """
    found: list[_Place] = []
    for group in _placed(config).instances:
        devices: Sequence[int] = (0,)
        kind: Kind = "model" if group.device == "model" else "cpu"
        if group.device == "gpu":
            kind, devices = "gpu", _gpus(config.name, group)
        places = [(device, number) for device in devices for number in range(group.count)]
        found.extend(_Place(f"{group.name}_{index}", kind, device, group) for index, (device, _) in enumerate(places))
    return found


def _gpus(model: str, group: InstanceGroup) -> Sequence[int]:
    count = gpu_count()
    if not count:
        raise invalid(
            f"instance group {group.name} of model {model} has kind KIND_GPU but no GPUs are available", param="kind"
        )
    for gpu in group.gpus:
        if gpu >= count:
            raise invalid(
                f"instance group {group.name} of model {model} specifies invalid or unsupported gpu id {gpu}, "
                f"expected one below {count}",
                param="gpus",
            )
    return group.gpus or tuple(range(count))


def make_backend(context: LoadContext, surroundings: Surroundings, stats: ModelStats) -> Backend:
    """What answers the requests of a model: a backend that schedules itself, copies with a batcher, or an ensemble.

    Raises:
        TritiumError: INVALID_ARGUMENT when there is no such backend.
    """
    config = context.config
    if isinstance(config.batching, Ensemble):
        if surroundings.steps is None or surroundings.services is None:
            raise TritiumError(Code.INTERNAL, f"ensemble '{context.name}' needs a server around it")
        return EnsembleRunner(context, surroundings.steps, surroundings.services.call, stats)
    found = find(config.backend, config.platform, context.name)
    if issubclass(found, InstanceBackend):
        return Instances(context, found, surroundings, stats)
    if isinstance(config.batching, SequenceBatching):
        raise invalid(
            f"sequence_batching is set for model '{context.name}', expected none: its backend '{config.backend}' "
            "schedules requests by itself",
            param="sequence_batching",
        )
    return found(context)
