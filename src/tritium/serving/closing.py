"""The ends of things: iterators that may, or may not, have to be closed; backends that unload or fail."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from tritium.backends.base import Backend
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.types import InferResponse

_log = logs.get(__name__)


@asynccontextmanager
async def closing(answers: AsyncIterator[InferResponse]) -> AsyncGenerator[AsyncIterator[InferResponse]]:
    """Closes an iterator at the end, if it can be closed."""
    try:
        yield answers
    finally:
        if isinstance(answers, AsyncGenerator):
            await answers.aclose()


async def unload_quietly(backend: Backend, name: str) -> None:
    """Unloads; what goes wrong is logged, since nobody is left to be told."""
    try:
        await backend.unload()
    except Exception as error:
        unexpected(name, "unload", error)


def unexpected(name: str, doing: str, error: Exception) -> TritiumError:
    """Logs an error that is none of ours, with its traceback; the client learns its kind only."""
    _log.exception("backend failed", model=name, doing=doing)
    return TritiumError(Code.INTERNAL, f"model '{name}' failed to {doing}: {type(error).__name__}")
