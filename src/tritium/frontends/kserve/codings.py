"""Content codings of bodies: bounded inflation of requests, compression of answers."""

from __future__ import annotations

import asyncio
import zlib

from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.asgi import too_large

# Bodies from this size on are coded in a thread, so that the event loop goes on. One that is decompressed may be
# 1000 times as long afterwards.
_THREAD_BYTES = 64 << 10
_INFLATE_THREAD_BYTES = 4 << 10
_LEVEL = 6  # zlib's own default
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def inflate(body: bytes, coding: str | None, limit_bytes: int) -> bytes:
    """The body without its ``Content-Encoding``.

    Raises:
        TritiumError: UNIMPLEMENTED for a coding other than gzip and deflate; INVALID_ARGUMENT when the bytes
            are not what it says; BodyError (413) as soon as more than ``limit_bytes`` came out.
    """
    if not coding or coding == "identity":
        return body
    if coding not in _WINDOW:
        raise TritiumError(Code.UNIMPLEMENTED, "Unsupported compression type")
    if len(body) < _INFLATE_THREAD_BYTES:
        return _inflate(body, coding, limit_bytes)
    return await asyncio.to_thread(_inflate, body, coding, limit_bytes)


def _inflate(body: bytes, coding: str, limit_bytes: int) -> bytes:
    decoder = zlib.decompressobj(_WINDOW[coding])
    try:
        plain = decoder.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise invalid(f"the request body is not valid {coding} data, as its Content-Encoding says") from None
    if len(plain) > limit_bytes:
        raise too_large(limit_bytes, "the request body, decompressed,")
    if not decoder.eof or decoder.unused_data:
        raise invalid(f"the request body is not one whole {coding} stream, as its Content-Encoding says")
    return plain


def choose(accepted: str | None) -> str | None:
    """The coding of an answer: the better of gzip and deflate by quality, the first one when equal; None for none.

    Names are matched as they are written and ``*`` says nothing, as in the recorded server.
    """
    if not accepted:
        return None
    best, best_quality = None, 0.0
    for entry in accepted.split(","):
        name, *parameters = [part.strip() for part in entry.split(";")]
        if name not in _WINDOW:
            continue
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if quality > best_quality:
            best, best_quality = name, quality
    return best


async def deflate(parts: list[bytes | memoryview], coding: str) -> bytes:
    """The parts, joined and compressed."""
    if sum(len(part) for part in parts) < _THREAD_BYTES:
        return _deflate(parts, coding)
    return await asyncio.to_thread(_deflate, parts, coding)


def _deflate(parts: list[bytes | memoryview], coding: str) -> bytes:
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[coding])
    return b"".join([*(encoder.compress(part) for part in parts), encoder.flush()])
