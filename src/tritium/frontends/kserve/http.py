"""The KServe v2 routes over HTTP, with Triton's extensions, statuses, content types and texts.

One ASGI application finds the route itself and uses no framework's router: Triton looks at the path as it was
sent (no percent escapes, no trailing slash), and the ``infer`` route must cost little.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING

import orjson

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.frontends.access import http_refusal
from tritium.frontends.asgi import JSON, TEXT, ClientLeft, ClientWatch, Receive, Scope, Send, reply
from tritium.frontends.kserve import codings, generate, json_codec
from tritium.frontends.kserve.call import Call, Route, send_error
from tritium.frontends.kserve.control import Control
from tritium.frontends.kserve.shared import Shared, forwarded
from tritium.frontends.kserve.statistics import as_json
from tritium.observability import logs
from tritium.observability.tracing import Trace
from tritium.types import InferRequest

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

_MODEL_PATH = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|generate|generate_stream|ready|config|stats))?"
).fullmatch
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_STREAM_HEADERS = [
    (b"content-type", _EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall pass each event on at once
]


class KserveHttp:
    """The ASGI application of everything below ``/v2``.

    Args:
        shared: what both protocols share.
        max_body_bytes: most bytes that a compressed body may become.
        write_timeout_s: how long a client of a stream may read nothing before its request is cancelled.
    """

    def __init__(
        self,
        server: Server,
        shared: Shared | None = None,
        *,
        max_body_bytes: int = 64 << 20,
        write_timeout_s: float = 60.0,
    ) -> None:
        self._server = server
        self._shared = shared or Shared()
        self._control = Control(server, self._shared, max_body_bytes)
        self._max_body_bytes = max_body_bytes
        self._write_timeout_s = write_timeout_s
        self._fixed = {
            "/v2": Route(("GET",), self._metadata, "metadata"),
            "/v2/health/live": Route(("GET",), self._live, "health"),
            "/v2/health/ready": Route(("GET",), self._ready, "health"),
            "/v2/models/stats": Route(("GET",), self._stats, "statistics"),
        }
        self._of_model = {
            "infer": Route(("POST",), self._infer, "inference"),
            "generate": Route(("POST",), self._generate, "inference"),
            "generate_stream": Route(("POST",), self._generate_stream, "inference"),
            "ready": Route(("GET",), self._model_ready, "health"),
            "config": Route(("GET",), self._config, "model-config"),
            "stats": Route(("GET",), self._stats, "statistics"),
            None: Route(("GET",), self._model_metadata, "metadata"),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; raises ``asgi.ClientLeft`` when nobody waits for the answer any more."""
        found = self._find(scope["raw_path"].decode("latin-1"))
        if found is None:
            return await reply(send, 404, b'{"error":"Not Found"}', TEXT)
        route, name, version, verb = found
        if scope["method"] not in route.methods:
            allowed = ", ".join(route.methods).encode()
            return await reply(send, 405, b'{"error":"Method Not Allowed"}', TEXT, [(b"allow", allowed)])
        call = Call(scope, receive, send, name, version, verb)
        try:
            if self._shared.http_access:
                missing = self._shared.http_access.refusal(route.api, lambda name: call.header(name.encode()))
                if missing is not None:
                    raise http_refusal(missing)
            await route.answer(call)
        except TritiumError as error:
            await send_error(send, error, JSON)

    def _find(self, path: str) -> tuple[Route, str, str, str] | None:
        """The route of a path, the name and the version in it, and the kind of memory."""
        if path in self._fixed:
            return self._fixed[path], "", "", ""
        if found := _MODEL_PATH(path):
            name, version, verb = found.groups()
            return self._of_model[verb], name, version or "", ""
        if control := self._control.find(path):
            route, name, kind = control
            return route, name, "", kind
        return None

    async def _live(self, call: Call) -> None:
        await reply(call.send, 200 if self._server.live() else 400, content_type=None)

    async def _ready(self, call: Call) -> None:
        await reply(call.send, 200 if self._server.ready() else 400, content_type=None)

    async def _model_ready(self, call: Call) -> None:
        if await self._server.model_healthy(call.name, call.version):
            await reply(call.send, 200, content_type=None)
        else:
            await reply(call.send, 400, b'{"error":"Model version not ready"}', TEXT)

    async def _metadata(self, call: Call) -> None:
        metadata = self._server.server_metadata()
        await call.answer({"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)})

    async def _model_metadata(self, call: Call) -> None:
        metadata = self._server.model_metadata(call.name, call.version)
        await call.answer(
            {
                "name": metadata.name,
                "versions": list(metadata.versions),
                "platform": metadata.platform,
                "inputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in metadata.inputs],
                "outputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in metadata.outputs],
            },
        )

    async def _config(self, call: Call) -> None:
        await call.answer(self._server.model_config(call.name, call.version).to_json())

    async def _stats(self, call: Call) -> None:
        found = self._server.statistics(call.name, call.version)
        await call.answer({"model_stats": [as_json(stats) for stats in found]})

    async def _infer(self, call: Call) -> None:
        arrived_ns = monotonic_ns()
        try:
            config = self._model(call)
        except TritiumError as error:
            return await send_error(call.send, error, TEXT)
        body = await call.body(self._max_body_bytes)
        header_length = call.header(b"inference-header-content-length")
        if not body and header_length is None:
            header_length = "0"  # an empty body is the raw tensor without elements
        asked = json_codec.read(body, header_length, config, call.name, call.version, arrived_ns, self._shared.regions)
        del body
        with self._accompany(call, asked.request) as trace:
            response = None
            with ClientWatch(call.receive) as watch:
                response = await self._server.infer(asked.request)
            if watch.gone or response is None:
                return
            try:
                if response.error is not None:
                    raise response.error
                parts, head_size = json_codec.write(asked, response, config)
            except TritiumError as error:
                return await send_error(call.send, error, TEXT)
            if trace is not None:
                trace.stamp("HTTP_SEND_START")
            await _send_infer(call, parts, head_size)

    @contextmanager
    def _accompany(self, call: Call, request: InferRequest) -> Generator[Trace | None]:
        """Gives a request the headers that are forwarded and, if it is one of those, its trace until it is answered."""
        if self._shared.http_headers is not None:
            request.parameters |= forwarded(self._shared.http_headers, call.spelled_headers())
        traces = self._server.traces
        headers = _context(call) if traces.joins else None
        trace = request.trace = traces.begin(request.model, request.version, request.id, headers, request.arrived_ns)
        if trace is None:
            yield None
            return
        trace.stamp("HTTP_RECV_START", request.arrived_ns)
        trace.stamp("HTTP_RECV_END")
        try:
            yield trace
        finally:
            trace.stamp("HTTP_SEND_END")
            trace.release()

    def _model(self, call: Call) -> ModelConfig:
        """The configuration of a model that may be asked for exactly one answer."""
        config = self._server.model_config(call.name, call.version)
        # A language model answers once where no stream is asked for, whatever its file says.
        if config.decoupled and not self._server.answers_once(call.name, call.version):
            raise TritiumError(
                Code.UNIMPLEMENTED, "HTTP end point doesn't support models with decoupled transaction policy"
            )
        return config

    async def _generate(self, call: Call) -> None:
        request = await self._read_generate(call)
        found = []
        with self._accompany(call, request), ClientWatch(call.receive) as watch:
            async with aclosing(self._server.infer_stream(request)) as answers:
                async for answer in answers:
                    if not answer.empty or answer.error is not None:
                        found.append(answer)
                    if len(found) > 1:
                        break
        if watch.gone:
            return
        if len(found) != 1:
            return await reply(call.send, 200, orjson.dumps({"error": generate.NOT_ONE}))
        try:
            body = generate.write(found[0])
        except TritiumError as error:
            return await reply(call.send, generate.status_of(error), generate.write_error(error), TEXT)
        await reply(call.send, 200, body)

    async def _generate_stream(self, call: Call) -> None:
        request = await self._read_generate(call)
        started = False
        with self._accompany(call, request), ClientWatch(call.receive) as watch:
            try:
                async with aclosing(self._server.infer_stream(request)) as answers:
                    async for answer in answers:
                        if answer.empty and answer.error is None:
                            continue
                        try:
                            event, status = generate.write(answer), 200
                        except TritiumError as error:
                            event, status = generate.write_error(error), generate.status_of(error)
                        await self._send_event(call, event, None if started else status)
                        started = True
            except TritiumError as error:
                if not started:
                    raise
                await self._send_event(call, generate.write_error(error), None)
            if not started:
                await call.send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await call.send({"type": "http.response.body", "body": b""})
        if watch.gone:
            _log.debug("client left", model=call.name, id=request.id)

    async def _read_generate(self, call: Call) -> InferRequest:
        arrived_ns = monotonic_ns()
        config = self._server.model_config(call.name, call.version)
        body = await call.body(self._max_body_bytes)
        return generate.read(body, config, call.name, call.version, arrived_ns)

    async def _send_event(self, call: Call, event: bytes, first_status: int | None) -> None:
        """Sends one event, after the head of the answer when there is a status."""
        if first_status is not None:
            await call.send({"type": "http.response.start", "status": first_status, "headers": _STREAM_HEADERS})
        try:
            async with asyncio.timeout(self._write_timeout_s):
                body = b"data: " + event + b"\n\n"
                await call.send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientLeft(f"the client read nothing for {self._write_timeout_s:g} s") from None


def _context(call: Call) -> dict[str, str]:
    """The headers of W3C Trace Context that a call has."""
    found = {name: call.header(name.encode()) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in found.items() if value is not None}


async def _send_infer(call: Call, parts: list[bytes | memoryview], head_size: int) -> None:
    headers: list[tuple[bytes, bytes]] = []
    if head_size:
        headers.append((b"inference-header-content-length", str(head_size).encode()))
    coding = codings.choose(call.header(b"accept-encoding"))
    if coding is None:
        body = parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)
    else:
        body = await codings.deflate(parts, coding)
        headers.append((b"content-encoding", coding.encode()))
    await reply(call.send, 200, body, b"application/octet-stream" if head_size else JSON, headers)
