"""Care: how long a connection lives, and what pings it sends and bears (the channel arguments of gRPC's own server)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritium.frontends.http2.wire import ENHANCE_YOUR_CALM, NO_ERROR, WireError

if TYPE_CHECKING:
    from tritium.frontends.http2.connection import Connection

# From here on a time means never, in milliseconds.
_NEVER_MS = (1 << 31) - 1
_IDLE_PING_S = 7200.0
_GREETING_S = 20.0
_MAX_UNREAD_REPLIES = 1000
# Clients that follow the bandwidth change their window a few times a second.
_MAX_SETTINGS, _SETTINGS_PER_S = 100, 20.0


class _Bucket:
    """How often something happened, less what is allowed."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._level, self._at = 0.0, 0.0

    def add(self, per_s: float) -> float:
        """It happened once more; returns the level, which falls by ``per_s`` each second."""
        now = time.monotonic()
        self._level = max(0.0, self._level - (now - self._at) * per_s) + 1
        self._at = now
        return self._level


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds; None for never.

    Attributes:
        ping_s, ping_timeout_s: a connection silent for that long is pinged, and closed when no answer comes.
        ping_idle: also one without calls.
        max_pings: in a row without anything sent; 0 for any number.
        min_interval_s, max_strikes: how often a client may ping, and how often it may do so too soon (0: always).
        age_s, grace_s: how long a connection takes calls, and how long they may last then.
    """

    ping_s: float | None = 60.0
    ping_timeout_s: float = 20.0
    ping_idle: bool = False
    max_pings: int = 2
    min_interval_s: float = 300.0
    max_strikes: int = 2
    age_s: float | None = None
    grace_s: float | None = None

    @classmethod
    def of(cls, options: Mapping[str, int]) -> Limits:
        """What channel arguments say."""

        def seconds(name: str, default: int) -> float | None:
            value = options.get("grpc." + name, default)
            return None if value >= _NEVER_MS else value / 1e3

        return cls(
            seconds("keepalive_time_ms", 60_000),
            seconds("keepalive_timeout_ms", 20_000) or 20.0,
            bool(options.get("grpc.keepalive_permit_without_calls", 0)),
            options.get("grpc.http2.max_pings_without_data", 2),
            seconds("http2.min_ping_interval_without_data_ms", 300_000) or 0.0,
            options.get("grpc.http2.max_ping_strikes", 2),
            seconds("max_connection_age_ms", _NEVER_MS),
            seconds("max_connection_age_grace_ms", _NEVER_MS),
        )


class Care:
    """The clocks of one connection.

    Attributes:
        alive: whether anything has come since the last look.
    """

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self.alive = False
        self._pings = 0
        self._strikes = 0
        self._pinged_at = -1e9
        self._replies = 0
        self._resets, self._settings = _Bucket(), _Bucket()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self) -> None:
        """The connection is open."""
        self._later("greeting", _GREETING_S, self._greeting)
        self._later("ping", self._limits.ping_s, self._look)
        if self._limits.age_s is not None:
            # Not all that came together leave together.
            self._later("age", self._limits.age_s * random.uniform(0.9, 1.1), self._aged)

    def end(self) -> None:
        """The connection is closed."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _later(self, name: str, delay_s: float | None, call: Callable[[], None]) -> None:
        if delay_s is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(delay_s, call)

    def _greeting(self) -> None:
        if not self._connection.greeted:
            self._connection.give_up(NO_ERROR, "no greeting came")

    def _look(self) -> None:
        """Pings a client that has been silent."""
        limits = self._limits
        wanted = not self.alive and (limits.ping_idle or bool(self._connection.calls))
        self.alive = False
        if wanted and (not limits.max_pings or self._pings < limits.max_pings):
            self._pings += 1
            self._connection.send_ping()
            self._later("ping", limits.ping_timeout_s, self._silent)
        else:
            self._later("ping", limits.ping_s, self._look)

    def _silent(self) -> None:
        if self.alive:
            self._look()
        else:
            self._connection.give_up(NO_ERROR, "ping_timeout")

    def _aged(self) -> None:
        self._connection.leave()
        self._later("age", self._limits.grace_s, self._connection.cancel_calls)

    def sent(self) -> None:
        """An answer was sent: pings may begin to count anew."""
        self._pings = self._strikes = 0
        self._pinged_at = -1e9

    def pinged(self, with_calls: bool) -> None:
        """The client pings.

        Raises:
            WireError: it does so too often.
        """
        now = time.monotonic()
        least_s = self._limits.min_interval_s if with_calls or self._limits.ping_idle else _IDLE_PING_S
        if now - self._pinged_at < least_s:
            self._strikes += 1
            if self._limits.max_strikes and self._strikes > self._limits.max_strikes:
                raise WireError(ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_at = now

    def control(self, blocked: bool) -> None:
        """The client wants an answer that is no call's; one that does not read them gets not many.

        Raises:
            WireError: it got them.
        """
        self._replies = self._replies + 1 if blocked else 0
        if self._replies > _MAX_UNREAD_REPLIES:
            raise WireError(ENHANCE_YOUR_CALM, "answers are not read")

    def given_up(self, max_streams: int) -> None:
        """The client gave a call up: it may do so as often as it likes, but not faster than calls can be begun.

        Twice as many as may be open at once, and that many more each second (CVE-2023-44487 begins and gives up
        thousands in that time).

        Raises:
            WireError: it does so too often.
        """
        if self._resets.add(max_streams) > 2 * max_streams:
            raise WireError(ENHANCE_YOUR_CALM, "too many calls were given up")

    def set(self) -> None:
        """The client sends SETTINGS, each of which costs as much as it has calls.

        Raises:
            WireError: it does so too often.
        """
        if self._settings.add(_SETTINGS_PER_S) > _MAX_SETTINGS:
            raise WireError(ENHANCE_YOUR_CALM, "too many settings")
