"""Servers for tests, and what is asked of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.serving.fakes import ECHO
from tritium.errors import TritiumError
from tritium.serving.server import Server

FAIL = ECHO + 'parameters { key: "fail" value { string_value: "%s" } }'
ALL = "version_policy { all { } }"


@asynccontextmanager
async def serving(*repositories: Path, **options: object) -> AsyncIterator[Server]:
    server = Server(repositories, **options)  # type: ignore[arg-type]
    try:
        await server.start()
        yield server
    finally:
        await server.drain(0.1)


async def refused(call: Awaitable[object] | Callable[[], object]) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        await call if isinstance(call, Awaitable) else call()
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def touch(repository: Path, name: str = "echo") -> None:
    """Changes a file of a model, so that the next load is a real one."""
    count = len(os.listdir(repository / name / "1"))
    (repository / name / "1" / f"file{count}").touch()
