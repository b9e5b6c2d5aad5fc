"""Opening: what the head of a call says."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any

import hpack
from hpack.exceptions import HPACKError

from tritium.frontends.http2.wire import COMPRESSION_ERROR, WireError

MAX_HEADER_LIST_BYTES = 16 << 10
# More than that is read all the same, and only its call refused: the others go on. Up to here, as one byte of a
# block may stand for a whole table.
_MAX_READ_BYTES = 256 << 10
_MAX_KEPT = 64
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))


class Malformed(Exception):
    """The head breaks HTTP's rules: its stream is reset."""


class Opening:
    """The head of a call; calls with the same head share it.

    Attributes:
        metadata: names and values of the client's own headers; values of ``-bin`` ones are bytes.
        timeout_s: after which nobody waits; None for no limit.
        coding: of its messages that are compressed.
        http_status: 200, or what refuses it because it is no call of gRPC.
        handler: what answers its method; None for an unknown one. Filled in by the connection.
        quick: answers it without a task; None when it must have one. Filled in by the connection.
    """

    __slots__ = ("coding", "handler", "http_status", "metadata", "path", "quick", "timeout_s")

    def __init__(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.path = ""
        self.metadata: tuple[tuple[str, str | bytes], ...] = ()
        self.timeout_s: float | None = None
        self.coding = "identity"
        self.http_status = 200
        self.handler: Any = None
        self.quick: Callable[..., Any] | None = None
        self._read(headers)

    def _read(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        pseudo: dict[bytes, bytes] = {}
        metadata: list[tuple[str, str | bytes]] = []
        content = b""
        for name, value in headers:
            if name.startswith(b":"):
                if metadata or content or name in pseudo:
                    raise Malformed
                pseudo[name] = value
                continue
            if name in _CONNECTION or name != name.lower() or (name == b"te" and value != b"trailers"):
                raise Malformed
            text = name.decode("latin-1")
            if name == b"content-type":
                content = value
            elif name == b"grpc-timeout":
                self.timeout_s = _timeout(value.decode("latin-1"))
            elif name == b"grpc-encoding":
                self.coding = value.decode("latin-1")
            elif name != b"te" and not name.startswith(b"grpc-"):
                metadata += _values(text, value)
        if not {b":method", b":path", b":scheme"} <= pseudo.keys():
            raise Malformed
        self.path = pseudo[b":path"].decode("latin-1")
        self.metadata = tuple(metadata)
        if pseudo[b":method"] != b"POST":
            self.http_status = 405
        elif not content.startswith(b"application/grpc"):
            self.http_status = 415


def _values(name: str, value: bytes) -> list[tuple[str, str | bytes]]:
    if not name.endswith("-bin"):
        return [(name, value.decode("latin-1"))]
    try:
        return [(name, base64.b64decode(part + b"=" * (-len(part) % 4))) for part in value.split(b",")]
    except binascii.Error:
        raise Malformed from None


def _timeout(text: str) -> float:
    digits, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not 0 < len(digits) <= 8 or not (digits.isascii() and digits.isdecimal()):
        raise Malformed
    return int(digits) * _UNITS[unit]


class HeadReader:
    """The header blocks that one connection receives.

    A client's calls look alike, and after the first one it writes their head as a few references to its table. As
    long as the table does not change, the same bytes mean the same head.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(_MAX_READ_BYTES)
        self._known: dict[bytes, Opening] = {}

    def read(self, block: bytes, make: Callable[[Opening], None]) -> Opening:
        """The head in a block.

        Args:
            make: completes one that is new.

        Raises:
            WireError: the block cannot be read, and none after it.
            Malformed: only this head is wrong.
        """
        found = self._known.get(block)
        if found is not None:
            return found
        table: Any = self._decoder.header_table
        try:
            headers: Any = self._decoder.decode(block, raw=True)
        except (HPACKError, UnicodeDecodeError) as error:
            raise WireError(COMPRESSION_ERROR, f"header block: {type(error).__name__}") from None
        plain = min(block) >= 128 if block else False  # nothing but references: the table is as it was
        if not plain:
            # Whatever it did to the table, what is known was read with the one before.
            self._known.clear()
        assert table is self._decoder.header_table
        opening = Opening(headers)
        if sum(len(name) + len(value) + 32 for name, value in headers) > MAX_HEADER_LIST_BYTES:
            opening.http_status = 431
        make(opening)
        if plain:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[block] = opening
        return opening
