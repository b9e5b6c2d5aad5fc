"""Iterators that may, or may not, have to be closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from tritium.types import InferResponse


@asynccontextmanager
async def closing(answers: AsyncIterator[InferResponse]) -> AsyncGenerator[AsyncIterator[InferResponse]]:
    """Closes an iterator at the end, if it can be closed."""
    try:
        yield answers
    finally:
        if isinstance(answers, AsyncGenerator):
            await answers.aclose()
