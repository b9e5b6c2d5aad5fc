"""The response cache in a real Redis, in one that dies, and in one that never answers."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.serving.fakes import ECHO, Echo, request, write_model
from tests.serving.support import serving
from tritium.errors import TritiumError
from tritium.serving import redis_cache
from tritium.serving.cache import pack, parse_cache_config
from tritium.serving.redis_cache import PREFIX, RedisCache, RedisSettings, read_settings
from tritium.settings import shown
from tritium.types import DType, InferResponse, Tensor

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (Debian: apt-get install it)")
MODEL = ECHO + "response_cache { enable: true }"


class RedisServer:
    """A Redis of this test's own, on a port of its own, that keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self._folder = folder
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        command = [str(BINARY), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._folder), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError("redis-server does not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def option(self, **more: object) -> str:
        return ",".join([f"redis,host=127.0.0.1,port={self.port}", *(f"{key}={value}" for key, value in more.items())])


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def opened(option: str) -> AsyncIterator[RedisCache]:
    cache = parse_cache_config([option])
    assert isinstance(cache, RedisCache)
    try:
        yield cache
    finally:
        await cache.close()


def test_settings_as_triton_names_them() -> None:
    options = ["redis,host=cache.example", "redis,port=6380,user=me,password=a,b,,db=2,wait_timeout=7,pool_size=3"]
    cache = parse_cache_config(options)
    assert isinstance(cache, RedisCache)
    known = cache._client.connection_pool.connection_kwargs
    assert (known["host"], known["port"], known["db"]) == ("cache.example", 6380, 2)
    assert (known["username"], known["password"]) == ("me", "a,b,")
    given = {"host": "h", "port": "1", "socket_timeout": "0", "connect_timeout": "250", "keep_alive": "false"}
    settings = read_settings(given)
    assert settings == RedisSettings("h", 1, socket_timeout=0, connect_timeout=250, keep_alive=False)
    assert (settings.seconds("socket_timeout"), settings.seconds("connect_timeout")) == (5.0, 0.25)
    assert read_settings({"host": "h", "port": "1", "cacert": "/ca.pem"}).tls_enabled
    assert not read_settings({"host": "h", "port": "1"}).tls_enabled


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("redis,host=h", "redis wants 'port'"),
        ("redis,port=1", "redis wants 'host'"),
        ("redis,host=h,port=x", "redis,port is 'x', expected a number"),
        ("redis,host=h,port=1,keep_alive=2", "redis,keep_alive is '2', expected true or false"),
        ("redis,host=h,port=1,colour=red", "redis has no 'colour', expected one of host, port, user"),
        ("redis,host=h,port=1,pool_size=0", "redis,pool_size is '0', expected at least 1"),
        ("redis,host=h,port=1,sni=a", "redis,sni is not supported"),
        ("redis", "--cache-config is 'redis'"),
    ],
)
def test_settings_that_are_refused(option: str, words: str) -> None:
    with pytest.raises(TritiumError) as caught:
        parse_cache_config([option])
    assert words in caught.value.message and caught.value.param == "cache_config"


def test_the_password_is_never_shown() -> None:
    texts = ("redis,host=h,password=s3,cret,port=1", "redis,password=s3", "local,size=1")
    assert shown("cache_config", texts) == ("redis,host=h,password=***,port=1", "redis,password=***", "local,size=1")


@needs_redis
async def test_answers_lie_in_redis_and_are_found_by_another_server(repository: Path, redis: RedisServer) -> None:
    write_model(repository, "echo", MODEL)
    (repository / "echo" / "1" / "model.bin").write_bytes(b"one")
    for expected in (1, 1):  # the second server finds what the first has kept
        async with (
            opened(redis.option()) as cache,
            serving(repository, control="explicit", load_models=["echo"], cache=cache) as server,
        ):
            for id in ("a", "b"):
                answer = await server.infer(request(rows=2, id=id))
                assert answer.id == id and answer.outputs[0].numpy().tolist() == [[0, 1], [2, 3]]
            assert sum(len(echo.seen) for echo in Echo.made) == expected
            assert cache.stats.hits + cache.stats.misses == cache.stats.lookups == 2
            assert server.statistics("echo")[0].cache_hit.count == cache.stats.hits
            keys = [key async for key in cache._client.scan_iter(PREFIX + b"*")]
            assert len(keys) == 1
    # Other files of the same sizes and times are another model.
    path = repository / "echo" / "1" / "model.bin"
    path.write_bytes(b"two")
    async with (
        opened(redis.option()) as cache,
        serving(repository, control="explicit", load_models=["echo"], cache=cache) as server,
    ):
        await server.infer(request(rows=2))
        assert cache.stats.hits == 0


@needs_redis
async def test_entries_that_others_wrote_are_doubted(repository: Path, redis: RedisServer) -> None:
    write_model(repository, "echo", MODEL)
    async with (
        opened(redis.option(db=1)) as cache,
        serving(repository, control="explicit", load_models=["echo"], cache=cache) as server,
    ):
        await server.infer(request())
        (key,) = [key async for key in cache._client.scan_iter(PREFIX + b"*")]
        short = Tensor("OUT", DType.FP32, (1, 1000), memoryview(b"\0\0\0\0"))
        text = Tensor("OUT", DType.BYTES, (1, 2), memoryview(b"\xff\xff\xff\xffa"))
        for wrong in (b"", b"\x80\x04garbage", pack(InferResponse("", "", "", [short]), []),
                      pack(InferResponse("", "", "", [text]), [])):  # fmt: skip
            await cache._client.set(key, wrong)
            assert (await server.infer(request())).outputs[0].numpy().tolist() == [[0, 1]]
        await cache._client.delete(key)
        await cache._client.hset(key, "a", "b")  # a key of another kind
        assert (await server.infer(request())).outputs[0].numpy().tolist() == [[0, 1]]


@needs_redis
async def test_a_redis_that_dies_and_comes_back(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_cache, "REST_S", 0.2)
    caplog.set_level("INFO")
    mine = RedisServer(tmp_path).start()
    write_model(repository, "echo", MODEL)
    try:
        async with (
            opened(mine.option(socket_timeout=300)) as cache,
            serving(repository, control="explicit", load_models=["echo"], cache=cache) as server,
        ):
            await asyncio.gather(*(server.infer(request(rows=n % 4 + 1)) for n in range(32)))
            mine.stop()
            answers = await asyncio.gather(*(server.infer(request(rows=n % 4 + 1)) for n in range(64)))
            assert all(answer.error is None for answer in answers)
            said = [record for record in caplog.records if "does not answer" in record.getMessage()]
            assert len(said) == 1
            mine.start()
            await asyncio.sleep(0.3)
            before = cache.stats.hits
            await server.infer(request())
            await server.infer(request())
            assert cache.stats.hits > before
            assert any("answers again" in record.getMessage() for record in caplog.records)
    finally:
        mine.stop()


async def test_nobody_waits_for_a_redis_that_never_answers(repository: Path) -> None:
    """It takes connections and says nothing: one request waits for its timeout, the others for nothing."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()
        await writer.wait_closed()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    write_model(repository, "echo", MODEL)
    try:
        async with (
            opened(f"redis,host=127.0.0.1,port={port},socket_timeout=200,connect_timeout=200") as cache,
            serving(repository, control="explicit", load_models=["echo"], cache=cache) as server,
        ):
            begun = time.monotonic()
            assert (await server.infer(request())).error is None
            assert time.monotonic() - begun < 3
            begun = time.monotonic()
            for _ in range(50):
                assert (await server.infer(request())).error is None
            assert time.monotonic() - begun < 2
            assert cache.stats.misses == 51 and cache.stats.hits == 0
    finally:
        silent.close()
        await asyncio.sleep(0.05)


@needs_redis
async def test_a_password_and_a_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = RedisServer(tmp_path, "--user", "me", "on", ">s3cret", "~*", "+@all", "--requirepass", "other").start()
    try:
        async with opened(mine.option(user="me", password="s3cret", db=3, keep_alive="true", pool_size=1)) as cache:
            await asyncio.gather(*(cache.put(bytes([n]), b"entry") for n in range(20)))
            assert await cache.get(b"\0") == b"entry"
        for wrong in (mine.option(password="no"), mine.option()):
            async with opened(wrong) as cache:
                await cache.put(b"a", b"b")
                assert await cache.get(b"\0") is None
        assert "s3cret" not in caplog.text
    finally:
        mine.stop()


@needs_redis
async def test_more_questions_than_connections_are_no_fault_of_redis(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(redis.option(pool_size=1, wait_timeout=1)) as cache:
        entry = bytes(1 << 20)
        await cache.put(b"busy", entry)
        found = await asyncio.gather(*(cache.get(b"busy") for _ in range(60)))
        assert entry in found and None in found
        assert await cache.get(b"busy") == entry
    assert "does not answer" not in caplog.text


@needs_redis
async def test_a_full_redis_is_no_reason_to_fail(tmp_path: Path) -> None:
    mine = RedisServer(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction").start()
    try:
        async with opened(mine.option()) as cache:
            await cache.put(b"small", b"1")
            for n in range(8):
                await cache.put(bytes([n]), bytes(1 << 20))
            assert await cache.get(b"small") == b"1"
    finally:
        mine.stop()


@needs_redis
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is not installed")
async def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    plain = RedisServer(tmp_path)
    options = ["--tls-port", str(plain.port), "--port", "0", "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
    plain._options = tuple(options)
    mine = plain.start()
    try:
        async with opened(mine.option(cacert=certificate)) as cache:
            await cache.put(b"a", np.arange(3).tobytes())
            assert await cache.get(b"a") == np.arange(3).tobytes()
        async with opened(mine.option(tls_enabled="true")) as cache:  # nobody vouches for that certificate
            assert await cache.get(b"a") is None
    finally:
        mine.stop()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(TritiumError, match=r"pip install 'tritium\[redis\]'"):
        parse_cache_config(["redis,host=h,port=1"])
