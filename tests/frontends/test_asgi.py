from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tritium.errors import Code, TritiumError
from tritium.frontends.asgi import BodyError, BoundedBody, ClientLeft, ClientWatch, error_headers, read_body


def receiver(*events: dict[str, Any]) -> Any:
    left = list(events)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(1000)
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_bodies() -> None:
    assert await read_body(receiver(part(b"ab", False))) == b"ab"
    assert await read_body(receiver(part(b"a"), part(b"b"), part(b"", False))) == b"ab"
    with pytest.raises(ClientLeft):
        await read_body(receiver(part(b"a"), GONE))


async def test_limits_hold_for_the_body_only() -> None:
    bounded = BoundedBody(receiver(part(b"abc"), part(b"def")), 5, 0.05)
    with pytest.raises(BodyError, match="exceeds 5 bytes") as caught:
        await read_body(bounded)
    assert (caught.value.status.v2, caught.value.status.v1) == (413, 413)
    bounded = BoundedBody(receiver(part(b"abc")), 5, 0.05)
    with pytest.raises(BodyError, match="nothing of the request body came for") as caught:
        await read_body(bounded)
    assert error_headers(caught.value) == [(b"connection", b"close")]
    bounded = BoundedBody(receiver(part(b"abc", False)), 5, 0.05)
    assert await read_body(bounded) == b"abc"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bounded(), 0.2)  # waiting for the end of the connection has no limit of ours


async def test_a_client_that_leaves_ends_the_block_only() -> None:
    with ClientWatch(receiver(GONE)) as watch:
        await asyncio.sleep(1000)
    assert watch.gone
    await asyncio.sleep(0)


async def test_work_that_ends_by_itself() -> None:
    with ClientWatch(receiver()) as watch:
        await asyncio.sleep(0.05)
    assert not watch.gone
    with pytest.raises(ValueError, match="own"), ClientWatch(receiver(part(b""))):
        raise ValueError("own")


async def test_somebody_elses_cancellation_goes_on() -> None:
    async def work() -> None:
        with ClientWatch(receiver()):
            await asyncio.sleep(1000)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, b"1"), (2e-6, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (30.0, b"30")]
)
def test_when_to_come_again_is_whole_seconds_and_never_at_once(seconds: float, header: bytes) -> None:
    error = TritiumError(Code.UNAVAILABLE, "busy", retry_after_s=seconds)
    assert error_headers(error) == [(b"retry-after", header)]


def test_an_error_that_does_not_say_when_to_come_again() -> None:
    assert error_headers(TritiumError(Code.UNAVAILABLE, "busy")) == []
