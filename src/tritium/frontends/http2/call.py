"""Call: one stream of a connection, from its first message to its status."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import numpy as np

from tritium.frontends.http2.opening import MAX_HEADER_LIST_BYTES, Opening
from tritium.observability import logs

if TYPE_CHECKING:
    from tritium.frontends.http2.connection import Connection

_log = logs.get(__name__)

Buffer = bytes | memoryview
OK = 0
CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 1, 2, 4, 8
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
# Messages of a call that wait for its method, and their bytes; beyond them its client is not granted more bytes.
_MAX_WAITING = 16
_MAX_WAITING_BYTES = 1 << 20
# Bytes of answers that wait for the client before its method must wait.
_MAX_UNSENT = 64 << 10
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_LARGE = 64 << 10
# A message gets its whole place when so much of it has come: a client that only says how long it is gets less.
_FIRST_BYTES = 256 << 10
# Messages from this size on are decompressed in a thread, so that the event loop goes on; they may be 1000 times
# as long afterwards.
_THREAD_BYTES = 4 << 10


class Abort(Exception):
    """A method ends its call with a status."""

    def __init__(self, status: int, message: str, trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.trailing = trailing


class Context:
    """What a method is given of its call; what ``grpc.aio.ServicerContext`` is to the methods that are served here."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The client's headers."""
        return self._call.opening.metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """Ends the call with a status."""
        raise Abort(code.value[0], details, trailing_metadata)

    async def write(self, message: bytes) -> None:
        """Sends an answer; returns when there is room for the next one."""
        await self._call.write(message)


class Call:
    """One call.

    Attributes:
        window: bytes that the client takes on this stream now.
        begun: whether the head of the answer has been sent.
        over: whether the status has been sent, or nobody wants it any more.
    """

    __slots__ = (
        "_cancel",
        "_changed",
        "_compressed",
        "_connection",
        "_ended",
        "_filled",
        "_length",
        "_message",
        "_messages",
        "_part",
        "_task",
        "_timer",
        "_waiting_bytes",
        "begun",
        "number",
        "opening",
        "over",
        "trailers",
        "unacknowledged",
        "unsent",
        "unsent_bytes",
        "window",
    )

    def __init__(
        self, connection: Connection, number: int, opening: Opening, window: int, *, ended: bool = False
    ) -> None:
        self._connection = connection
        self.number = number
        self.opening = opening
        self.window = window
        self.unacknowledged = 0
        self.begun = self.over = False
        self.unsent: deque[Buffer] = deque()
        self.unsent_bytes = 0
        self.trailers: tuple[int, str, Sequence[tuple[str, str | bytes]]] | None = None
        self._part = b""
        self._message: memoryview | None = None
        self._filled = 0
        self._compressed = False
        self._ended = ended
        # Whether it is compressed, and a message.
        self._messages: deque[tuple[bool, Buffer]] = deque()
        self._waiting_bytes = self._length = 0
        # Its method may read and write at the same time, and wait for both.
        self._changed: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._cancel: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if opening.timeout_s is not None:
            self._timer = connection.loop.call_later(opening.timeout_s, self._late)

    @property
    def ended(self) -> bool:
        """Whether the client has sent everything."""
        return self._ended

    # -- what comes -------------------------------------------------------------------------------------------

    def room(self) -> memoryview | None:
        """Where the bytes of a large message that is being received go; None when there is none."""
        message = self._message
        return None if message is None or len(message) - self._filled < _LARGE else message[self._filled :]

    def put(self, count: int) -> None:
        """So many bytes have been written into ``room``."""
        self._filled += count
        message = self._message
        if message is None or self._filled < len(message):
            return
        if self._filled == self._length:
            self._message, self._filled = None, 0
            self._got(message)
        else:
            self._message = np.empty(self._length, np.uint8).data
            self._message[: self._filled] = message

    def take_only(self, payload: memoryview) -> bool:
        """Takes the one message of a call that is a payload as a whole and plain; False when it is anything else."""
        size = len(payload) - 5
        if self._messages or self._part or self._message is not None or self._ended or self.over:
            return False
        if not 0 <= size <= self._connection.service.max_message_bytes or payload[0]:
            return False
        if int.from_bytes(payload[1:5], "big") != size:
            return False
        self._messages.append((False, bytes(payload[5:])))
        return True

    def feed(self, chunk: memoryview) -> None:
        """Bytes of messages, each behind a flag and its length."""
        while chunk and not self.over:
            if self._message is None:
                if self._part or len(chunk) < 5:
                    need = 5 - len(self._part)
                    self._part += bytes(chunk[:need])
                    chunk = chunk[need:]
                    if len(self._part) < 5:
                        return
                    head, self._part = self._part, b""
                else:
                    head, chunk = chunk[:5], chunk[5:]
                self._begin(head[0], int.from_bytes(head[1:5], "big"), chunk)
                if self._message is None:
                    chunk = chunk[len(chunk) :] if self.over else chunk[self._filled :]
                continue
            count = min(len(chunk), len(self._message) - self._filled)
            self._message[self._filled : self._filled + count] = chunk[:count]
            chunk = chunk[count:]
            self.put(count)

    def _begin(self, flag: int, length: int, chunk: memoryview) -> None:
        """A message begins; what of it is in ``chunk`` already is taken if it is all of it (``_filled`` bytes)."""
        limit = self._connection.service.max_message_bytes
        if flag > 1 or length > limit:
            status, why = INTERNAL, f"the compressed flag is {flag}, expected 0 or 1"
            if flag <= 1:
                status, why = RESOURCE_EXHAUSTED, f"SERVER: Received message larger than max ({length} vs. {limit})"
            self.finish(status, why)
            return
        self._compressed = bool(flag)
        if length <= len(chunk):
            self._filled = length
            self._got(bytes(chunk[:length]))
        else:
            self._length, self._filled = length, 0
            self._message = np.empty(min(length, _FIRST_BYTES), np.uint8).data

    def _got(self, message: Buffer) -> None:
        """A message is whole."""
        if self._compressed and self.opening.coding not in _WINDOWS:
            text = f"grpc-encoding is '{self.opening.coding[:40]}', expected gzip or deflate"
            self.finish(UNIMPLEMENTED, text)
            return
        if self.opening.handler is not None and not self.opening.handler.request_streaming and self._messages:
            self.finish(INTERNAL, "a second message came, expected one")
            return
        self._messages.append((self._compressed, message))
        self._waiting_bytes += len(message)
        self._wake()

    async def _next(self) -> bytes:
        """The next message, decompressed only now: what waits takes no more memory than its client sent.

        Raises:
            Abort: it cannot be decompressed.
        """
        compressed, message = self._messages.popleft()
        self._waiting_bytes = max(0, self._waiting_bytes - len(message))
        self._connection.acknowledge(self)
        if not compressed:
            return bytes(message)
        given = (message, self.opening.coding, self._connection.service.max_message_bytes)
        return await asyncio.to_thread(_inflate, *given) if len(message) >= _THREAD_BYTES else _inflate(*given)

    def end(self) -> None:
        """The client has sent everything."""
        self._ended = True
        if self.over:
            return
        if self._part or self._message is not None:
            self.finish(INTERNAL, "the last message is cut off")
        elif self.opening.handler is not None and not self.opening.handler.request_streaming:
            self._answer()
        self._wake()

    # -- its method -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called when the head has come: a method that takes a stream begins."""
        handler = self.opening.handler
        if self.opening.http_status == 431:
            self.finish(RESOURCE_EXHAUSTED, f"the metadata is larger than {MAX_HEADER_LIST_BYTES} bytes")
        elif self.opening.http_status != 200:
            self._connection.refuse(self, self.opening.http_status)
        elif handler is None:
            self.finish(UNIMPLEMENTED, "Method not found!")
        elif handler.request_streaming:
            self._task = self._connection.service.spawn(self._run(handler))

    def _answer(self) -> None:
        """The only message has come."""
        if not self._messages:
            self.finish(INTERNAL, "no message came, expected one")
            return
        quick = self.opening.quick
        compressed, message = self._messages[0]
        if quick is not None and not compressed:
            self._cancel = quick(message, self)
            if self._cancel is not None or self.over:
                return
        self._task = self._connection.service.spawn(self._run(self.opening.handler))

    def respond(self, parts: Sequence[Buffer]) -> None:
        """The only answer, and with it the end."""
        self._cancel = None
        if not self.over:
            self._connection.respond(self, parts)

    async def _run(self, handler: Any) -> None:
        """Runs a method of ``grpc``'s shape."""
        context = Context(self)
        take = handler.request_deserializer or bytes
        give = handler.response_serializer or bytes
        method = (
            (handler.stream_stream if handler.response_streaming else handler.stream_unary)
            if handler.request_streaming
            else (handler.unary_stream if handler.response_streaming else handler.unary_unary)
        )
        try:
            asked = self._taken(take) if handler.request_streaming else take(await self._next())
            found = method(asked, context)
            if hasattr(found, "__aiter__"):
                async for answer in found:
                    await self.write(give(answer))
            else:
                answer = await found
                if not handler.response_streaming:
                    await self.write(give(answer))
            self.finish(OK)
        except Abort as error:
            self.finish(error.status, error.message, error.trailing)
        except asyncio.CancelledError:
            self.finish(UNAVAILABLE, "the server ends")
        except Exception as error:
            _log.exception("call failed", method=self.opening.path)
            self.finish(UNKNOWN, f"Unexpected {type(error).__name__}")

    async def _taken(self, take: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """The messages as they come."""
        while True:
            while self._messages:
                try:
                    message = await self._next()
                except Abort as error:
                    # Who reads them may have another use for exceptions.
                    self.finish(error.status, error.message)
                    return
                yield take(message)
            if self._ended:
                return
            await self._change()

    @property
    def crowded(self) -> bool:
        """Whether its method should take messages before more are let in."""
        return len(self._messages) >= _MAX_WAITING or self._waiting_bytes > _MAX_WAITING_BYTES

    async def write(self, message: Buffer) -> None:
        """Sends an answer; returns when there is room for the next one."""
        if self.over:
            return
        self._connection.send(self, message)
        while self.unsent_bytes > _MAX_UNSENT and not self.over:
            await self._change()

    async def _change(self) -> None:
        changed = self._connection.loop.create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        if self._changed:
            waiting, self._changed = self._changed, []
            for changed in waiting:
                if not changed.done():
                    changed.set_result(None)

    def sent(self) -> None:
        """Something that waited has been sent."""
        self._wake()

    # -- ends -------------------------------------------------------------------------------------------------

    def finish(self, status: int, message: str = "", trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        """Ends it with a status, after the answers that still wait."""
        if self.trailers is None and not self.over:
            self.trailers = (status, message, trailing)
            self._connection.finish(self)

    def close(self) -> None:
        """It is over: whatever works for it stops."""
        self.over = True
        self.unsent.clear()
        self.unsent_bytes = 0
        self._messages.clear()
        self._message = None
        if self._timer is not None:
            self._timer.cancel()
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        if self._task is not None and self._task is not asyncio.current_task() and not self._task.done():
            self._task.cancel()
        self._wake()

    def _late(self) -> None:
        if not self.over:
            self.unsent.clear()
            self.unsent_bytes = 0
            self.trailers = None
            self.finish(DEADLINE_EXCEEDED, "Deadline Exceeded")


def _inflate(message: Buffer, coding: str, limit: int) -> bytes:
    decoder = zlib.decompressobj(_WINDOWS[coding])
    try:
        plain = decoder.decompress(message, limit + 1)
    except zlib.error:
        raise Abort(INTERNAL, f"a message is not valid {coding} data") from None
    if len(plain) > limit:
        raise Abort(RESOURCE_EXHAUSTED, f"SERVER: Received message larger than max (over {limit} decompressed)")
    if not decoder.eof:
        raise Abort(INTERNAL, f"a message is not one whole {coding} stream")
    return plain
