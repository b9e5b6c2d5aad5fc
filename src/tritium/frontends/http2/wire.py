"""HTTP/2 as bytes: frames (RFC 9113) and the header blocks of a gRPC server (RFC 7541, and gRPC's PROTOCOL-HTTP2)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

# Errors.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 5, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11

# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
MAX_HEADER_LIST_SIZE = 6

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = struct.Struct(">HBBBI")
LARGEST_WINDOW = (1 << 31) - 1
# The two ends of an answer whose headers the client's table has: HEADERS and the beginning of DATA; the trailers.
_FRONT = struct.Struct(">HBBBI3sHBBBIBI")
_BACK = struct.Struct(">HBBBIc")

# A status message has at most so many bytes when it is escaped: clients refuse metadata of 8 KiB and more.
MAX_STATUS_BYTES = 6 << 10

_CONTENT = (b"content-type", b"application/grpc")
_ACCEPT = (b"grpc-accept-encoding", b"identity, deflate, gzip")


class WireError(Exception):
    """The peer broke a rule; the connection ends with that code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a payload."""
    return FRAME_HEAD.pack(length >> 8, length & 255, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join([struct.pack(">HI", *pair) for pair in values.items()]))


def unpadded(flags: int, payload: memoryview) -> memoryview:
    """What is between the length of the padding and the padding.

    Raises:
        WireError: there is more padding than payload.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise WireError(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def check_priority(flags: int, stream: int, payload: memoryview) -> None:
    """A PRIORITY frame, which means nothing any more.

    Raises:
        WireError: it is none.
    """
    if not stream or len(payload) != 5:
        raise WireError(FRAME_SIZE_ERROR if stream else PROTOCOL_ERROR, "PRIORITY")


def check_goaway(flags: int, stream: int, payload: memoryview) -> None:
    """A client's GOAWAY, after which a server has nothing to do: it begins no streams.

    Raises:
        WireError: it is none.
    """
    if stream or len(payload) < 8:
        raise WireError(PROTOCOL_ERROR if stream else FRAME_SIZE_ERROR, "GOAWAY")


def _length(size: int) -> bytes:
    """A string's length as HPACK writes it, in a prefix of seven bits, without Huffman coding."""
    if size < 127:
        return bytes((size,))
    size -= 127
    out = bytearray(b"\x7f")
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def _literal(name: bytes, value: bytes, kind: bytes = b"\x00") -> bytes:
    return b"".join((kind, _length(len(name)), name, _length(len(value)), value))


class HeadWriter:
    """The header blocks that one connection sends.

    All answers have the same few headers. The client's table gets them with the first answer, so that later ones
    name them by a byte each; a client that wants another size of table gets them written out.
    """

    def __init__(self) -> None:
        self._indexed = True
        self._known = 0
        self._front = b""

    def resize(self, size: int) -> None:
        """The client said how large the table may be."""
        if size < 4096:
            # The table must be emptied where the next block begins.
            self._indexed, self._known, self._front = False, 0, b"\x20"

    def _take_front(self) -> bytes:
        front, self._front = self._front, b""
        return front

    def begin(self) -> bytes:
        """The head of an answer that has messages."""
        if not self._indexed:
            return self._take_front() + b"\x88" + _literal(*_CONTENT) + _literal(*_ACCEPT)
        if self._known == 0:
            self._known = 2
            return b"\x88" + _literal(*_CONTENT, kind=b"\x40") + _literal(*_ACCEPT, kind=b"\x40")
        return b"\x88\xbf\xbe" if self._known == 2 else b"\x88\xc0\xbf"

    def end(self) -> bytes:
        """The trailers of an answer that went well."""
        if not self._indexed or self._known == 0:
            return self._take_front() + _literal(b"grpc-status", b"0")
        if self._known == 2:
            self._known = 3
            return _literal(b"grpc-status", b"0", kind=b"\x40")
        return b"\xbe"

    def around(self, number: int, size: int) -> tuple[bytes, bytes]:
        """What comes before and behind the only message of an answer that went well."""
        if self._known == 3:
            length = size + 5
            return (
                _FRONT.pack(
                    *(0, 3, HEADERS, END_HEADERS, number, b"\x88\xc0\xbf"),
                    *(length >> 8, length & 255, DATA, 0, number, 0, size),
                ),
                _BACK.pack(0, 1, HEADERS, END_HEADERS | END_STREAM, number, b"\xbe"),
            )
        front = frame(HEADERS, END_HEADERS, number, self.begin()) + frame_head(size + 5, DATA, 0, number)
        back = frame(HEADERS, END_HEADERS | END_STREAM, number, self.end())
        return front + b"\0" + size.to_bytes(4, "big"), back

    def fail(self, status: int, message: str, more: Iterable[tuple[str, str | bytes]], *, alone: bool) -> bytes:
        """The trailers of an answer that went wrong; ``alone``: no head came before them."""
        out = [self._take_front()]
        if alone:
            out += (b"\x88", _literal(*_CONTENT))
        out.append(_literal(b"grpc-status", str(status).encode()))
        if message:
            out.append(_literal(b"grpc-message", escaped(message)))
        for name, value in more:
            raw = value if isinstance(value, bytes) else value.encode()
            out.append(_literal(name.encode(), base64.b64encode(raw).rstrip(b"=") if name.endswith("-bin") else raw))
        return b"".join(out)

    def refuse(self, http_status: int) -> bytes:
        """The head of the answer to what is no call of gRPC."""
        return self._take_front() + _literal(b":status", str(http_status).encode())


def escaped(message: str) -> bytes:
    """A status message: all but printable ASCII, and the percent sign, as %XX; cut where it is too long."""
    kept = message[: MAX_STATUS_BYTES + 1]
    out = _escape(kept)
    if len(out) <= MAX_STATUS_BYTES:
        return out
    room = MAX_STATUS_BYTES - 3
    while len(out) > room:
        kept = kept[: len(kept) * room // len(out)]
        out = _escape(kept)
    return out + b"..."


def _escape(message: str) -> bytes:
    if message.isascii() and message.isprintable() and "%" not in message:
        return message.encode()
    raw = message.encode("utf-8", "replace")
    return b"".join([bytes((byte,)) if 32 <= byte <= 126 and byte != 37 else b"%%%02X" % byte for byte in raw])
