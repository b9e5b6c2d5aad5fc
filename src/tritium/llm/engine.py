"""The engine process: receive, schedule, run, update, send.

Started as ``python -m tritium.llm.engine``; one loop, no threads. Its heartbeat is the loop itself: every
turn, idle ones too, sends what it brought, so a hang cannot look healthy.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from dataclasses import replace
from typing import NoReturn

import msgspec

from tritium.errors import Code, TritiumError
from tritium.ipc import Link, follow_parent
from tritium.llm.config import EngineConfig
from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.runner.ranks import RankGroup
from tritium.llm.types import (
    Abort,
    Busy,
    EngineInfo,
    Failed,
    GenerateRequest,
    Logging,
    Progress,
    QueueSettings,
    Ready,
    SamplingParams,
    ScheduledBatch,
    Submit,
    ToEngine,
    TokenDelta,
    to_wire,
)
from tritium.observability import logs

MAX_IN_FLIGHT = 1
IDLE_BEAT_MS = 1000
QUIET_STEP_NS = 500_000_000


class Engine:
    """One LLM instance: a scheduler, the ranks that compute, and the channel to the front end.

    Args:
        in_flight: steps that may be submitted before the first one's output is read: 1 is the plain loop.
    """

    def __init__(
        self, scheduler: Scheduler, ranks: RankGroup, link: Link[ToEngine], in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._link = link
        self._in_flight = in_flight
        self._flight: deque[tuple[ScheduledBatch, RankGroup.Handle]] = deque()
        self._refused: list[TokenDelta] = []
        self._ns_per_token = 0.0
        self._steps = 0
        self._next_beat = 0.0
        self._stopped = False

    def run(self) -> None:
        """Steps until the front end says to stop."""
        while not self._stopped:
            self._receive(self._patience_ms())
            steps, deltas = self._steps, self.step()
            now = time.monotonic()
            if deltas or steps != self._steps or now >= self._next_beat:
                self._link.send(Progress(deltas, self._scheduler.stats()))
                self._next_beat = now + IDLE_BEAT_MS / 1000

    def step(self) -> list[TokenDelta]:
        """Schedule, run, update: one turn of the loop; what it added to which request."""
        now = time.monotonic_ns()
        ready_at = self._scheduler.ready_at(now)
        if ready_at is None or ready_at <= now:
            while len(self._flight) < self._in_flight and (batch := self._scheduler.schedule(now)):
                self._warn_if_long(batch)
                self._flight.append((batch, self._ranks.submit(batch)))
        deltas = self._refused + self._scheduler.take_finished()
        self._refused = []
        if self._flight:
            batch, handle = self._flight.popleft()
            output = handle.result()
            self._steps += 1
            self._learn_pace(batch, output.elapsed_ns)
            deltas += self._scheduler.update(batch, output, time.monotonic_ns())
        return deltas

    def add(self, request: GenerateRequest) -> None:
        """Takes a request in; a refusal is answered with the next turn."""
        refusal = self._scheduler.add(request, time.monotonic_ns())
        if refusal is not None:
            self._refused.append(refusal)

    def _patience_ms(self) -> int:
        """How long the loop may sleep for a message: not at all while there is work."""
        if self._flight or self._refused:
            return 0
        if not self._scheduler.has_work():
            return IDLE_BEAT_MS
        now = time.monotonic_ns()
        ready_at = self._scheduler.ready_at(now)
        # Collecting arrivals is counted in microseconds, zmq's patience in milliseconds: poll below one.
        return 0 if ready_at is None else min(IDLE_BEAT_MS, max(0, (ready_at - now) // 1_000_000))

    def _receive(self, timeout_ms: int) -> None:
        while (message := self._link.receive(timeout_ms)) is not None:
            timeout_ms = 0
            match message:
                case Submit(requests):
                    for request in requests:
                        self.add(request)
                case Abort(ids):
                    for request_id in ids:
                        self._scheduler.abort(request_id)
                case QueueSettings():
                    changes = msgspec.structs.asdict(message)
                    self._scheduler.follow(replace(self._scheduler.config, **changes))
                case Logging(state):
                    logs.apply(state)
                    logs.get("tritium.engine").debug("logs as the server does from now on", level=state.verbose)
                case _:
                    self._stopped = True
                    return

    def _warn_if_long(self, batch: ScheduledBatch) -> None:
        expected = int(batch.num_tokens * self._ns_per_token)
        if expected > QUIET_STEP_NS:
            self._link.send(Busy(expected))

    def _learn_pace(self, batch: ScheduledBatch, elapsed_ns: int) -> None:
        # The slowest recent pace per token: an estimate for a watchdog has to err on the long side.
        self._ns_per_token = max(elapsed_ns / batch.num_tokens, 0.9 * self._ns_per_token)


def start(config: EngineConfig, link: Link[ToEngine]) -> tuple[Engine, EngineInfo]:
    """Loads the model, sizes the cache and generates a real token.

    Raises:
        TritiumError: the model cannot be loaded or gives no token.
    """
    ranks = RankGroup(config)
    info = ranks.load()
    config = replace(config, max_length=info.max_length)
    scheduler = Scheduler(SchedulerConfig.of(config, info.max_length), info.budget.num_blocks)
    engine = Engine(scheduler, ranks, link)
    begun = time.monotonic()
    prove(engine, info.vocab_size)
    scheduler.start_counting()  # nobody asked for that token
    info.startup["first_token_s"] = time.monotonic() - begun
    return engine, info


def prove(engine: Engine, vocab_size: int) -> None:
    """Generates two tokens through the whole loop, so that ready means able.

    Raises:
        TritiumError: INTERNAL when that fails, with the reason.
    """
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompt = [token % vocab_size for token in (1, 2, 3, 4)]
    engine.add(GenerateRequest(id="self-test", tokens=prompt, params=params, arrived_ns=time.monotonic_ns()))
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for delta in engine.step():
            if delta.error is not None:
                raise TritiumError(Code.INTERNAL, f"the self-test failed: {delta.error.message}")
            if delta.finish is not None:
                return
    raise TritiumError(Code.INTERNAL, "the self-test gave no token in 600 s")


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="tritium.llm.engine", description="Runs one engine for a front end.")
    parser.add_argument("--address", required=True, help="channel of the front end")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front end")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    follow_parent(arguments.parent)
    logs.setup(arguments.log_level, arguments.log_format)
    link: Link[ToEngine] = Link(arguments.address, ToEngine)
    try:
        engine, info = start(msgspec.json.decode(arguments.config, type=EngineConfig), link)
    except TritiumError as error:
        fail(link, error)
    except Exception as error:
        logs.get("tritium.engine").exception("the engine cannot start")
        fail(link, TritiumError(Code.INTERNAL, f"the engine cannot start: {type(error).__name__}: {error}"))
    link.send(Ready(info))
    # What was made while loading lives as long as we do: keep the collector from walking it in every pass.
    gc.collect()
    gc.freeze()
    # Whole passes are put off until what is new is a quarter of what the last one saw, the frozen included.
    gc.collect()
    engine.run()
    link.close()


def fail(link: Link[ToEngine], error: TritiumError) -> NoReturn:
    """Tells the front end why there is no engine, and ends."""
    link.send(Failed(to_wire(error)))
    link.close()
    sys.exit(1)


if __name__ == "__main__":
    main()
