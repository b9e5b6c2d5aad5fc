"""What happens to the server meanwhile: loads, unloads, reloads, other settings, broken files, killed processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.soak import models
from scripts.soak.run import NAME, Run, expect, post

EVERY_S = 2.0
BACK_S = 60.0


@dataclass
class Trouble:
    """Makes it, one thing at a time.

    Attributes:
        checkpoint: of the language model.
        kill_every_s: between two killed instances.
    """

    run: Run
    checkpoint: str
    kill_every_s: float
    turn: int = 0

    def __post_init__(self) -> None:
        self._calm = asyncio.Lock()

    @asynccontextmanager
    async def calm(self) -> AsyncIterator[None]:
        """Nothing happens meanwhile, and every model is there."""
        async with self._calm:
            await self._load("coming")
            yield

    async def changes(self) -> None:
        """One after the other, for ever."""
        actions: list[Callable[[], Awaitable[None]]] = [
            self._move,
            self._unload,
            self._rebatch,
            self._break,
            self._come,
            self._delay,
        ]
        while True:
            await asyncio.sleep(EVERY_S)
            async with self._calm:
                action = actions[self.turn % len(actions)]
                self.turn += 1
                await action()
                self.run.counts[f"({action.__name__.strip('_')})"] += 1

    async def kills(self) -> None:
        """One Python instance after the other, for ever."""
        while True:
            await asyncio.sleep(self.kill_every_s)
            async with self._calm:
                await self._kill()

    async def _load(self, name: str) -> None:
        await expect(self.run, f"/v2/repository/models/{name}/load", {})

    async def _move(self) -> None:
        """Another file: loaded beside the old one, no request fails."""
        models.write_moving(self.run.folder, 1000 * (self.turn % 7))
        await self._load("moving")

    async def _break(self) -> None:
        """A file that cannot be loaded: the old one goes on."""
        models.write_model(self.run.folder, "moving", "this is no Python\n", f"max_batch_size: 8\n{models.TENSORS}")
        status, answer = await post(self.run, "/v2/repository/models/moving/load", {})
        if status == 200 or b"SyntaxError" not in answer:
            self.run.problem(f"a broken model was loaded: {status} {answer[:200]!r}")

    async def _unload(self) -> None:
        await expect(self.run, "/v2/repository/models/coming/unload", {})

    async def _come(self) -> None:
        await self._load("coming")

    async def _rebatch(self) -> None:
        """Other batching for a live model: its processes stay."""
        before = {name: pid(self.run, name) for name in ("dynamic_0_0", "dynamic_0_1")}
        models.write_dynamic(self.run.folder, self.run.draw.choice([0, 500, 3000]), self.run.draw.random() < 0.5)
        await self._load("dynamic")
        after = {name: pid(self.run, name) for name in before}
        if before != after:
            self.run.problem(f"other batching has restarted instances: {before} became {after}")

    async def _delay(self) -> None:
        """Another queue for the live language model: its engine stays."""
        models.write_llm(self.run.folder, self.checkpoint, self.run.draw.choice([0, 1000, 5000]))
        await self._load(NAME)

    async def _kill(self) -> None:
        """Kills an instance and waits for its successor."""
        kinds = sorted(models.INSIDE)
        kind = kinds[sum(self.run.kills.values()) % len(kinds)]
        names = sorted(path.name for path in self.run.pids.glob(f"{kind}*") if path.suffix != ".new")
        name = self.run.draw.choice(names)
        before = pid(self.run, name)
        self.run.kills[name] += 1
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + BACK_S
        while pid(self.run, name) == before:
            if time.monotonic() > deadline:
                self.run.problem(f"instance {name} was not started again in {BACK_S:.0f} s")
                return
            await asyncio.sleep(0.05)


def pid(run: Run, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(run.pids / name).read_text())
    return -1


def judge_crashes(run: Run) -> None:
    """No more may have failed than were inside the instances that died."""
    for name, count in run.crashed.items():
        kind = name.partition("_")[0]
        # A lost sequence names its model, everything else its instance.
        kills = sum(n for killed, n in run.kills.items() if killed == name or killed.startswith(f"{name}_"))
        if count > kills * models.INSIDE.get(kind, 0):
            run.problem(f"{count} requests failed with {name}, which was killed {kills} times")
