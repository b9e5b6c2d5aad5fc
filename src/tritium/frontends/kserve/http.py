"""The KServe v2 routes over HTTP, with Triton's extensions, statuses, content types and texts.

One ASGI application finds the route itself and uses no framework's router: Triton looks at the path as it was
sent (no percent escapes, no trailing slash), and the ``infer`` route must cost little.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.asgi import (
    JSON,
    TEXT,
    ClientLeft,
    ClientWatch,
    Receive,
    Scope,
    Send,
    error_headers,
    read_body,
    reply,
)
from tritium.frontends.kserve import codings, generate, json_codec
from tritium.frontends.kserve.json_text import boolean, members, parse, shown, string
from tritium.frontends.kserve.statistics import as_json
from tritium.observability import logs

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

_MODEL_PATH = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|generate|generate_stream|ready|config|stats))?"
).fullmatch
_REPOSITORY_PATH = re.compile(r"/v2/repository(?:/[^/]+)?/(?:(index)|models/([^/]+)/(load|unload))").fullmatch
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_STREAM_HEADERS = [
    (b"content-type", _EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall pass each event on at once
]


class Call(NamedTuple):
    """One HTTP request on its way through a route."""

    scope: Scope
    receive: Receive
    send: Send
    name: str = ""
    version: str = ""

    def header(self, name: bytes) -> str | None:
        """The first header of that name (lower case)."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value.decode("latin-1")
        return None


Route = Callable[[Call], Awaitable[None]]


class KserveHttp:
    """The ASGI application of everything below ``/v2``.

    Args:
        max_body_bytes: most bytes that a compressed body may become.
        write_timeout_s: how long a client of a stream may read nothing before its request is cancelled.
    """

    def __init__(self, server: Server, *, max_body_bytes: int = 64 << 20, write_timeout_s: float = 60.0) -> None:
        self._server = server
        self._max_body_bytes = max_body_bytes
        self._write_timeout_s = write_timeout_s
        self._fixed: dict[str, tuple[str, Route]] = {
            "/v2": ("GET", self._metadata),
            "/v2/health/live": ("GET", self._live),
            "/v2/health/ready": ("GET", self._ready),
            "/v2/models/stats": ("GET", self._stats),
        }
        self._of_model: dict[str | None, tuple[str, Route]] = {
            "infer": ("POST", self._infer),
            "generate": ("POST", self._generate),
            "generate_stream": ("POST", self._generate_stream),
            "ready": ("GET", self._model_ready),
            "config": ("GET", self._config),
            "stats": ("GET", self._stats),
            None: ("GET", self._model_metadata),
        }
        self._of_repository: dict[str, tuple[str, Route]] = {
            "index": ("POST", self._index),
            "load": ("POST", self._load),
            "unload": ("POST", self._unload),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; raises ``asgi.ClientLeft`` when nobody waits for the answer any more."""
        method, route, name, version = self._find(scope["raw_path"].decode("latin-1"))
        if route is None:
            return await reply(send, 404, b'{"error":"Not Found"}', TEXT)
        if scope["method"] != method:
            return await reply(send, 405, b'{"error":"Method Not Allowed"}', TEXT, [(b"allow", method.encode())])
        try:
            await route(Call(scope, receive, send, name, version))
        except TritiumError as error:
            await send_error(send, error, JSON)

    def _find(self, path: str) -> tuple[str, Route | None, str, str]:
        if path in self._fixed:
            return *self._fixed[path], "", ""
        if found := _MODEL_PATH(path):
            name, version, verb = found.groups()
            return *self._of_model[verb], name, version or ""
        if found := _REPOSITORY_PATH(path):
            index, name, verb = found.groups()
            return *self._of_repository[index or verb], name or "", ""
        return "", None, "", ""

    async def _live(self, call: Call) -> None:
        await reply(call.send, 200 if self._server.live() else 400, content_type=None)

    async def _ready(self, call: Call) -> None:
        await reply(call.send, 200 if self._server.ready() else 400, content_type=None)

    async def _model_ready(self, call: Call) -> None:
        if self._server.model_ready(call.name, call.version):
            await reply(call.send, 200, content_type=None)
        else:
            await reply(call.send, 400, b'{"error":"Model version not ready"}', TEXT)

    async def _metadata(self, call: Call) -> None:
        metadata = self._server.server_metadata()
        await _reply_json(
            call, {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}
        )

    async def _model_metadata(self, call: Call) -> None:
        metadata = self._server.model_metadata(call.name, call.version)
        await _reply_json(
            call,
            {
                "name": metadata.name,
                "versions": list(metadata.versions),
                "platform": metadata.platform,
                "inputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in metadata.inputs],
                "outputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in metadata.outputs],
            },
        )

    async def _config(self, call: Call) -> None:
        await _reply_json(call, self._server.model_config(call.name, call.version).to_json())

    async def _stats(self, call: Call) -> None:
        found = self._server.statistics(call.name, call.version)
        await _reply_json(call, {"model_stats": [as_json(stats) for stats in found]})

    async def _infer(self, call: Call) -> None:
        arrived_ns = monotonic_ns()
        try:
            config = self._model(call)
        except TritiumError as error:
            return await send_error(call.send, error, TEXT)
        body = await self._body(call)
        header_length = call.header(b"inference-header-content-length")
        if not body and header_length is None:
            header_length = "0"  # an empty body is the raw tensor without elements
        asked = json_codec.read(body, header_length, config, call.name, call.version, arrived_ns)
        del body
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
        await _send_infer(call, parts, head_size)

    def _model(self, call: Call) -> ModelConfig:
        """The configuration of a model that may be asked for exactly one answer."""
        config = self._server.model_config(call.name, call.version)
        # A language model answers once where no stream is asked for, whatever its file says.
        if config.decoupled and config.name not in self._server.llm_names():
            raise TritiumError(
                Code.UNIMPLEMENTED, "HTTP end point doesn't support models with decoupled transaction policy"
            )
        return config

    async def _body(self, call: Call) -> bytes:
        body = await read_body(call.receive)
        return await codings.inflate(body, call.header(b"content-encoding"), self._max_body_bytes)

    async def _generate(self, call: Call) -> None:
        request = await self._read_generate(call)
        found = []
        with ClientWatch(call.receive) as watch:
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
            return await send_error(call.send, error, TEXT)
        await reply(call.send, 200, body)

    async def _generate_stream(self, call: Call) -> None:
        request = await self._read_generate(call)
        started = False
        with ClientWatch(call.receive) as watch:
            try:
                async with aclosing(self._server.infer_stream(request)) as answers:
                    async for answer in answers:
                        if answer.empty and answer.error is None:
                            continue
                        try:
                            event, status = generate.write(answer), 200
                        except TritiumError as error:
                            event, status = generate.write_error(error), error.status.v2
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

    async def _read_generate(self, call: Call) -> Any:
        arrived_ns = monotonic_ns()
        config = self._server.model_config(call.name, call.version)
        body = await self._body(call)
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

    async def _index(self, call: Call) -> None:
        body = await self._body(call)
        ready = False
        if body:
            ready = boolean(members(parse(body)).get("ready", False), "Unable to parse 'ready'")
        found = self._server.index(ready)
        await _reply_json(call, [_index_entry(entry) for entry in found])

    async def _load(self, call: Call) -> None:
        self._refuse_other_origin(call)
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in (await self._control_parameters(call)).items():
            if key == "config":
                config = string(value, "Unable to parse 'config'")
            elif key.startswith("file:"):
                files[key.removeprefix("file:")] = _file(key, string(value, f"Unable to parse '{shown(key)}'"))
            else:
                raise invalid(f"unrecognized request parameter '{shown(key)}'", param=key)
        await self._server.load(call.name, config, files or None)
        await reply(call.send, 200)

    async def _unload(self, call: Call) -> None:
        self._refuse_other_origin(call)
        given = await self._control_parameters(call)
        dependents = boolean(given.get("unload_dependents", False), "Unable to parse 'unload_dependents'")
        await self._server.unload(call.name, dependents)
        await reply(call.send, 200)

    async def _control_parameters(self, call: Call) -> dict[str, Any]:
        if call.name in (".", ".."):
            raise TritiumError(Code.INTERNAL, f"failed to load '{call.name}', failed to poll from model repository")
        body = await self._body(call)
        if not body:
            return {}
        return members(members(parse(body)).get("parameters", {}), "Unable to parse 'parameters': ")

    def _refuse_other_origin(self, call: Call) -> None:
        """A page of another site in somebody's browser shall not load or unload models."""
        origin = call.header(b"origin")
        if origin is not None and origin.partition("://")[2] != (call.header(b"host") or ""):
            raise TritiumError(
                Code.PERMISSION_DENIED, f"requests from the origin '{shown(origin)}' are not allowed here"
            )


async def send_error(send: Send, error: TritiumError, content_type: bytes) -> None:
    """Sends an error in the form of the v2 routes."""
    await reply(send, error.status.v2, generate.write_error(error), content_type, error_headers(error))


async def _reply_json(call: Call, value: Any) -> None:
    await reply(call.send, 200, orjson.dumps(value))


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


def _index_entry(entry: Any) -> dict[str, str]:
    found = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {key: value for key, value in found.items() if value}


def _file(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise invalid(f"'{shown(key)}' is not base64 data", param=key) from None
