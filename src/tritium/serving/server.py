"""The one Server under all protocols: which model, which version, loaded or not, and off to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Literal

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.llm.types import GenerateRequest, TokenDelta
from tritium.observability import logs
from tritium.observability.metrics import Metrics
from tritium.observability.tracing import Traces
from tritium.serving.cache import Cache
from tritium.serving.catalog import Catalog
from tritium.serving.instances import Surroundings
from tritium.serving.limiter import RateLimiter
from tritium.serving.model import Model, State
from tritium.serving.repository import Plan, Repository, single
from tritium.serving.services import Services
from tritium.serving.stats import ModelStats
from tritium.serving.views import (
    EXTENSIONS,
    EngineView,
    IndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
    TextModel,
    in_words,
    model_metadata,
)
from tritium.serving.watch import Changes, Watcher
from tritium.types import InferRequest, InferResponse

__all__ = ["EngineView", "IndexEntry", "ModelMetadata", "Server", "ServerMetadata", "TensorMetadata", "TextModel"]

Control = Literal["none", "poll", "explicit"]
ALL_MODELS = "*"
# What a client is told to wait when this server is going away: about the time until another one has its place.
DRAIN_RETRY_S = 1.0

_log = logs.get(__name__)


class Server:
    """Models and who may use them; front ends parse, call this, and render.

    Args:
        repositories: folders of models.
        control: ``none`` loads every model at the start and refuses changes; ``poll`` too, and follows the
            files of the repositories from then on; ``explicit`` loads what ``load_models`` names, and what
            requests ask for.
        load_models: names to load at the start in ``explicit`` mode; "*" stands for all.
        poll_s: how often ``poll`` looks.
        settings: engine settings for every model, by field name; what a model's own files say wins.
        backend_settings: ``--backend-config``: texts by key, by backend; "" is for all.
        config_name: of the configuration files to prefer (``configs/<this>.pbtxt``).
        namespacing: names were meant to differ by repository; refused at the start where they do.
        auto_complete: whether backends complete configurations.
        name: what the server calls itself in its metadata.
        strict_readiness: ready means that every model that should be is; otherwise that it takes requests.
        load_limit: models that load at the same time.
        metrics: where requests are counted for Prometheus; None where nobody reads it.
        traces: which requests are traced; None for none.
        rate_limiter: which executions may run at the same time; None for all.
        cache: of responses, for the models whose configuration asks for one; None for none.
    """

    def __init__(
        self,
        repositories: Sequence[Path] = (),
        *,
        control: Control = "none",
        load_models: Sequence[str] = (),
        poll_s: float = 15.0,
        settings: Mapping[str, object] | None = None,
        backend_settings: Mapping[str, Mapping[str, str]] | None = None,
        config_name: str = "",
        namespacing: bool = False,
        auto_complete: bool = True,
        name: str = "tritium",
        strict_readiness: bool = True,
        load_limit: int = 4,
        metrics: Metrics | None = None,
        traces: Traces | None = None,
        rate_limiter: RateLimiter | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.traces = traces or Traces()
        self._name = name
        self._control: Control = control
        self._load_models = tuple(load_models)
        self._strict = strict_readiness
        self._poll_s = poll_s
        self._repository = Repository(
            tuple(repositories),
            dict(settings or {}),
            backend_settings=dict(backend_settings or {}),
            config_name=config_name,
            namespacing=namespacing,
            auto_complete=auto_complete,
        )
        # Steps of requests that were let in go on while the server drains.
        services = Services(self._step, self.load, self.unload, self.model_healthy, metrics)
        if cache is not None and metrics is not None:
            metrics.watch_cache(lambda: cache.stats)
        self._cache = cache
        surroundings = Surroundings(services, rate_limiter or RateLimiter(), cache)
        self._catalog = Catalog(self._repository, metrics, load_limit, surroundings)
        self._watcher = Watcher(self._catalog, self._repository, everything=control != "explicit")
        self._polling: asyncio.Task[None] | None = None
        self._single: Plan | None = None
        self._other_names: dict[str, str] = {}
        self._started = False
        self._draining = False

    @classmethod
    def for_model(
        cls,
        name: str,
        checkpoint: Path,
        *,
        backend: str = "tritium",
        max_batch_size: int = 0,
        settings: Mapping[str, object] | None = None,
        other_names: Sequence[str] = (),
        server_name: str = "tritium",
        strict_readiness: bool = True,
        metrics: Metrics | None = None,
        traces: Traces | None = None,
    ) -> Server:
        """A server of one checkpoint, without a repository; the model has version 1.

        Args:
            name: what requests call the model.
            max_batch_size: most rows of one inference request; 0 for tensors without a batch dimension.
            other_names: that requests may call it too; answers, metrics and logs say ``name``.

        Raises:
            TritiumError: INVALID_ARGUMENT when ``max_batch_size`` is negative.
        """
        server = cls(
            settings=settings, name=server_name, strict_readiness=strict_readiness, metrics=metrics, traces=traces
        )
        server._other_names = dict.fromkeys(other_names, name)
        server._single = single(name, checkpoint, backend=backend, max_batch_size=max_batch_size, settings=settings)
        return server

    async def start(self) -> None:
        """Loads the first models; returns when each is ready or has failed (see ``failures``).

        Raises:
            TritiumError: NOT_FOUND when a repository is no folder.
        """
        if self._single is not None:
            await self._catalog.start_single(self._single)
        else:
            await asyncio.to_thread(self._repository.check)
            names = list(dict.fromkeys(self._load_models))
            if self._control != "explicit" or ALL_MODELS in names:
                names = await asyncio.to_thread(self._repository.names)
            if self._control == "poll":
                names = await self._watcher.whole(names)
            await self._catalog.start(names)
        self._started = True
        if self._control == "poll":
            self._polling = asyncio.create_task(self._watcher.run(self._poll_s))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets the running ones finish for at most ``timeout_s``, then unloads everything."""
        self._draining = True
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        _log.info("draining", timeout_s=timeout_s)
        await self._catalog.close(timeout_s)
        if self._cache is not None:
            await self._cache.close()

    @property
    def draining(self) -> bool:
        """Whether ``drain`` has begun."""
        return self._draining

    def live(self) -> bool:
        """Whether the server runs at all."""
        return True

    def ready(self) -> bool:
        """Whether it takes requests and, if strict, every model that should be ready makes progress."""
        return self._started and not self._draining and (not self._strict or self._catalog.ready())

    def failures(self) -> dict[str, str]:
        """Why models could not be loaded the last time it was tried, by name; a line each."""
        return {name: in_words(name, message) for name, message in sorted(self._catalog.failures.items())}

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether that version, or the highest one, would answer now; False for what is unknown."""
        try:
            return not self._draining and self._model(name, version).ready()
        except TritiumError:
            return False

    async def model_healthy(self, name: str, version: str = "") -> bool:
        """The same, and the model itself is asked, where it has a say (``is_ready`` of a Python model)."""
        return self.model_ready(name, version) and await self._model(name, version).healthy()

    def model_reason(self, name: str, version: str = "") -> str:
        """Why that version is not ready, as far as is known; "" when it is, or for what is unknown."""
        try:
            return self._model(name, version).reason
        except TritiumError:
            return ""

    def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions."""
        return ServerMetadata(self._name, distribution_version("tritium"), EXTENSIONS)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Tensors and versions of a model.

        Raises:
            TritiumError: NOT_FOUND, UNAVAILABLE or INVALID_ARGUMENT as for ``infer``.
        """
        model = self._model(name, version)
        versions = (model.version,) if version else tuple(m.version for m in self._catalog.serving(name))
        return model_metadata(model.config, versions)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The completed configuration of a model.

        Raises:
            TritiumError: NOT_FOUND, UNAVAILABLE or INVALID_ARGUMENT as for ``infer``.
        """
        return self._model(name, version).config

    def answers_once(self, name: str, version: str = "") -> bool:
        """Whether a request that asks for no stream has exactly one answer.

        Raises:
            TritiumError: as ``infer`` does for the model.
        """
        return self._model(name, version).answers_once

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answers a request that wants exactly one answer.

        Raises:
            TritiumError: NOT_FOUND for an unknown model or version, UNAVAILABLE while draining, INVALID_ARGUMENT
                for a version that is no number or a request that does not fit the model, UNIMPLEMENTED for a
                model that answers any number of times; whatever the backend says.
        """
        self._refuse_when_draining()
        return await self._model(request.model, request.version).infer(request)

    def model(self, name: str, version: str = "") -> Model:
        """The version of a model that answers, for front ends that ``submit`` to it.

        Raises:
            TritiumError: as ``infer`` does for the model.
        """
        self._refuse_when_draining()
        return self._model(name, version)

    async def infer_stream(self, request: InferRequest) -> AsyncGenerator[InferResponse]:
        """Answers a request; the last answer, and only that, is ``final``. Closing the iterator cancels.

        Raises:
            TritiumError: as ``infer`` does, at the first step; later in place of the final answer.
        """
        self._refuse_when_draining()
        async with aclosing(self._model(request.model, request.version).stream(request)) as answers:
            async for answer in answers:
                yield answer

    async def generate(self, name: str, version: str, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        """Continues one sequence; the last delta, and only that, has ``finish``. Closing the iterator aborts.

        Raises:
            TritiumError: as ``infer`` does for the model; INVALID_ARGUMENT when it is no language model; later in
                place of the last delta.
        """
        self._refuse_when_draining()
        trace = self.traces.begin(name, version, request.id)
        try:
            async with aclosing(self._model(name, version).generate(request, trace)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            if trace is not None:
                trace.release()

    def text_model(self, name: str, version: str = "") -> TextModel:
        """What a front end must know of a language model to make requests for it.

        Raises:
            TritiumError: as ``infer`` does for the model; INVALID_ARGUMENT when it is no language model.
        """
        model = self._model(name, version)
        return TextModel.of(model.name, model.version, model.text_backend(), model.created_s)

    def llm_names(self) -> list[str]:
        """Names of the language models that are served, in order; other names of one follow it."""
        names = sorted({model.name for model in self._catalog.models() if _is_llm(model)})
        return [n for name in names for n in (name, *(o for o, of in self._other_names.items() if of == name))]

    def engines(self) -> list[EngineView]:
        """The engines of all language models that are served."""
        found: list[EngineView] = []
        for model in self._catalog.models():
            if _is_llm(model):
                backend = model.text_backend()
                stats, infos = backend.engine_stats(), backend.engine_infos()
                found.append(EngineView(model.name, model.version, stats, infos, backend.engine_settings()))
        return found

    def statistics(self, name: str = "", version: str = "") -> list[ModelStats]:
        """Counters of the served versions of all models, of one, or of one version.

        Raises:
            TritiumError: INVALID_ARGUMENT, as Triton answers, when there is none of that name or version.
        """
        return self._catalog.statistics(name, version)

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The models of the repositories and those that are loaded, a line for each version."""
        return self._catalog.index(ready_only)

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads a model, or loads it again when its files have changed; returns when it is ready.

        A load that fails leaves what was served before. The load goes on when the caller gives up.

        Args:
            config: a configuration in JSON that takes the place of the model's file.
            files: model files that take the place of the folder's, by their path below it; they want ``config``.

        Raises:
            TritiumError: UNAVAILABLE when loading is not allowed or the server drains, INTERNAL when the
                repository has no such model or its configuration is wrong, INVALID_ARGUMENT when the backend
                cannot load it.
        """
        self._refuse_when_fixed()
        await self._catalog.load(name, config, files)

    async def rescan(self) -> Changes:
        """Makes what is served follow the files of the repositories, in every mode; returns when that is done.

        In mode ``explicit`` only models that are loaded are looked at, in the others all that there are.

        Raises:
            TritiumError: UNAVAILABLE while draining.
        """
        self._refuse_when_draining()
        if self._single is not None:
            return Changes()
        changes = await self._watcher.rescan()
        names = {what: ", ".join(getattr(changes, what)) for what in ("loaded", "unloaded", "failed", "moving")}
        _log.info("repositories are looked through", **names)
        return changes

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service at once; running requests end normally. Unknown names are no error.

        Args:
            unload_dependents: also the steps of an ensemble that only it needs and nobody has loaded by name.

        Raises:
            TritiumError: UNAVAILABLE when unloading is not allowed or the server drains.
        """
        self._refuse_when_fixed()
        self._catalog.unload(name, unload_dependents)

    def _model(self, name: str, version: str) -> Model:
        return self._catalog.find(self._other_names.get(name, name), version)

    def _step(self, request: InferRequest) -> AsyncGenerator[InferResponse]:
        return self._model(request.model, request.version).stream(request)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise TritiumError(Code.UNAVAILABLE, "server is draining", retry_after_s=DRAIN_RETRY_S)

    def _refuse_when_fixed(self) -> None:
        self._refuse_when_draining()
        if self._control != "explicit":
            raise TritiumError(
                Code.UNAVAILABLE,
                "explicit model load / unload is not allowed if polling is enabled or model control is 'none'; "
                "start the server with --model-control-mode explicit",
            )


def _is_llm(model: Model) -> bool:
    return model.state is State.READY and model.is_text
