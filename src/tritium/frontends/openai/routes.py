"""OpenAI's routes: chat completions, completions, models. Read, call the server, write.

``routes(server)`` gives them for the application of ``frontends.http``; ``error_response`` writes any
``TritiumError`` in OpenAI's form, for whoever refuses a ``/v1`` request before it gets here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.asgi import BodyError, error_headers
from tritium.frontends.openai.answers import ModelCard, ModelList, encode, error_body
from tritium.frontends.openai.chat import Call, Preparer
from tritium.frontends.openai.schema import ChatRequest, CompletionRequest, decode, shown
from tritium.frontends.openai.stream import ClientGone, Deltas, chunks, whole
from tritium.llm.types import TokenDelta
from tritium.observability import logs

if TYPE_CHECKING:
    from tritium.serving.server import Server, TextModel

KEEPALIVE_S = 15.0
# Above it, reading JSON and naming what is wrong with it would hold up everybody else.
SMALL_BODY_BYTES = 64 * 1024
TOKENIZER_THREADS = 2

_log = logs.get(__name__)
_Endpoint = Callable[[Request], Awaitable[Response]]


def routes(server: Server, *, keepalive_s: float = KEEPALIVE_S) -> list[Route]:
    """The routes under ``/v1``.

    Args:
        keepalive_s: a stream without news gets a comment that often, in seconds.
    """
    api = _Api(server, keepalive_s)
    return [
        Route("/v1/chat/completions", _guarded(api.chat_completions), methods=["POST"]),
        Route("/v1/completions", _guarded(api.completions), methods=["POST"]),
        Route("/v1/models", _guarded(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", _guarded(api.model), methods=["GET"]),
    ]


def error_response(error: TritiumError) -> Response:
    """An error in OpenAI's form, with its status and headers."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.status.v1, headers, "application/json")


def _guarded(endpoint: _Endpoint) -> _Endpoint:
    """Turns whatever an endpoint raises into an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TritiumError as error:
            return error_response(error)
        except (ClientGone, ClientDisconnect):
            _log.debug("the client left", path=request.url.path)
            return error_response(TritiumError(Code.CANCELLED, "the client closed the connection"))
        except Exception:
            _log.exception("a request failed unexpectedly", path=request.url.path)
            return error_response(TritiumError(Code.INTERNAL, "the server failed to answer this request"))

    return answer


class _Api:
    def __init__(self, server: Server, keepalive_s: float) -> None:
        self._server = server
        self._keepalive_s = keepalive_s
        self._preparer = Preparer()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def models(self, request: Request) -> Response:
        cards: list[ModelCard] = []
        for name in self._server.llm_names():
            # One that is being unloaded right now is left out.
            with suppress(TritiumError):
                cards.append(_card(name, self._text_model(name)))
        return Response(encode(ModelList(cards)), media_type="application/json")

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        card = _card(name, self._text_model(name))
        return Response(encode(card), media_type="application/json")

    async def _generate(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        arrived_ns = time.monotonic_ns()
        raw = await self._read(request)
        loop = asyncio.get_running_loop()
        if len(raw) <= SMALL_BODY_BYTES:
            body = decode(raw, kind)
        else:
            body = await loop.run_in_executor(self._threads, decode, raw, kind)
        model = self._text_model(self._name(body.model))
        call = await loop.run_in_executor(
            self._threads, self._preparer.prepare, body, model, arrived_ns, logs.request_id.get()
        )
        if not logs.request_id.get():
            logs.request_id.set(call.id)
        sources = [self._server.generate(model.name, model.version, one) for one in call.requests]
        deltas = Deltas(sources, request.receive, self._keepalive_s)
        try:
            # An error before the first token still has a status of its own; the wait for it is bounded.
            first = await deltas.next()
            if call.stream:
                return EventStream(call, deltas, first)
            answer = await whole(call, deltas, first)
        except BaseException:
            await deltas.aclose()
            raise
        await deltas.aclose()
        return Response(answer, media_type="application/json")

    async def _read(self, request: Request) -> bytes:
        """The body; how long it may be and take is the business of ``frontends.http``."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"the Content-Type header is {shown(kind)}, expected application/json"
            raise BodyError(415, message, "unsupported_media_type")
        return await request.body()

    def _name(self, given: str | None) -> str:
        if given is not None:
            return given
        names = self._server.llm_names()
        if len({self._text_model(name).name for name in names}) != 1:
            raise invalid(f"model is missing, expected one of {', '.join(names) or '(none is loaded)'}", param="model")
        return names[0]

    def _text_model(self, name: str) -> TextModel:
        try:
            return self._server.text_model(name)
        except TritiumError as error:
            if error.code not in (Code.NOT_FOUND, Code.INVALID_ARGUMENT):
                raise
        # The same words for a model that is absent and one that this client may not see.
        raise TritiumError(
            Code.NOT_FOUND,
            f"The model {shown(name)} does not exist or you do not have access to it.",
            param="model",
            reason="model_not_found",
        )


class EventStream(Response):
    """A call as server-sent events; the generations end with it, however it ends."""

    def __init__(self, call: Call, deltas: Deltas, first: list[tuple[int, TokenDelta]]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._call = call
        self._deltas = deltas
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(chunks(self._call, self._deltas, self._first)) as stream:
                async for events in stream:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            _log.debug("the client left a stream", id=self._call.id)
        finally:
            await self._deltas.aclose()


def _card(name: str, model: TextModel) -> ModelCard:
    return ModelCard(id=name, created=model.created_s, root=model.name, max_model_len=model.max_length)
