"""From settings to a running server and back: assemble, listen, load, run until a signal, drain.

The only place that knows all parts. The ports open before the models load: a port that is taken ends the start
at once, and probes see a server that lives and is not ready yet.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import uvloop

from tritium.errors import Code, TritiumError, invalid
from tritium.frontends import http
from tritium.frontends.access import GRPC_PREFIX, Restrictions
from tritium.frontends.banner import banner, with_facts
from tritium.frontends.grpc import GrpcFrontend
from tritium.frontends.grpc_transport import transport
from tritium.frontends.kserve.shared import Shared, header_pattern
from tritium.llm.config import EngineConfig
from tritium.llm.names import find_model, served_names
from tritium.observability import logs
from tritium.observability.log_settings import LogSettings
from tritium.observability.machine import Machine
from tritium.observability.metrics import Metrics, metrics_app
from tritium.observability.model_metrics import parse_metrics_config
from tritium.observability.trace_config import parse_trace_config
from tritium.observability.tracing import Traces
from tritium.serving.cache import parse_cache_config
from tritium.serving.limiter import parse_rate_limit
from tritium.serving.repository import Plan, Repository, single
from tritium.serving.server import ALL_MODELS, Server
from tritium.settings import Effective, ServerSettings
from tritium.settings.parts import groups

_log = logs.get(__name__)

# What listeners get to write their last answers once no request runs any more.
CLOSE_S = 2.0


class Listener(Protocol):
    """A port."""

    async def start(self, host: str, port: int) -> int: ...  # noqa: D102

    async def stop(self, grace_s: float) -> None: ...  # noqa: D102


def run(settings: ServerSettings, engine: Mapping[str, Any], effective: Mapping[str, Effective]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Args:
        engine: engine settings that were given, by field name of ``EngineConfig``.
        effective: all settings, for the banner.

    Raises:
        TritiumError: the settings contradict each other, a port cannot be had, a model cannot be loaded.
    """
    check(settings)
    shared = make_shared(settings)
    metrics = Metrics(
        parse_metrics_config(settings.metrics_config, settings.metrics_interval_ms / 1e3),
        Machine() if settings.allow_cpu_metrics else None,
    )
    traces = Traces(parse_trace_config(settings.trace_config))
    try:
        server = make_server(settings, engine, metrics, traces)
        return uvloop.run(_serve(server, metrics, shared, settings, effective))
    finally:
        traces.close()
        if shared.logs is not None:
            shared.logs.close()


def check(settings: ServerSettings) -> None:
    """Refuses settings that do not go together.

    Raises:
        TritiumError: names them.
    """
    if settings.model is None and not settings.model_repository:
        raise invalid("nothing to serve: give a MODEL (try: tritium serve smollm2) or --model-repository DIR")
    if settings.model is not None and settings.model_repository:
        raise invalid(f"both MODEL ({settings.model}) and --model-repository are given, expected one of them")
    if settings.load_model and settings.model_control_mode != "explicit":
        raise invalid("--load-model needs --model-control-mode explicit", param="load_model")
    if "*" in settings.load_model and len(set(settings.load_model)) > 1:
        raise invalid("Wildcard model name '*' must be the ONLY startup model if specified at all.", param="load_model")
    if settings.model_namespacing and settings.model is not None:
        raise invalid("--model-namespacing needs --model-repository", param="model_namespacing")
    if settings.model is not None and settings.model_control_mode != "none":
        raise invalid(
            f"--model-control-mode {settings.model_control_mode} needs --model-repository", param="model_control_mode"
        )
    if settings.served_model_name and settings.model is None:
        raise invalid("--served-model-name needs a MODEL: in a repository, folders name the models")
    ports = addresses(settings)
    if not ports:
        raise invalid("--no-allow-http, --no-allow-grpc and --no-allow-metrics together: nobody could ask anything")
    taken: dict[int, str] = {}
    for name, _, port in ports:
        if port and taken.setdefault(port, name) != name:
            raise invalid(f"--{taken[port]}-port and --{name}-port are both {port}", param=f"{name}_port")


def addresses(settings: ServerSettings) -> list[tuple[str, str, int]]:
    """Name, host and port of what is opened."""
    every = [
        ("http", settings.allow_http, settings.host, settings.http_port),
        ("grpc", settings.allow_grpc, settings.grpc_host or settings.host, settings.grpc_port),
        ("metrics", settings.allow_metrics, settings.metrics_host or settings.host, settings.metrics_port),
    ]
    return [(name, host, port) for name, wanted, host, port in every if wanted]


def make_shared(settings: ServerSettings) -> Shared:
    """What both front ends share; sets the logging up.

    Raises:
        TritiumError: a setting that does not fit.
    """
    http_option, grpc_option = "--http-restricted-api", "--grpc-restricted-protocol"
    return Shared(
        logs=LogSettings(
            settings.log_level,
            settings.log_format,
            settings.log_file,
            info=settings.log_info,
            warning=settings.log_warning,
            error=settings.log_error,
            verbose=settings.log_verbose,
        ),
        http_headers=header_pattern("--http-header-forward-pattern", settings.http_header_forward_pattern),
        grpc_headers=header_pattern("--grpc-header-forward-pattern", settings.grpc_header_forward_pattern),
        http_access=Restrictions(http_option, settings.http_restricted_api),
        grpc_access=Restrictions(grpc_option, settings.grpc_restricted_protocol, GRPC_PREFIX),
    )


def make_server(
    settings: ServerSettings, engine: Mapping[str, Any], metrics: Metrics, traces: Traces | None = None
) -> Server:
    """The server of one model or of repositories; nothing is loaded yet."""
    if settings.model is None:
        return Server(
            [Path(folder).expanduser() for folder in settings.model_repository],
            control=settings.model_control_mode,
            load_models=settings.load_model,
            poll_s=settings.repository_poll_secs,
            settings=engine,
            backend_settings=groups("--backend-config", settings.backend_config),
            config_name=settings.model_config_name,
            namespacing=settings.model_namespacing,
            auto_complete=not settings.disable_auto_complete_config,
            name=settings.server_name,
            strict_readiness=settings.strict_readiness,
            load_limit=settings.model_load_limit,
            metrics=metrics,
            traces=traces,
            rate_limiter=parse_rate_limit(settings.rate_limit, settings.rate_limit_resource),
            cache=parse_cache_config(settings.cache_config),
        )
    name, *others = served_names(settings.model, settings.served_model_name)
    return Server.for_model(
        name,
        find_model(settings.model),
        max_batch_size=_rows(engine),
        settings=engine,
        other_names=others,
        server_name=settings.server_name,
        strict_readiness=settings.strict_readiness,
        metrics=metrics,
        traces=traces,
    )


def _rows(engine: Mapping[str, Any]) -> int:
    """As in a repository, the batch dimension of tensors goes up to the sequences that run together."""
    return engine.get("max_rows", EngineConfig.__dataclass_fields__["max_rows"].default)


def first_plans(settings: ServerSettings, engine: Mapping[str, Any]) -> Iterator[tuple[str, Plan | TritiumError]]:
    """By name, what ``make_server``'s server would load at its start, one model after the other, or why it cannot.

    Raises:
        TritiumError: NOT_FOUND for the model, or a repository that is no folder.
    """
    if settings.model is not None:
        (name, *_), checkpoint = served_names(settings.model, settings.served_model_name), find_model(settings.model)
        yield name, single(name, checkpoint, backend="tritium", max_batch_size=_rows(engine), settings=engine)
        return
    repository = Repository(
        [Path(folder).expanduser() for folder in settings.model_repository],
        dict(engine),
        groups("--backend-config", settings.backend_config),
        settings.model_config_name,
        not settings.disable_auto_complete_config,
    )
    repository.check()
    everything = settings.model_control_mode != "explicit" or ALL_MODELS in settings.load_model
    for name in repository.names() if everything else dict.fromkeys(settings.load_model):
        try:
            yield name, repository.plan(name)
        except TritiumError as error:
            yield name, error


async def _serve(
    server: Server, metrics: Metrics, shared: Shared, settings: ServerSettings, effective: Mapping[str, Effective]
) -> int:
    begun = time.monotonic()
    stop = Signals(server)
    application = http.app(server, metrics, shared, max_body_bytes=settings.http_max_body_bytes)
    listeners = {
        "http": http.HttpListener(application, reuse_port=settings.reuse_http_port),
        "grpc": GrpcFrontend(
            server, shared, max_message_bytes=settings.grpc_max_message_bytes, transport=transport(settings)
        ),
        "metrics": http.HttpListener(metrics_app(metrics)),
    }
    opened: dict[str, Listener] = {}
    urls: dict[str, str] = {}
    drained = False
    try:
        for name, host, port in addresses(settings):
            bound = await _listen(listeners[name], name, host, port)
            opened[name] = listeners[name]
            urls[name] = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        _log.info("loading", **urls)
        if not await stop.while_running(server.start()):
            return 0
        _refuse_failures(server, settings)
        # What was made while loading lives as long as we do: keep the collector from walking it in every pass.
        gc.collect()
        gc.freeze()
        # Whole passes are put off until what is new is a quarter of what the last one saw, the frozen included.
        gc.collect()
        names = served_names(settings.model, settings.served_model_name) if settings.model is not None else ()
        in_force = with_facts(effective, urls, names)
        print(banner(server, urls, in_force, time.monotonic() - begun), flush=True)
        await stop.first.wait()
        _log.info("stopping: requests in flight may finish", timeout_s=settings.exit_timeout_secs)
        drained = await stop.while_running(server.drain(settings.exit_timeout_secs))
        return 0
    finally:
        if not drained:
            await server.drain(0)
        await asyncio.gather(*(listener.stop(CLOSE_S) for listener in opened.values()))


async def _listen(listener: Listener, name: str, host: str, port: int) -> int:
    try:
        return await listener.start(host, port)
    except TritiumError as error:
        hint = f"choose another with --{name}-port, or end what listens there"
        raise TritiumError(error.code, f"{error.message} ({hint})", param=f"{name}_port") from None


class Signals:
    """SIGTERM and SIGINT: the first one ends the service, the next one ends the patience with what still runs.

    SIGHUP looks through the repositories for changes.
    """

    def __init__(self, server: Server | None = None) -> None:
        self._rescans: set[asyncio.Task[None]] = set()
        self.first = asyncio.Event()
        self._last = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrive)
        if server is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._rescan, server)

    def _rescan(self, server: Server) -> None:
        task = asyncio.create_task(_look_through(server))
        self._rescans.add(task)
        task.add_done_callback(self._rescans.discard)

    def _arrive(self) -> None:
        (self._last if self.first.is_set() else self.first).set()

    async def while_running(self, work: Any) -> bool:
        """Awaits ``work`` unless a (further) signal comes first; whether it ended by itself."""
        event = self._last if self.first.is_set() else self.first
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return False
        await task
        return True


async def _look_through(server: Server) -> None:
    try:
        await server.rescan()
    except TritiumError as error:
        _log.warning("SIGHUP is passed over", reason=error.message)


def _refuse_failures(server: Server, settings: ServerSettings) -> None:
    """Ends the start when a model is missing. Each reason has been logged: it is said again only to who did not see it.

    Raises:
        TritiumError: names the models.
    """
    failures = server.failures()
    if not failures or not (settings.exit_on_error or settings.model is not None):
        return
    hint = "" if settings.model is not None else " (--no-exit-on-error serves the others)"
    if settings.log_file or not settings.log_error:
        said = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    else:
        said = f"{', '.join(failures)}: see above"
    raise TritiumError(Code.UNAVAILABLE, f"cannot load {said}{hint}")
