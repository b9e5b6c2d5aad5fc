"""What the clients of a soak share: where the server is, what is counted, and when they rest."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritium.bench.load import Target, request

NAME = "soak"
MOST_PROBLEMS = 20


@dataclass
class Run:
    """One soak.

    Attributes:
        folder: of the model repository; beside it, ``pids`` holds a file for each Python instance.
        counts: requests by kind.
        crashed: requests that ended because the instance of that name died, and sequences that were lost with it.
        kills: by name of the instance.
        problems: what must not be.
        canary: different answers to the same greedy question.
        goes: cleared while all clients rest.
    """

    http: Target
    grpc_port: int
    folder: Path
    draw: random.Random
    deadline: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    canary: set[str] = field(default_factory=set)
    goes: asyncio.Event = field(default_factory=asyncio.Event)
    busy: int = 0

    @property
    def pids(self) -> Path:
        return self.folder.parent / "pids"

    def problem(self, text: str) -> None:
        self.problems.append(text)

    @property
    def hopeless(self) -> bool:
        return len(self.problems) > MOST_PROBLEMS

    def prompt(self) -> str:
        words = ["river", "model", "token", "日本", "naïve", "🙂", "1234", "server", "the", "of"]
        return " ".join(self.draw.choice(words) for _ in range(self.draw.randint(1, 40)))

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.draw.randint(1, 24), "temperature": self.draw.choice([0, 0.7, 1.0]), "top_p": 0.9}

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Nobody asks anything meanwhile, and nothing is left to be answered."""
        self.goes.clear()
        while self.busy:
            await asyncio.sleep(0.02)
        try:
            yield
        finally:
            self.goes.set()


async def post(run: Run, path: str, body: Any) -> tuple[int, bytes]:
    async with request(run.http, "POST", path, body) as response:
        return response.status, await response.body()


async def expect(run: Run, path: str, body: Any, status: int = 200) -> bytes:
    got, answer = await post(run, path, body)
    if got != status:
        run.problem(f"{path}: {got} instead of {status}: {answer[:200]!r}")
    return answer
