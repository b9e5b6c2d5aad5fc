"""One HTTP request on its way through a route of ``/v2``, and how it is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import orjson

from tritium.errors import Code, TritiumError
from tritium.frontends.access import Api
from tritium.frontends.asgi import Receive, Scope, Send, error_headers, read_body, reply
from tritium.frontends.kserve import codings
from tritium.frontends.kserve.generate import write_error
from tritium.frontends.kserve.json_text import shown

# Where the connection puts the names of the headers as the client spelled them.
SPELLINGS = "tritium.header_spellings"


class Call(NamedTuple):
    """One HTTP request.

    Attributes:
        name: of the model or region in the path; "" where there is none.
        verb: the last word of the path, where several share a route.
    """

    scope: Scope
    receive: Receive
    send: Send
    name: str = ""
    version: str = ""
    verb: str = ""

    def header(self, name: bytes) -> str | None:
        """The first header of that name (lower case)."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value.decode("latin-1")
        return None

    def spelled_headers(self) -> Iterator[tuple[str, str]]:
        """All headers, their names as the client wrote them where that is known."""
        headers: list[tuple[bytes, bytes]] = self.scope["headers"]
        names: list[bytes] = self.scope.get(SPELLINGS) or [name for name, _ in headers]
        for name, (_, value) in zip(names, headers, strict=False):
            yield name.decode("latin-1"), value.decode("latin-1")

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body, inflated to at most ``limit_bytes``."""
        body = await read_body(self.receive)
        return await codings.inflate(body, self.header(b"content-encoding"), limit_bytes)

    async def answer(self, value: Any) -> None:
        """Answers 200 with JSON."""
        await reply(self.send, 200, orjson.dumps(value))

    def refuse_other_origin(self) -> None:
        """A page of another site in somebody's browser shall not change this server.

        Raises:
            TritiumError: PERMISSION_DENIED.
        """
        origin = self.header(b"origin")
        if origin is not None and origin.partition("://")[2] != (self.header(b"host") or ""):
            raise TritiumError(
                Code.PERMISSION_DENIED, f"requests from the origin '{shown(origin)}' are not allowed here"
            )


class Route(NamedTuple):
    """What answers a path.

    Attributes:
        methods: of HTTP, that it takes.
        api: the group that it belongs to, for restrictions.
    """

    methods: tuple[str, ...]
    answer: Callable[[Call], Awaitable[None]]
    api: Api


async def send_error(send: Send, error: TritiumError, content_type: bytes) -> None:
    """Sends an error in the form of the v2 routes."""
    await reply(send, error.status.v2, write_error(error), content_type, error_headers(error))
