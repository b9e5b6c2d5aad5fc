from __future__ import annotations

import hpack
import pytest

from tritium.frontends.http2 import wire
from tritium.frontends.http2.opening import HeadReader, Malformed, Opening

CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


def read(headers: list[tuple[bytes, bytes]]) -> Opening:
    return HeadReader().read(hpack.Encoder().encode(headers), lambda opening: None)


@pytest.mark.parametrize("size", [4096, 65536, 100, 0])
def test_what_the_writer_writes_is_what_a_decoder_reads(size: int) -> None:
    writer, decoder = wire.HeadWriter(), hpack.Decoder()
    decoder.max_allowed_table_size = size
    writer.resize(size)
    for _ in range(3):
        assert decoder.decode(writer.begin()) == [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-accept-encoding", "identity, deflate, gzip"),
        ]
        assert decoder.decode(writer.end()) == [("grpc-status", "0")]
        failed = decoder.decode(writer.fail(5, "100 % wröng" + "x" * 200, [("a", "b"), ("c-bin", b"\0\1")], alone=True))
        assert failed[:3] == [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "5")]
        assert failed[3:] == [("grpc-message", "100 %25 wr%C3%B6ng" + "x" * 200), ("a", "b"), ("c-bin", "AAE")]
        assert decoder.decode(writer.refuse(415)) == [(":status", "415")]


def test_a_table_that_shrinks_later() -> None:
    writer, decoder = wire.HeadWriter(), hpack.Decoder()
    decoder.decode(writer.begin())
    decoder.decode(writer.end())
    decoder.max_allowed_table_size = 0
    writer.resize(0)
    assert decoder.decode(writer.begin())[0] == (":status", "200")
    assert decoder.decode(writer.end()) == [("grpc-status", "0")]


def test_heads_are_known_by_their_bytes_as_long_as_the_table_stays() -> None:
    encoder, reader = hpack.Encoder(), HeadReader()
    made: list[Opening] = []
    first, second, third = (encoder.encode([*CALL, (b"x", b"one")]) for _ in range(3))
    assert second == third != first
    openings = [reader.read(block, made.append) for block in (first, second, third)]
    assert [one.metadata for one in openings] == [(("x", "one"),)] * 3
    assert openings[1] is openings[2] and len(made) == 2
    # A new entry moves all others: the same bytes now mean something else.
    reader.read(encoder.encode([*CALL, (b"x", b"two")]), made.append)
    again = reader.read(encoder.encode([*CALL, (b"x", b"two")]), made.append)
    assert again.metadata == (("x", "two"),)
    assert reader.read(encoder.encode([*CALL, (b"x", b"one")]), made.append).metadata == (("x", "one"),)


def test_openings() -> None:
    opening = read([*CALL, (b"a-bin", b"AAE"), (b"grpc-timeout", b"250m"), (b"grpc-encoding", b"gzip"), (b"b", b"c")])
    assert opening.path == "/a.B/C" and opening.http_status == 200
    assert opening.metadata == (("a-bin", b"\0\1"), ("b", "c"))
    assert opening.timeout_s == 0.25 and opening.coding == "gzip"
    assert read([(b":method", b"GET"), *CALL[1:]]).http_status == 405
    assert read([*CALL[:3], (b"content-type", b"text/html")]).http_status == 415


@pytest.mark.parametrize(
    "headers",
    [
        CALL[1:],
        [*CALL, (b":path", b"/late")],
        [*CALL[:1], *CALL],
        [*CALL, (b"Upper", b"case")],
        [*CALL, (b"connection", b"close")],
        [*CALL[:4], (b"te", b"gzip")],
        [*CALL, (b"a-bin", b"A")],
        [*CALL, (b"grpc-timeout", b"1d")],
        [*CALL, (b"grpc-timeout", b"123456789S")],
    ],
)
def test_malformed_heads(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Malformed):
        read(headers)


def test_blocks_that_cannot_be_read() -> None:
    for block in (b"\xff\xff\xff\xff\xff\xff", b"\xc8", hpack.Encoder().encode([(b"a", b"b" * 300_000)])):
        with pytest.raises(wire.WireError) as caught:
            HeadReader().read(block, lambda opening: None)
        assert caught.value.code == wire.COMPRESSION_ERROR


def test_padding() -> None:
    assert wire.unpadded(0, memoryview(b"abc")) == b"abc"
    assert wire.unpadded(wire.PADDED, memoryview(b"\2abc..")) == b"abc"
    for payload in (b"", b"\1", b"\4abc"):
        with pytest.raises(wire.WireError):
            wire.unpadded(wire.PADDED, memoryview(payload))
