from __future__ import annotations

import gzip
import time
import zlib

import pytest

from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import codings

LIMIT = 1 << 20


@pytest.mark.parametrize("size", [0, 10, 300_000])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_round_trip(coding: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"end"
    packed = await codings.deflate([body[:5], memoryview(body)[5:]], coding)
    assert (gzip.decompress if coding == "gzip" else zlib.decompress)(packed) == body
    assert await codings.inflate(packed, coding, LIMIT) == body


async def test_no_coding() -> None:
    assert await codings.inflate(b"x", None, LIMIT) == b"x"
    assert await codings.inflate(b"x", "identity", LIMIT) == b"x"


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "GZIP", "x"])
async def test_unknown_codings(coding: str) -> None:
    with pytest.raises(TritiumError, match="Unsupported compression type") as caught:
        await codings.inflate(b"x", coding, LIMIT)
    assert caught.value.status.v2 == 501


@pytest.mark.parametrize(
    "body",
    [
        b"plain text",
        b"",
        gzip.compress(b"x" * 99)[:-9],
        gzip.compress(b"x") + b"more",
        gzip.compress(b"x")[:-5] + b"\0" * 5,
    ],
)
async def test_what_is_not_gzip(body: bytes) -> None:
    with pytest.raises(TritiumError) as caught:
        await codings.inflate(body, "gzip", LIMIT)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.status.v2 == 400


async def test_a_bomb_stops_at_the_limit() -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    start = time.perf_counter()
    with pytest.raises(TritiumError, match="decompressed, exceeds 1048576 bytes") as caught:
        await codings.inflate(bomb, "gzip", LIMIT)
    assert caught.value.status.v2 == 413
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (None, None),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("*", None),
        ("identity", None),
        ("br", None),
        ("br, gzip", "gzip"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("GZIP", None),
        ("gzip;q=0", None),
        ("gzip;q=x, deflate", "deflate"),
    ],
)
def test_choice(accepted: str | None, chosen: str | None) -> None:
    assert codings.choose(accepted) == chosen
