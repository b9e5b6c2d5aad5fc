"""Requests that are put back when their instance dies, under rules that are not those they came under."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.executors import Executor, Gate, Running, ask, collect, config_of, request, stats
from tests.serving.support import refused, until
from tests.serving.test_dynamic import MODEL, busy
from tritium.backends.base import Timing
from tritium.serving.dynamic import DynamicBatcher
from tritium.types import InferRequest

LEVELS = "priority_levels: 3 default_priority_level: 2"


@pytest.mark.parametrize(("before", "after"), [("", f"dynamic_batching {{ {LEVELS} }}"), (LEVELS, "")])
async def test_the_levels_may_have_changed(before: str, after: str) -> None:
    rerun = 'parameters { key: "retry_on_crash" value { string_value: "true" } }'
    old = MODEL + rerun + (f"dynamic_batching {{ {before} }}" if before else "")
    executor = Executor(gate := Gate())
    made = DynamicBatcher(config_of(old), [executor], stats())
    await made.start()
    await asyncio.sleep(0)
    tasks = [await busy(made, executor), *(asyncio.create_task(ask(made, request(id=str(i)))) for i in range(3))]
    await until(lambda: made.pending == 3)
    made.reconfigure(config_of(MODEL + rerun + after))
    executor.kill()
    gate.open.set()
    async with asyncio.timeout(5):
        assert [len(found) for found in await asyncio.gather(*tasks)] == [1, 1, 1, 1]
    await made.stop()


async def test_shapes_are_told_apart_although_they_were_not_before() -> None:
    executor = Executor(gate := Gate())
    made = DynamicBatcher(config_of(MODEL), [executor], stats())
    await made.start()
    await asyncio.sleep(0)
    first = await busy(made, executor)
    tasks = [asyncio.create_task(ask(made, request(1, width))) for width in (2, 3)]
    await until(lambda: made.pending == 2)
    made.reconfigure(config_of(MODEL + "dynamic_batching { max_queue_delay_microseconds: 1000 }"))
    executor.kill()
    gate.open.set()
    await asyncio.gather(*tasks)
    assert len(executor.log[-1]) == len(executor.log[-2]) == 1
    await refused(first)
    await made.stop()


@pytest.mark.parametrize("ran_s", [0.0, 0.1])
async def test_the_wait_of_a_request_that_runs_again_ends_too(ran_s: float) -> None:
    policy = "default_queue_policy { default_timeout_microseconds: 50000 }"
    text = MODEL + f"dynamic_batching {{ {policy} }}"
    text += 'parameters { key: "retry_on_crash" value { string_value: "true" } }'

    async def never(_: object, running: Running) -> None:
        await asyncio.Event().wait()

    executor = Executor(never)
    made = DynamicBatcher(config_of(text), [executor], stats())
    await made.start()
    await asyncio.sleep(0)
    one: InferRequest = request()
    task = asyncio.create_task(collect(made.stream(one, Timing())))
    await until(lambda: len(executor.log) == 1)
    await asyncio.sleep(ran_s)
    # Something comes, so that what is due meanwhile is looked at.
    other = asyncio.create_task(ask(made, request()))
    await asyncio.sleep(ran_s)
    executor.up = False
    executor.kill()
    async with asyncio.timeout(5):
        assert "Request timeout expired" in (await refused(task)).message
        await refused(other)
    await made.stop()
