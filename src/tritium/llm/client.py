"""The front end's side of one engine: submit, stream, abort; text out of tokens; restarts.

Everything here runs in one event loop. The engine is a child process; when it dies, requests that have no
token yet are run again by its successor, the others end with an error, and nobody has to restart the server.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress

import msgspec

from tritium.errors import LOST, Code, TritiumError
from tritium.ipc import AsyncLink, start_child
from tritium.llm.answer import Answer
from tritium.llm.config import EngineConfig
from tritium.llm.tokenizer import Tokenizer
from tritium.llm.types import (
    Abort,
    Busy,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    GenerateRequest,
    Logging,
    Progress,
    QueueSettings,
    Ready,
    Shutdown,
    Submit,
    TokenDelta,
)
from tritium.observability import logs

STALL_S = 5.0
KILL_FACTOR = 3.0
MAX_CRASHES = 3
MAX_BACKOFF_S = 60.0
# An engine that is told to end holds nothing worth waiting for but the step that it is in.
SHUTDOWN_S = 1.0


# Turns that a thread of the engine waits for the others before it sleeps, about 0.1 ms. The runtime's own number
# keeps a core for milliseconds, which the others need when something else runs beside the engine.
SPIN_COUNT = 2000


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What GNU's OpenMP runtime is told in the engine's process, unless ``environ`` already tells it."""
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environ):
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


class EngineClient:
    """One engine process and the requests that run on it.

    Args:
        config: settings of the engine, model path resolved.
        tokenizer: turns tokens into text; its end tokens end a sequence.
        name: for log lines.
        env: variables for the process, such as the devices it may see.
        stall_s: silence of the step loop after which the engine counts as stalled, in seconds; three times
            that and it is killed. A step that announced itself as long is given its time.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        name: str = "engine",
        env: Mapping[str, str] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.on_stats: Callable[[EngineStats], None] | None = None
        self._name = name
        self._env = {**thread_settings(os.environ), **(env or {})}
        self._stall_s = stall_s
        self._log = logs.get("tritium.client")
        self._live: dict[str, Answer] = {}
        self._link: AsyncLink[FromEngine] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._up = False
        self._reason = "the engine is starting"
        self._stopping = False
        self._started: asyncio.Future[EngineInfo] | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._lost_at = 0.0  # when the engine ended that the present one replaces
        self._allowance_s = 0.0

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Starts the process and waits for its first real token.

        Raises:
            TritiumError: what the engine said of why it cannot start.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        try:
            return await asyncio.shield(self._started)
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones finish for ``drain_s`` seconds, ends the process."""
        self._stopping = True
        self._reason = "the engine is shutting down"
        deadline = time.monotonic() + drain_s
        while self._live and time.monotonic() < deadline and self._up:
            await asyncio.sleep(0.02)
        self._fail_all(TritiumError(Code.UNAVAILABLE, "the server is shutting down", retry_after_s=5))
        if self._link is not None and self._process is not None and self._process.returncode is None:
            self._link.send(Shutdown())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), SHUTDOWN_S)
        self._kill()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
            self._task.cancel()
            self._task = None

    def follow(self, config: EngineConfig) -> None:
        """Other waits and limits of the queue, for this engine and those that take its place.

        Args:
            config: as it is now, but for the fields of ``QueueSettings``.
        """
        self.config = config
        if self._up and self._link is not None:
            self._link.send(_queue_settings(config))

    def ready(self) -> bool:
        """Whether the engine is up and its step loop moves."""
        return self._up and not self._stopping and self._silence() <= self._stall_s

    def reason(self) -> str:
        """Why it is not ready; "" when it is."""
        if self.ready():
            return ""
        if self._up and not self._stopping:
            return f"the engine is stalled: no step for {time.monotonic() - self._heard:.1f} s"
        return self._reason

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def load(self) -> int:
        """Requests in flight here."""
        return len(self._live)

    # -- requests -----------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        """Runs one request; closing the iterator aborts it.

        Yields:
            deltas with ``text`` filled in; deltas that the reader was too slow for are joined. The last
            one, and only it, has ``finish``.

        Raises:
            TritiumError: the engine refused the request or lost it.
        """
        live = self._submit(request)
        try:
            while True:
                delta = await live.next()
                if delta.error is not None:
                    raise delta.error.exception()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            if self._live.get(live.request.id) is live:
                self._forget(live)

    def _submit(self, request: GenerateRequest) -> Answer:
        if self._stopping or (not self._up and self._task is None):
            raise TritiumError(Code.UNAVAILABLE, self._reason, retry_after_s=5)
        params = msgspec.structs.replace(request.params)
        if not params.ignore_eos:
            ends = set(self.tokenizer.eos_token_ids)
            params.stop_token_ids = sorted(ends.union(params.stop_token_ids))
        if params.seed is None:
            params.seed = random.getrandbits(63)
        request = msgspec.structs.replace(request, params=params)
        if request.id in self._live:
            # Two clients may send the same id; inside, each request is its own.
            request = msgspec.structs.replace(request, id=f"{request.id}#{random.getrandbits(64):x}")
        live = Answer(request, self.tokenizer)
        if self._up and self._link is not None:
            # What cannot be sent fails here, and must not be tried again with every new engine.
            self._link.send(Submit([request]))
        self._live[request.id] = live
        return live

    def _forget(self, live: Answer) -> None:
        del self._live[live.request.id]
        if self._up and self._link is not None:
            self._link.send(Abort([live.request.id]))

    def _deliver(self, delta: TokenDelta) -> None:
        live = self._live.get(delta.id)
        if live is None:
            return
        if live.push(delta):
            self._forget(live)
        elif delta.finish is not None:
            del self._live[delta.id]

    def _fail_all(self, error: TritiumError) -> None:
        for live in list(self._live.values()):
            live.fail(error)
        self._live.clear()

    # -- the process --------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Starts the engine, and starts it again whenever it dies."""
        backoff_s = 0.0
        while not self._stopping:
            try:
                came_up = await self._run_once()
            except Exception as error:
                # Without this loop nobody would ever start the engine again.
                self._log.exception("%s: the engine could not be supervised", self._name)
                came_up, self._reason = False, f"its supervision failed: {_cause(error)}"
            if self._stopping:
                return
            if self._started is not None and not self._started.done():
                why = TritiumError(Code.INTERNAL, f"the engine process ended while starting: {self._reason}")
                self._started.set_exception(why)
                return
            self.restarts += 1
            if came_up or not self._lost_at:
                self._lost_at = time.monotonic()
            self._log.error("the engine ended, starting it again", engine=self._name, reason=self._reason)
            self._settle_after_crash(came_up, keep=came_up or backoff_s < 4)
            backoff_s = 0.0 if came_up else min(MAX_BACKOFF_S, max(1.0, 2 * backoff_s))
            await asyncio.sleep(backoff_s)

    async def _run_once(self) -> bool:
        """One life of the process; whether it ever came up."""
        came_up = False
        self._reason = "the engine is starting"
        self._link = link = AsyncLink(FromEngine)
        arguments = ["--address", link.address, "--parent", str(os.getpid())]
        arguments += ["--config", msgspec.json.encode(self.config).decode(), *logs.child_arguments()]
        process = await start_child("tritium.llm.engine", arguments, self._env)
        self._process = process
        unfollow = logs.follow(lambda state: link.send(Logging(state)))
        ended = asyncio.create_task(process.wait())
        watch = asyncio.create_task(self._watch(process))
        try:
            while True:
                message = asyncio.ensure_future(link.receive())
                await asyncio.wait([message, ended], return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    # Its last words (why it failed) may still be under way.
                    await asyncio.wait([message], timeout=0.2)
                if not message.done():
                    message.cancel()
                    break
                self._heard = time.monotonic()
                came_up = self._handle(message.result()) or came_up
        finally:
            unfollow()
            watch.cancel()
            self._up = False
            self._link = None
            # Nothing runs on a dead engine; the counters stay, they are what it did.
            self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0, blocks_used=0)
            link.close()
            if process.returncode is None:
                process.kill()
        if not self._stopping and self._reason in ("", "the engine is starting"):
            self._reason = f"its process ended with {await ended}"
        return came_up

    def _handle(self, message: FromEngine) -> bool:
        """Acts on one message; whether it says that the engine is up."""
        match message:
            case Progress(deltas, stats):
                self._allowance_s = 0.0
                self.stats = stats
                for delta in deltas:
                    self._deliver(delta)
                if self.on_stats is not None:
                    self.on_stats(stats)
            case Busy(expected_ns):
                self._allowance_s = 4 * expected_ns / 1e9
            case Ready(info):
                self.info, self._up, self._reason, self._allowance_s = info, True, "", 0.0
                if self.restarts:
                    away_s = round(time.monotonic() - self._lost_at, 1)
                    self._log.info(
                        "the engine is back", engine=self._name, seconds=away_s, requests=len(self._live), pid=self.pid
                    )
                if self._link is not None:
                    # Both may have changed while it started, and of the logs it was told the level alone.
                    self._link.send(_queue_settings(self.config))
                    self._link.send(Logging(logs.state()))
                if self._live and self._link is not None:
                    self._link.send(Submit([live.request for live in self._live.values()]))
                if self._started is not None and not self._started.done():
                    self._started.set_result(info)
                return True
            case Failed(error):
                self._reason = error.message
                if self._started is not None and not self._started.done():
                    self._started.set_exception(error.exception())
        return False

    def _settle_after_crash(self, came_up: bool, *, keep: bool) -> None:
        """Ends what had begun to answer; the rest waits for the next engine, unless it was there too often."""
        for live in list(self._live.values()):
            live.crashes += came_up
            if live.answered:
                text = "the engine was lost while it answered"
                error = TritiumError(Code.UNAVAILABLE, text, reason=LOST, retry_after_s=1)
            elif live.crashes >= MAX_CRASHES:
                text = f"the request was running when the engine was lost, {live.crashes} times; it is not run again"
                error = TritiumError(Code.INTERNAL, text)
            elif not keep:
                text = f"the engine is not running: {self._reason}"
                error = TritiumError(Code.UNAVAILABLE, text, reason=LOST, retry_after_s=10)
            else:
                continue
            live.fail(error)
            del self._live[live.request.id]

    def _silence(self) -> float:
        """Seconds since the engine was heard, less what it asked for."""
        return time.monotonic() - self._heard - self._allowance_s

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        interval_s = self._stall_s / 10
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval_s)
            # While this loop was held up it read no messages: that is not the engine's silence.
            late_s = time.monotonic() - slept_at - interval_s
            if late_s > interval_s:
                self._heard += late_s
            if self._up and self._silence() > KILL_FACTOR * self._stall_s:
                self._reason = f"stalled for {time.monotonic() - self._heard:.0f} s"
                self._log.error("%s: %s, killing it", self._name, self._reason)
                process.kill()
                return

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


def _queue_settings(config: EngineConfig) -> QueueSettings:
    return QueueSettings(
        config.max_waiting, config.queue_timeout_us, config.queue_delay_us, tuple(config.preferred_rows)
    )


def _cause(error: Exception) -> str:
    """Why, without the paths that an OSError names."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
