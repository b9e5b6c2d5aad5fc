"""The HTTP port: KServe v2, OpenAI, health and metrics as one application, and the listener that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from tritium.errors import Code, TritiumError
from tritium.frontends.access import Api, http_refusal
from tritium.frontends.asgi import JSON, App, BoundedBody, ClientLeft, Event, Receive, Scope, Send, reply, too_large
from tritium.frontends.connection import Connection
from tritium.frontends.gate import Gate
from tritium.frontends.kserve.call import send_error
from tritium.frontends.kserve.http import KserveHttp
from tritium.frontends.kserve.shared import Shared
from tritium.frontends.kserve.short import ShortInfer
from tritium.frontends.openai.routes import error_response
from tritium.frontends.openai.routes import routes as openai_routes
from tritium.observability import logs
from tritium.observability.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

MAX_REQUEST_ID = 128


def app(
    server: Server,
    metrics: Metrics | None = None,
    shared: Shared | None = None,
    *,
    max_body_bytes: int = 64 << 20,
    body_timeout_s: float = 30.0,
    write_timeout_s: float = 60.0,
    short: bool = True,
) -> App:
    """The application of the HTTP port.

    Args:
        metrics: what ``/metrics`` shows; None leaves that route out.
        shared: what the gRPC port has too.
        max_body_bytes: largest body that is taken, before and after decompression; more is 413.
        body_timeout_s: how long nothing of a body may come; then 408.
        write_timeout_s: how long a client of a stream may read nothing.
        short: answer plain inference without ASGI (``kserve.short``).
    """
    shared = shared or Shared()
    kserve = KserveHttp(server, shared, max_body_bytes=max_body_bytes, write_timeout_s=write_timeout_s)
    rest = Router([*_own_routes(server, metrics), *openai_routes(server)], redirect_slashes=False, default=_not_found)
    way = ShortInfer(server, shared, max_body_bytes, closed=not short)
    return _Entrance(server, kserve, rest, shared, max_body_bytes, body_timeout_s, way)


class _Entrance:
    """Where every HTTP request comes in: limits, request id, the choice of a front end, the last error handler.

    All but those that a listener answers the short way: ``protocol`` makes what does so.
    """

    def __init__(
        self,
        server: Server,
        kserve: App,
        rest: App,
        shared: Shared,
        max_body_bytes: int,
        body_timeout_s: float,
        short: ShortInfer,
    ) -> None:
        self._server = server
        self._shared = shared
        self._kserve = kserve
        self._rest = rest
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._short = short

    def protocol(self, **more: Any) -> Gate:
        """What answers a new connection."""
        return Gate(self._short, self._body_timeout_s, **more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        length = b""
        extra: list[tuple[bytes, bytes]] = []
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = value
            elif name == b"x-request-id" and _is_request_id(value):
                extra.append((name, value))
                logs.request_id.set(value.decode("ascii"))
        if self._server.draining:
            extra.append((b"connection", b"close"))
        if extra:
            send = _with_headers(send, extra)
        try:
            if length.isdigit() and int(length) > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            receive = BoundedBody(receive, self._max_body_bytes, self._body_timeout_s)
            if scope["raw_path"].startswith(b"/v2"):
                await self._kserve(scope, receive, send)
            else:
                self._refuse_restricted(scope)
                # Starlette raises HTTPException, instead of answering itself, only where there is an application.
                scope["app"] = self
                await self._rest(scope, receive, send)
        except Exception as error:
            await _fail(scope, receive, send, error)

    def _refuse_restricted(self, scope: Scope) -> None:
        """The routes that Triton has not belong to its groups all the same, or a restriction would be worth nothing."""
        if not self._shared.http_access:
            return
        path: str = scope["path"]
        api = _OWN_APIS.get(path)
        if path.startswith("/v1/"):
            api = "metadata" if scope["method"] == "GET" else "inference"
        if api is not None:
            given = dict(reversed(scope["headers"]))
            missing = self._shared.http_access.refusal(api, lambda name: given.get(name.encode()))
            if missing is not None:
                raise http_refusal(missing)


# Routes outside of /v2 and /v1 -> the group that they belong to.
_OWN_APIS: dict[str, Api] = {"/health": "health", "/ready": "health", "/reload": "model-repository"}


def _is_request_id(value: bytes) -> bool:
    return 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.decode("ascii").isprintable()


def _with_headers(send: Send, extra: list[tuple[bytes, bytes]]) -> Send:
    async def send_with(event: Event) -> None:
        if event["type"] == "http.response.start":
            event["headers"] = [*event.get("headers", ()), *extra]
        await send(event)

    return send_with


async def _fail(scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
    """Answers a request that ended with an exception, where anybody still waits for an answer."""
    if isinstance(error, ClientLeft):
        _log.debug("client left", path=scope["path"], reason=str(error))
    elif isinstance(error, HTTPException):
        allowed = [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]
        code = Code.NOT_FOUND if error.status_code == 404 else Code.INVALID_ARGUMENT
        send = _with_headers(send, allowed)
        await _refuse(scope, receive, send, TritiumError(code, error.detail), error.status_code)
    elif isinstance(error, TritiumError):
        await _refuse(scope, receive, send, error)
    else:
        _log.error("request failed", path=scope["path"], error=error, exc_info=error)
        try:
            await _refuse(scope, receive, send, TritiumError(Code.INTERNAL, "internal error"))
        except RuntimeError:
            raise error from None  # the answer had begun: the connection is all that can be ended


async def _refuse(scope: Scope, receive: Receive, send: Send, error: TritiumError, status: int | None = None) -> None:
    """Sends an error in the form of the routes that the path belongs to."""
    if scope["raw_path"].startswith(b"/v1/"):
        response = error_response(error)
        response.status_code = status or response.status_code
        await response(scope, receive, send)
    elif status is not None:
        await reply(send, status, orjson.dumps({"error": error.message}))
    else:
        await send_error(send, error, JSON)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(scope, receive, send, TritiumError(Code.NOT_FOUND, "Not Found"))


def _own_routes(server: Server, metrics: Metrics | None) -> list[Route]:
    async def health(request: Request) -> Response:
        return _json({"live": server.live()}, 200 if server.live() else 503)

    async def ready(request: Request) -> Response:
        if server.ready():
            return _json({"ready": True}, 200)
        return _json({"ready": False, "reason": _why_not_ready(server)}, 503)

    async def reload(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise TritiumError(Code.PERMISSION_DENIED, "requests from another origin are not allowed here")
        changes = await server.rescan()
        return _json(dataclasses.asdict(changes), 200)

    routes = [Route("/health", health), Route("/ready", ready), Route("/reload", reload, methods=["POST"])]
    if metrics is not None:

        async def page(request: Request) -> Response:
            return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

        routes.append(Route("/metrics", page))
    return routes


def _json(value: object, status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _why_not_ready(server: Server) -> str:
    if server.draining:
        return "the server is draining"
    failed = server.failures()
    if failed:
        return "; ".join(f"model '{name}' could not be loaded: {why}" for name, why in failed.items())
    named: list[str] = []
    for entry in server.index():
        if not server.model_ready(entry.name, entry.version):
            # READY in the index is that it is loaded; its engine may be gone or stalled for the moment.
            state = "not ready" if entry.state == "READY" else entry.state or "not loaded"
            why = entry.reason or server.model_reason(entry.name, entry.version)
            named.append(f"model '{entry.name}' is {state}{': ' if why else ''}{why}")
    return "; ".join(named) or "the server is starting"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals belong to ``launch``."""
        yield


class HttpListener:
    """One HTTP port that serves an ASGI application.

    Args:
        keep_alive_s: how long an idle connection stays open.
        reuse_port: share the port with other servers.

    Attributes:
        port: where it listens; 0 before ``start``.
    """

    def __init__(self, application: App, *, keep_alive_s: int = 75, reuse_port: bool = False) -> None:
        self._reuse_port = reuse_port
        self._config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=application.protocol if isinstance(application, _Entrance) else Connection,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
        )
        self._uvicorn = _Uvicorn(self._config)
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> int:
        """Listens; returns the port, which matters when 0 was asked for.

        Raises:
            TritiumError: UNAVAILABLE when the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server(
                (host, port), family=family, backlog=self._config.backlog, reuse_port=self._reuse_port
            )
        except OSError as error:
            raise TritiumError(Code.UNAVAILABLE, f"HTTP cannot listen on {host}:{port}: {error.strerror}") from error
        self.port = listening.getsockname()[1]
        self._serving = asyncio.create_task(self._uvicorn.serve([listening]))
        while not self._uvicorn.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.001)
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections and closes idle ones; answers under way have ``grace_s`` and then are cancelled.

        Each of those says ``Connection: close`` if it has not begun.
        """
        if self._serving is None:
            return
        self._config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._uvicorn.should_exit = True
        await self._serving
        self._serving = None


async def serve(application: App, host: str = "127.0.0.1", port: int = 8000) -> HttpListener:
    """Starts a listener for an application; end it with ``stop``."""
    listener = HttpListener(application)
    await listener.start(host, port)
    return listener
