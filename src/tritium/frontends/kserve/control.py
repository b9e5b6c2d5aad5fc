"""The routes below ``/v2`` that look at or change the server: repository, shared memory, trace and log settings."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any, cast

from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.asgi import reply
from tritium.frontends.kserve.call import Call, Route
from tritium.frontends.kserve.json_text import boolean, internal, member, members, parse, shown, string
from tritium.frontends.kserve.shared import Shared
from tritium.frontends.kserve.shared_memory import Kind, Region
from tritium.observability.log_settings import SWITCHES, LogSettings, Setting

if TYPE_CHECKING:
    from tritium.serving.server import Server

_REPOSITORY = re.compile(r"/v2/repository(?:/[^/]+)?/(?:(index)|models/([^/]+)/(load|unload))").fullmatch
_MEMORY = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?/(status|register|unregister)").fullmatch
_TRACE = re.compile(r"/v2/(?:models/([^/]+)/)?trace/setting").fullmatch


class Control:
    """Finds and answers those routes.

    Args:
        max_body_bytes: most bytes that a compressed body may become.
    """

    def __init__(self, server: Server, shared: Shared, max_body_bytes: int) -> None:
        self._server = server
        self._shared = shared
        self._max_body_bytes = max_body_bytes
        self._routes = {
            "index": Route(("POST",), self._index, "model-repository"),
            "load": Route(("POST",), self._load, "model-repository"),
            "unload": Route(("POST",), self._unload, "model-repository"),
            "status": Route(("GET",), self._memory_status, "shared-memory"),
            "register": Route(("POST",), self._register, "shared-memory"),
            "unregister": Route(("POST",), self._unregister, "shared-memory"),
        }
        self._trace_route = Route(("GET", "POST"), self._trace, "trace")
        self._log_route = Route(("GET", "POST"), self._log, "logging")

    def find(self, path: str) -> tuple[Route, str, str] | None:
        """The route of a path, the name of a model or region in it, and the kind of memory."""
        if path == "/v2/logging":
            return self._log_route, "", ""
        if found := _TRACE(path):
            return self._trace_route, found[1] or "", ""
        if found := _REPOSITORY(path):
            return self._routes[found[1] or found[3]], found[2] or "", ""
        if (found := _MEMORY(path)) and (found[2] or found[3] != "register"):
            return self._routes[found[3]], found[2] or "", found[1]
        return None

    async def _index(self, call: Call) -> None:
        body = await call.body(self._max_body_bytes)
        ready = False
        if body:
            ready = boolean(members(parse(body)).get("ready", False), "Unable to parse 'ready'")
        await call.answer([_index_entry(entry) for entry in self._server.index(ready)])

    async def _load(self, call: Call) -> None:
        call.refuse_other_origin()
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in (await self._parameters(call)).items():
            if key == "config":
                config = string(value, "Unable to parse 'config'")
            elif key.startswith("file:"):
                files[key.removeprefix("file:")] = _base64(key, string(value, f"Unable to parse '{shown(key)}'"))
            else:
                raise invalid(f"unrecognized request parameter '{shown(key)}'", param=key)
        await self._server.load(call.name, config, files or None)
        await reply(call.send, 200)

    async def _unload(self, call: Call) -> None:
        call.refuse_other_origin()
        given = await self._parameters(call)
        dependents = boolean(given.get("unload_dependents", False), "Unable to parse 'unload_dependents'")
        await self._server.unload(call.name, dependents)
        await reply(call.send, 200)

    async def _parameters(self, call: Call) -> dict[str, Any]:
        if call.name in (".", ".."):
            raise TritiumError(Code.INTERNAL, f"failed to load '{call.name}', failed to poll from model repository")
        body = await call.body(self._max_body_bytes)
        if not body:
            return {}
        return members(members(parse(body)).get("parameters", {}), "Unable to parse 'parameters': ")

    async def _memory_status(self, call: Call) -> None:
        found = self._shared.regions.status(_kind(call), call.name)
        await call.answer([_region(region) for region in found])

    async def _register(self, call: Call) -> None:
        call.refuse_other_origin()
        given = parse(await call.body(self._max_body_bytes))
        if _kind(call) == "system":
            key = _text(_wanted(given, "key"))
            offset = _size(given.get("offset", 0))
            size = _size(_wanted(given, "byte_size"))
            self._shared.regions.register_system(call.name, key, offset, size)
        else:
            handle = _handle(_text(member(_wanted(given, "raw_handle"), "b64")))
            size = _size(_wanted(given, "byte_size"))
            device = _size(_wanted(given, "device_id"))
            self._shared.regions.register_cuda(call.name, handle, device, size)
        await reply(call.send, 200)

    async def _unregister(self, call: Call) -> None:
        call.refuse_other_origin()
        self._shared.regions.unregister(_kind(call), call.name)
        await reply(call.send, 200)

    async def _trace(self, call: Call) -> None:
        if call.name and not self._server.model_ready(call.name):
            raise invalid(f"Request for unknown model : {shown(call.name)}", param="model")
        if call.scope["method"] == "POST":
            call.refuse_other_origin()
            given = parse(await call.body(self._max_body_bytes))
            changes = {key: _trace_values(key, value) for key, value in _members_or_none(given).items()}
            self._server.traces.update(changes, call.name)
        found = self._server.traces.settings(call.name)
        await call.answer({key: value if key == "trace_level" else value[0] for key, value in found.items()})

    async def _log(self, call: Call) -> None:
        logs = log_settings(self._shared)
        if call.scope["method"] == "POST":
            call.refuse_other_origin()
            given = _members_or_none(parse(await call.body(self._max_body_bytes)))
            logs.update({key: _log_value(key, value) for key, value in given.items()})
        await call.answer(logs.as_dict())


def log_settings(shared: Shared) -> LogSettings:
    """The log settings.

    Raises:
        TritiumError: UNIMPLEMENTED where a process has others.
    """
    if shared.logs is None:
        raise TritiumError(Code.UNIMPLEMENTED, "the log settings of this server cannot be read or changed")
    return shared.logs


def _members_or_none(value: Any) -> dict[str, Any]:
    """The members of an object; none of what is no object, as in Triton."""
    return value if isinstance(value, dict) else {}


def _trace_values(key: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if key == "trace_level":
        if not isinstance(value, list):
            raise internal("attempt to access JSON non-array as array")
        return [_text(level) for level in cast(list[Any], value)] or ["OFF"]
    return [_text(value) if key in ("trace_rate", "trace_count", "log_frequency") else str(value)]


def _log_value(key: str, value: Any) -> Setting:
    if key in SWITCHES and not isinstance(value, bool):
        raise internal("attempt to access JSON non-boolean as boolean")
    if key == "log_verbose_level":
        return _size(value)
    return _text(value) if key == "log_format" else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise internal("attempt to access JSON non-string as string")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def _kind(call: Call) -> Kind:
    return "cuda" if call.verb == "cuda" else "system"


def _wanted(given: Any, key: str) -> Any:
    """A member of a register request."""
    if not isinstance(given, dict) or key not in given:
        raise invalid(f"Shared memory register request has no '{key}' field", param=key)
    return given[key]


def _handle(text: str) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True)
    except binascii.Error:
        handle = b""
    if len(handle) != 64:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t", param="raw_handle")
    return handle


def _region(region: Region) -> dict[str, str | int]:
    if region.kind == "cuda":
        return {"name": region.name, "device_id": region.device, "byte_size": region.size}
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size}


def _index_entry(entry: Any) -> dict[str, str]:
    found = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {key: value for key, value in found.items() if value}


def _base64(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise invalid(f"'{shown(key)}' is not base64 data", param=key) from None
