"""Response cache in Redis, shared by all servers that point at it (``--cache-config redis,host=...,port=...``).

A Redis that is out of reach is a cache without entries: requests are answered as if there were none, nothing waits
longer than the timeouts, and after a failure nobody asks for a while. Entries are never trusted further than their
form: see ``cache.unpack``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tritium.errors import Code, TritiumError, invalid, pip_install
from tritium.observability import logs
from tritium.serving.cache import CacheStats

# Before each key; another form of keys or entries takes another number, so that versions do not read each other's.
PREFIX = b"tritium:response:1:"
# After a failure Redis is left alone for this long, in seconds.
REST_S = 5.0
# What a timeout of 0, for ever in Triton, is here, in milliseconds: no request waits for ever for a cache.
LONGEST_MS = 5000

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """How to reach it; names are those of Triton's Redis cache.

    Attributes:
        user: for a server with access control lists.
        connect_timeout: longest wait for a connection, in milliseconds.
        socket_timeout: longest wait for an answer, in milliseconds.
        wait_timeout: longest wait for one of the ``pool_size`` connections, in milliseconds.
        keep_alive: connections are kept open by the system's own packets.
        tls_enabled: implied by each of those below.
        cert, key: files with what this server shows (PEM).
        cacert, cacert_dir: file, or folder, with the certificates that Redis is checked by (PEM).
    """

    host: str
    port: int
    user: str = "default"
    password: str = ""
    db: int = 0
    connect_timeout: int = 500
    socket_timeout: int = 500
    pool_size: int = 8
    wait_timeout: int = 100
    keep_alive: bool = True
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""

    def seconds(self, name: str) -> float:
        """A timeout in seconds."""
        return (getattr(self, name) or LONGEST_MS) / 1000


def read_settings(given: Mapping[str, str]) -> RedisSettings:
    """The settings that are written in ``--cache-config``.

    Raises:
        TritiumError: INVALID_ARGUMENT naming what is missing, unknown, or no value of its kind.
    """
    kinds = {field.name: field.type for field in fields(RedisSettings)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name == "sni":
            raise _wrong("redis,sni is not supported, expected the name of the certificate as redis,host")
        if name not in kinds:
            raise _wrong(f"redis has no '{name}', expected one of {', '.join(kinds)}")
        values[name] = _value(name, str(kinds[name]), text)
    for name in ("host", "port"):
        if not values.get(name):
            raise _wrong(f"redis wants '{name}', as in redis,host=localhost --cache-config redis,port=6379")
    if any(values.get(name) for name in ("cert", "key", "cacert", "cacert_dir")):
        values["tls_enabled"] = True
    if not values.get("pool_size", 1):
        raise _wrong("redis,pool_size is '0', expected at least 1")
    return RedisSettings(**values)


def _value(name: str, kind: str, text: str) -> Any:
    if kind == "bool":
        known = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
        if known is None:
            raise _wrong(f"redis,{name} is '{text}', expected true or false")
        return known
    if kind == "int":
        if not re.fullmatch("[0-9]{1,9}", text):
            raise _wrong(f"redis,{name} is '{text}', expected a number")
        return int(text)
    return text


def _wrong(text: str) -> TritiumError:
    return invalid(f"--cache-config: {text}", param="cache_config")


class RedisCache:
    """Entries in Redis; it decides itself which of them leave (``maxmemory-policy``).

    Raises:
        TritiumError: UNAVAILABLE without the package ``redis``.
    """

    shared = True

    def __init__(self, settings: RedisSettings) -> None:
        self.stats = CacheStats()
        self._client = _client(settings)
        self._where = f"{settings.host}:{settings.port}"
        parts = ("wait_timeout", "connect_timeout", "socket_timeout")
        self._limit_s = sum(settings.seconds(name) for name in parts)
        # Turns at the connections: who gets none in time goes on without, and that is no fault of Redis.
        self._turns = asyncio.Semaphore(settings.pool_size)
        self._wait_s = settings.seconds("wait_timeout")
        self._resting_until = 0.0
        self._down = False

    async def get(self, key: bytes) -> bytes | None:
        """The entry, if Redis has one and says so in time."""
        begin_ns = time.monotonic_ns()
        entry = await self._ask(self._client.get, PREFIX + key)
        stats = self.stats
        stats.lookups += 1
        if isinstance(entry, bytes):
            stats.hits += 1
        else:
            stats.misses += 1
        stats.lookup_ns += time.monotonic_ns() - begin_ns
        return entry if isinstance(entry, bytes) else None

    async def put(self, key: bytes, entry: bytes) -> None:
        """Keeps an entry, if Redis takes it."""
        begin_ns = time.monotonic_ns()
        await self._ask(self._client.set, PREFIX + key, entry)
        self.stats.insertion_ns += time.monotonic_ns() - begin_ns

    async def close(self) -> None:
        """Gives up the connections."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._client.aclose()
        except (OSError, TimeoutError) as error:
            _log.debug("connections to the response cache could not be closed", error=error)

    async def _ask(self, command: Any, *arguments: bytes) -> Any:
        """The answer to a command; None when there is none."""
        if time.monotonic() < self._resting_until:
            return None
        if self._turns.locked():
            try:
                await asyncio.wait_for(self._turns.acquire(), self._wait_s)
            except TimeoutError:
                return None
        else:
            await self._turns.acquire()
        try:
            return None if time.monotonic() < self._resting_until else await self._say(command, *arguments)
        finally:
            self._turns.release()

    async def _say(self, command: Any, *arguments: bytes) -> Any:
        from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

        try:
            async with asyncio.timeout(self._limit_s):
                answer = await command(*arguments)
        except ResponseError as error:
            # It is there, but will not: a full memory, a key of another kind, a password that is wrong.
            self._fail(error, rest=isinstance(error, AuthenticationError | NoPermissionError))
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(error, rest=True)
        else:
            if self._down:
                self._down, self._resting_until = False, 0.0
                _log.info("the response cache answers again", redis=self._where)
            return answer
        return None

    def _fail(self, error: Exception, *, rest: bool) -> None:
        """One warning until it answers again, however many requests meet it."""
        if rest:
            self._resting_until = time.monotonic() + REST_S
        if not self._down:
            self._down = True
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _log.warning("the response cache does not answer, requests go on without it", redis=self._where, why=why)


def _client(settings: RedisSettings) -> Any:
    try:
        from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise TritiumError(
            Code.UNAVAILABLE, f"--cache-config redis needs the package redis: {pip_install('tritium[redis]')}"
        ) from error
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "db": settings.db,
        "socket_connect_timeout": settings.seconds("connect_timeout"),
        "socket_timeout": settings.seconds("socket_timeout"),
        "socket_keepalive": settings.keep_alive,
        # One new connection, for one that has gone stale while nobody used it.
        "retry": Retry(NoBackoff(), 1),
    }
    if settings.password:
        options |= {"username": settings.user, "password": settings.password}
    if settings.tls_enabled:
        options |= {
            "ssl_certfile": settings.cert or None,
            "ssl_keyfile": settings.key or None,
            "ssl_ca_certs": settings.cacert or None,
            "ssl_ca_path": settings.cacert_dir or None,
        }
    kind = SSLConnection if settings.tls_enabled else Connection
    pool = BlockingConnectionPool(
        max_connections=settings.pool_size,
        timeout=settings.seconds("wait_timeout"),
        connection_class=kind,
        **options,
    )
    return Redis.from_pool(pool)
