from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.serving.executors import Executor, Gate, Running, ask, collect, config_of, echo, request, stats
from tests.serving.support import refused, until
from tritium.backends.base import Timing
from tritium.backends.config import Resource
from tritium.errors import Code, TritiumError
from tritium.serving.dynamic import DynamicBatcher
from tritium.serving.limiter import RateLimiter
from tritium.types import InferRequest, InferResponse

MODEL = """
backend: "x" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


async def batcher(*executors: Executor, batching: str = "", joined: bool = False, more: str = "") -> DynamicBatcher:
    text = MODEL + more + (f"dynamic_batching {{ {batching} }}" if batching else "")
    made = DynamicBatcher(config_of(text), executors, stats(), joined=joined)
    await made.start()
    await asyncio.sleep(0)
    return made


async def busy(made: DynamicBatcher, executor: Executor) -> asyncio.Task[list[InferResponse]]:
    """A request that keeps the only instance busy."""
    before = len(executor.log)
    task = asyncio.create_task(ask(made, request(id="first")))
    await until(lambda: len(executor.log) > before)
    return task


def ids(executor: Executor) -> list[list[str]]:
    return [[one.id for one in batch] for batch in executor.log]


async def test_without_dynamic_batching_each_request_is_a_batch():
    executor = Executor(echo)
    made = await batcher(executor)
    found = await asyncio.gather(*(ask(made, request(id=str(i))) for i in range(3)))
    assert [len(x) for x in found] == [1, 1, 1]
    assert ids(executor) == [["0"], ["1"], ["2"]]
    await made.stop()


async def test_requests_that_wait_make_one_batch_when_the_instance_is_free():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="preserve_ordering: false")
    tasks = [await busy(made, executor), *(asyncio.create_task(ask(made, request(id=str(i)))) for i in range(3))]
    await until(lambda: made.pending == 3)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert ids(executor) == [["first"], ["0", "1", "2"]]
    await made.stop()


async def test_joined_backends_get_one_request_and_each_has_its_own_rows_back():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="preserve_ordering: false", joined=True)
    requests = [request(rows, 3) for rows in (1, 2, 3)]
    tasks = [
        await busy(made, executor),
        *(asyncio.create_task(ask(made, r, r.inputs["IN"].shape[0])) for r in requests),
    ]
    await until(lambda: made.pending == 3)
    gate.open.set()
    found = await asyncio.gather(*tasks)
    assert executor.log[1][0].inputs["IN"].shape == (6, 3)
    for one, answers in zip(requests, found[1:], strict=True):
        assert bytes(answers[0].outputs[0].data) == bytes(one.inputs["IN"].data)
    await made.stop()


async def test_the_delay_collects_and_then_lets_go():
    executor = Executor(echo)
    made = await batcher(executor, batching="preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 50000")
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(ask(made, request(id=str(i))) for i in range(3)))
    assert 0.04 < asyncio.get_running_loop().time() - began < 1
    assert [len(batch) for batch in executor.log] == [3]
    await asyncio.gather(*(ask(made, request(id=str(i))) for i in range(4)))
    assert [len(batch) for batch in executor.log] == [3, 4]
    await made.stop()


async def test_priorities():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="priority_levels: 3 default_priority_level: 2 preferred_batch_size: [ 1 ]")
    first = await busy(made, executor)
    tasks = [asyncio.create_task(ask(made, request(id=str(p), priority=p))) for p in (3, 0, 1, 9)]
    await until(lambda: made.pending == 4)
    for _ in range(5):
        gate.step()
    await asyncio.gather(first, *tasks)
    assert [one for batch in ids(executor) for one in batch] == ["first", "1", "0", "9", "3"]
    await made.stop()


async def test_a_wait_that_is_over_ends_with_an_error_while_the_instance_is_busy():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="default_queue_policy { default_timeout_microseconds: 20000 }")
    first = await busy(made, executor)
    error = await refused(ask(made, request()))
    assert (error.code, error.message) == (Code.UNAVAILABLE, "Request timeout expired")
    assert made.pending == 0
    gate.open.set()
    assert len(await first) == 1
    await made.stop()


async def test_the_queue_has_a_size():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="default_queue_policy { max_queue_size: 1 }")
    first = await busy(made, executor)
    second = asyncio.create_task(ask(made, request()))
    await until(lambda: made.pending == 1)
    assert (await refused(ask(made, request()))).code is Code.UNAVAILABLE
    gate.open.set()
    await asyncio.gather(first, second)
    await made.stop()


async def test_a_request_that_is_cancelled_while_it_waits_never_runs():
    executor = Executor(gate := Gate())
    made = await batcher(executor)
    first = await busy(made, executor)
    second = asyncio.create_task(ask(made, request(id="second")))
    await until(lambda: made.pending == 1)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert made.pending == 0
    gate.open.set()
    await first
    assert ids(executor) == [["first"]]
    await made.stop()


async def test_cancelling_a_request_that_runs_reaches_the_model_and_spares_its_neighbours():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 1000000")
    tasks = [asyncio.create_task(ask(made, request(id=str(i)))) for i in range(2)]
    await until(lambda: len(executor.log) == 1)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert executor.running[0].cancelled == {0}
    gate.open.set()
    assert len(await tasks[1]) == 1
    await made.stop()


async def test_an_exception_of_the_model_is_an_error_and_an_error_answer_an_answer():
    async def model(requests: Sequence[InferRequest], running: Running) -> None:
        for index, one in enumerate(requests):
            error = TritiumError(Code.INTERNAL, "no")
            running.reply(index, InferResponse("", "", "", error=error), failed=one.id == "raise")

    made = await batcher(Executor(model))
    assert (await refused(ask(made, request(id="raise")))).message == "no"
    (answer,) = await ask(made, request(id="answer"))
    assert answer.error is not None
    await made.stop()


async def test_only_what_is_inside_dies_with_its_instance():
    executor = Executor(gate := Gate())
    made = await batcher(executor)
    first = await busy(made, executor)
    second = asyncio.create_task(ask(made, request()))
    await until(lambda: made.pending == 1)
    executor.kill()
    assert (await refused(first)).code is Code.UNAVAILABLE
    gate.open.set()
    assert len(await second) == 1
    await made.stop()


async def test_retry_on_crash_runs_a_request_once_more():
    executor = Executor(gate := Gate())
    made = await batcher(executor, more='parameters { key: "retry_on_crash" value { string_value: "true" } }')
    first = await busy(made, executor)
    executor.kill()
    await until(lambda: len(executor.log) == 2)
    executor.kill()
    assert (await refused(first)).code is Code.UNAVAILABLE
    again = await busy(made, executor)
    executor.kill()
    gate.open.set()
    assert len(await again) == 1
    await made.stop()


async def test_an_instance_that_is_not_there_keeps_requests_waiting():
    executor = Executor(echo)
    made = await batcher(executor)
    executor.up = False
    task = asyncio.create_task(ask(made, request()))
    await asyncio.sleep(0.01)
    assert made.pending == 1
    executor.up = True
    assert executor.on_free is not None
    executor.on_free()
    assert len(await task) == 1
    await made.stop()


async def test_stop_ends_everything_and_takes_no_more():
    executor = Executor(Gate())
    made = await batcher(executor)
    tasks = [await busy(made, executor), asyncio.create_task(ask(made, request()))]
    await until(lambda: made.pending == 1)
    await made.stop()
    for task in tasks:
        assert (await refused(task)).code is Code.UNAVAILABLE
    assert (await refused(ask(made, request()))).code is Code.UNAVAILABLE


async def test_a_decoupled_model_answers_on_while_the_next_batch_runs():
    going = asyncio.Event()
    running_now: list[Running] = []

    async def model(requests: Sequence[InferRequest], running: Running) -> None:
        running_now.append(running)
        running.reply(0, InferResponse("", "", "", final=False))
        going.set()

    executor = Executor(model)
    made = await batcher(executor, more="model_transaction_policy { decoupled: true }")
    first = made.stream(request(), Timing())
    assert not (await anext(first)).final
    second = made.stream(request(), Timing())
    assert not (await anext(second)).final
    for running in running_now:
        running.reply(0, InferResponse("", "", "", empty=True))
    assert [len(await collect(x)) for x in (first, second)] == [1, 1]
    await made.stop()


async def test_executions_and_waits_are_counted():
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="preserve_ordering: false")
    timing = Timing()
    tasks = [await busy(made, executor), asyncio.create_task(collect(made.stream(request(2), timing, 2)))]
    await until(lambda: made.pending == 1)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert timing.queue_ns > 0
    assert (timing.input_ns, timing.infer_ns, timing.output_ns) == (10, 20, 30)
    counted = made._stats
    assert counted.execution_count == 2
    assert {rows: one.compute_infer.count for rows, one in counted.batches.items()} == {1: 1, 2: 1}
    await made.stop()


async def test_the_rate_limiter_lets_one_instance_run_at_a_time():
    gate = Gate()
    executors = [Executor(gate, f"m_{i}") for i in range(2)]
    made = DynamicBatcher(config_of(MODEL + RESOURCES), executors, stats())
    limiter = RateLimiter(enabled=True, resources={("slot", -1): 1})
    for lane, group in zip(made.lanes, config_of(MODEL + RESOURCES).instances * 2, strict=True):
        lane.allowance = limiter.register(lane.executor.name, group.resources, group.priority, made.kick)
    await made.start()
    tasks = [asyncio.create_task(ask(made, request())) for _ in range(4)]
    for done in range(4):
        await until(lambda done=done: sum(len(e.log) for e in executors) == done + 1)
        await asyncio.sleep(0.002)
        assert sum(e.busy for e in executors) == 1
        gate.step()
    await asyncio.gather(*tasks)
    # Turns are shared evenly.
    assert [len(e.log) for e in executors] == [2, 2]
    await made.stop()


RESOURCES = (
    'instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "slot" count: 1 } priority: 1 } }'
)


async def test_needs_may_change_while_an_execution_holds_the_old_ones():
    limiter = RateLimiter(True, {("R", -1): 2})
    executor, other = Executor(gate := Gate()), Executor(echo, "m_1")
    first, second = await batcher(executor), await batcher(other)
    for one, need in ((first, 2), (second, 1)):
        one.lanes[0].exchange(limiter.register("m", [Resource("R", need)], 1, one.kick))
    running = asyncio.create_task(ask(first, request(id="a")))
    await until(lambda: bool(executor.log))
    # Half of it from now on; what runs holds all of it until it ends.
    first.lanes[0].exchange(limiter.register("m", [Resource("R", 1)], 1, first.kick))
    waiting = asyncio.create_task(ask(second, request(id="b")))
    await asyncio.sleep(0.02)
    assert not other.log
    gate.open.set()
    await asyncio.gather(running, waiting)
    gate.open.clear()
    running = asyncio.create_task(ask(first, request(id="c")))
    await until(lambda: len(executor.log) == 2)
    await ask(second, request(id="d"))  # beside it
    gate.open.set()
    await running
    assert limiter._held["R", 0] == 0 and len(limiter._members) == 2
    await asyncio.gather(first.stop(), second.stop())
    assert not limiter._members


async def test_other_rules_for_requests_that_wait():
    """Levels, sizes and promises of order change; nobody is lost, and the old promise still holds for its requests."""
    executor = Executor(gate := Gate())
    made = await batcher(executor, batching="preserve_ordering: true preferred_batch_size: 8")
    tasks = [await busy(made, executor)]
    tasks += [asyncio.create_task(ask(made, request(id=str(i), priority=2 - i % 2))) for i in range(4)]
    await until(lambda: made.pending == 4)
    levels = "priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 1 }"
    made.reconfigure(config_of(MODEL + f"dynamic_batching {{ {levels} preferred_batch_size: 1 }}"))
    assert made.pending == 4
    assert "Exceeds maximum queue size" in (await refused(ask(made, request(priority=2)))).message
    gate.open.set()
    assert all(len(answers) == 1 for answers in await asyncio.gather(*tasks))
    assert ids(executor)[1:] == [["1"], ["3"], ["0"], ["2"]]  # the higher level first
    made.reconfigure(config_of(MODEL))
    await ask(made, request(id="last"))
    assert ids(executor)[-1] == ["last"]
    await made.stop()


@pytest.mark.parametrize("seed", range(6))
async def test_every_request_ends_exactly_once_in_promised_order_within_sizes(seed: int):
    """Random load on instances that answer at random times and die now and then."""
    choose = random.Random(seed)
    executors = [Executor(echo, f"m_{i}") for i in range(3)]

    async def model(requests: Sequence[InferRequest], running: Running) -> None:
        await asyncio.sleep(choose.random() * 0.004)
        await echo(requests, running)

    for executor in executors:
        executor._model = model
    batching = "preserve_ordering: true preferred_batch_size: [ 3, 6 ] max_queue_delay_microseconds: 1500"
    made = await batcher(*executors, batching=batching)
    ended: list[int] = []

    async def one(number: int, rows: int, width: int) -> None:
        try:
            answers = await ask(made, request(rows, width, id=str(number)), rows)
            assert len(answers) == 1
            assert answers[0].outputs[0].shape == (rows, width)
        except TritiumError as error:
            assert error.code is Code.UNAVAILABLE
        ended.append(number)

    tasks: list[asyncio.Task[None]] = []
    cancelled: set[int] = set()
    for number in range(60):
        tasks.append(asyncio.create_task(one(number, choose.randint(1, 4), choose.randint(1, 2))))
        if choose.random() < 0.3:
            await asyncio.sleep(choose.random() * 0.002)
        if choose.random() < 0.05:
            choose.choice(executors).kill()
        if choose.random() < 0.1:
            victim = choose.randrange(len(tasks))
            if not tasks[victim].done():
                tasks[victim].cancel()
                cancelled.add(victim)
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert ended == sorted(ended)
    assert len(ended) == len(set(ended)) >= 60 - len(cancelled)
    for executor in executors:
        for batch in executor.log:
            assert sum(r.inputs["IN"].shape[0] for r in batch) <= 8
            assert len({r.inputs["IN"].shape[1] for r in batch}) == 1
    await made.stop()
