"""One ``ModelStreamInfer`` call: many requests in, their answers out.

Answers of requests that are answered once come in the order of the requests, those of decoupled models and of
token streams as they are made. How much may be under way is bounded: a client that does not read its answers
stops being read itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import pb_codec
from tritium.frontends.kserve.shared_memory import Regions
from tritium.observability import logs
from tritium.observability.tracing import Trace
from tritium.types import InferRequest, InferResponse, Parameter

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

# Answers that wait for the client to read them; when there are more, their models wait too.
_MAX_UNREAD = 32


@contextmanager
def accompany(
    server: Server, request: InferRequest, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> Generator[Trace | None]:
    """Gives a request its trace, if it is one of those, until it is answered.

    Args:
        metadata: of the call, which may make the trace part of the client's.
    """
    headers = {k: v for k, v in metadata if isinstance(v, str)} if server.traces.joins else None
    trace = request.trace = server.traces.begin(request.model, request.version, request.id, headers, request.arrived_ns)
    if trace is None:
        yield None
        return
    trace.stamp("GRPC_WAITREAD_START", request.arrived_ns)
    trace.stamp("GRPC_WAITREAD_END")
    try:
        yield trace
    finally:
        trace.stamp("GRPC_SEND_END")
        trace.release()


class _Turn:
    """The place of a request in the order of answers; who answers many times leaves it at once.

    Args:
        before: the place of the request before; None for the first.
    """

    def __init__(self, before: _Turn | None) -> None:
        self._before = before._over if before is not None else None
        # Set when this request and all before it have been answered, or do not mind the order.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = False

    async def come(self) -> None:
        """Waits until the earlier requests have been answered, unless this one left the order."""
        if not self._left and self._before is not None:
            await asyncio.shield(self._before)

    def leave(self) -> None:
        """Later requests wait no more for this one, only for those before it."""
        if self._left:
            return
        self._left = True
        if self._before is None or self._before.done():
            self._over.set_result(None)
        else:
            self._before.add_done_callback(lambda _: self._over.set_result(None))
        self._before = None


class InferStream:
    """The requests of one call that are under way.

    Args:
        strict: a model's error ends the call instead of being one of its answers (``triton_grpc_error``).
        max_in_flight: requests that run at the same time.
        max_in_flight_bytes: what their messages may have in all; one that is larger runs alone.
        regions: the shared memory that requests may name.
        parameters: what is added to those of every request.
        metadata: of the call.
    """

    def __init__(
        self,
        server: Server,
        *,
        strict: bool,
        max_in_flight: int,
        max_in_flight_bytes: int,
        regions: Regions,
        parameters: Mapping[str, Parameter],
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> None:
        self._server = server
        self._metadata = metadata
        self._regions = regions
        self._parameters = parameters
        self._strict = strict
        self._slots = asyncio.Semaphore(max_in_flight)
        self._max_bytes = max_in_flight_bytes
        self._bytes = 0
        self._freed = asyncio.Event()
        # None says that nothing follows; an error, that the call ends with it.
        self._answers: asyncio.Queue[bytes | TritiumError | None] = asyncio.Queue(_MAX_UNREAD)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_turn = _Turn(None)
        self._last_turn.leave()

    async def answers(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Encoded answers until all requests have theirs; closing this cancels what is under way.

        Raises:
            TritiumError: a model's error, if strict.
        """
        reader = asyncio.create_task(self._read(messages))
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, TritiumError):
                    raise answer
                yield answer
        finally:
            tasks = [reader, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            async for message in messages:
                await self._slots.acquire()
                while self._bytes and self._bytes + len(message) > self._max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._bytes += len(message)
                self._last_turn = _Turn(self._last_turn)
                task = asyncio.create_task(self._run(message, self._last_turn))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._answers.put(None)
        except Exception as error:
            await self._answers.put(TritiumError(Code.INTERNAL, f"the stream failed: {type(error).__name__}"))

    async def _run(self, message: bytes, turn: _Turn) -> None:
        parsed: pb_codec.Message | None = None
        size = len(message)
        try:
            parsed = pb_codec.parse(message)
            del message
            await self._answer(parsed, turn)
        except Exception as error:
            if not isinstance(error, TritiumError):
                _log.error("request failed", error=error, exc_info=error)
                error = TritiumError(Code.INTERNAL, "internal error")
            await turn.come()
            request_id = parsed.fields.id if parsed is not None else ""
            await self._answers.put(pb_codec.write_refusal(request_id, error.message))
        finally:
            self._slots.release()
            self._bytes -= size
            self._freed.set()
            turn.leave()

    async def _answer(self, parsed: pb_codec.Message, turn: _Turn) -> None:
        config = self._server.model_config(parsed.fields.model_name, parsed.fields.model_version)
        asked = pb_codec.read(parsed, monotonic_ns(), self._regions)
        asked.request.parameters |= self._parameters
        if config.decoupled:
            turn.leave()
        with accompany(self._server, asked.request, self._metadata):
            await self._answer_each(asked, config, turn)

    async def _answer_each(self, asked: pb_codec.GrpcInfer, config: ModelConfig, turn: _Turn) -> None:
        async with aclosing(self._server.infer_stream(asked.request)) as answers:
            async for answer in answers:
                if not answer.final:
                    turn.leave()
                await turn.come()
                if answer.error is not None or not answer.empty or asked.empty_final:
                    await self._put(answer, asked.request, config)

    async def _put(self, answer: InferResponse, request: InferRequest, config: ModelConfig) -> None:
        error = answer.error
        if error is None and not answer.empty:
            answer.parameters = {**answer.parameters, "triton_final_response": answer.final}
            try:
                return await self._answers.put(pb_codec.write_stream(pb_codec.write(answer, request, config)))
            except TritiumError as caught:
                error = caught
        if error is not None and self._strict:
            return await self._answers.put(error)
        # Triton leaves the version out where there is no output.
        bare = InferResponse(answer.model, "", answer.id, parameters={"triton_final_response": answer.final})
        message = pb_codec.write(bare, request, config)
        await self._answers.put(pb_codec.write_stream(message, error.message if error else ""))
