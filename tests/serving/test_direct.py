"""The short way through a model against the long one, and what waits right in front of an instance."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.serving.executors import Executor, Gate, ask, config_of, echo, request, stats
from tests.serving.support import refused, serving, until
from tests.serving.test_dynamic import MODEL
from tritium.backends.base import Timing
from tritium.errors import Code, TritiumError
from tritium.observability.metrics import Metrics
from tritium.serving.dynamic import DEPTH, DynamicBatcher
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse, Tensor

CODE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = request.inputs()[0]
        mood = float(tensor.as_numpy().reshape(-1)[0])
        if mood == -1:
            raise ValueError("a bad mood")
        if mood == -2:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no, thank you"))
        if mood == -3:
            return None
        if mood == -4:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return None
        if mood == -5:
            time.sleep(30)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())], parameters={"mood": mood})
"""


def write(repository: Path, more: str = "") -> None:
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "1" / "model.py").write_text(CODE)
    (repository / "m" / "config.pbtxt").write_text(MODEL.replace('"x"', '"python"') + more)


def asks(*values: float, **fields: Any) -> InferRequest:
    made = request(id="r", **fields)
    made.inputs = {"IN": Tensor.from_numpy("IN", np.array([values], "f4"))}
    return made


def shown(answer: InferResponse | TritiumError) -> Any:
    if isinstance(answer, TritiumError):
        return answer.code, answer.message
    tensors = [(t.name, t.shape, bytes(t.data)) for t in answer.outputs]
    return answer.model, answer.version, answer.id, tensors, answer.parameters, answer.final


def counts(one: ModelStats) -> Any:
    names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    return one.inference_count, one.execution_count, one.failures, one.waiting, [getattr(one, n).count for n in names]


async def by_callback(model: Any, one: InferRequest) -> InferResponse | TritiumError:
    found: asyncio.Future[InferResponse | TritiumError] = asyncio.get_running_loop().create_future()
    try:
        assert model.submit(one, found.set_result) is not None
    except TritiumError as error:
        return error
    return await found


async def by_task(model: Any, one: InferRequest) -> InferResponse | TritiumError:
    try:
        return await model.infer(one)
    except TritiumError as error:
        return error


async def test_both_ways_answer_and_count_alike(repository: Path) -> None:
    write(repository)
    async with serving(repository) as server:
        model = server.model("m")
        for ones in ((1, 2), (-1,), (-2,), (-3,), (-4,), (), (3,)):
            results = []
            for way in (by_task, by_callback):
                fresh = model.stats = ModelStats("m", "1")
                model._backend._batcher._stats = model._backend._batcher.lanes[0]._stats = fresh  # type: ignore[union-attr]
                one = asks(*ones) if ones else request(width=2, rows=9)
                results.append((shown(await way(model, one)), counts(fresh)))
            assert results[0] == results[1], ones
            assert model.running == 0


async def test_what_has_to_take_the_long_way(repository: Path) -> None:
    write(repository, "model_transaction_policy { decoupled: true }")
    async with serving(repository) as server:
        model = server.model("m")
        assert not model.direct and model.submit(asks(1), print) is None
    config = repository / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("true", "false"))
    async with serving(repository) as server:
        model = server.model("m")
        assert model.direct
        await server.drain(1)
        assert not model.direct and (await refused(lambda: server.model("m"))).code is Code.UNAVAILABLE


async def test_a_cancelled_request_is_counted_and_not_answered(repository: Path) -> None:
    write(repository)
    async with serving(repository) as server:
        model = server.model("m")
        told: list[Any] = []
        cancel = model.submit(asks(1), told.append)
        assert cancel is not None and model.running == 1
        cancel()
        cancel()
        assert model.running == 0
        assert shown(await by_callback(model, asks(2)))[3][0][2] == np.array([2], "f4").tobytes()
        assert not told and model.stats.failures == {"CANCELED": 1} and model.stats.waiting == 0


async def test_requests_in_front_of_an_instance_that_dies_are_answered_by_the_next(repository: Path) -> None:
    write(repository)
    async with serving(repository) as server:
        model = server.model("m")
        instance = model._backend._instances[0]  # type: ignore[union-attr]
        waiting = [asyncio.create_task(by_callback(model, asks(-5 if n == 0 else n))) for n in range(8)]
        await until(lambda: instance.busy)
        await asyncio.sleep(0.2)
        os.kill(instance.pid, signal.SIGKILL)
        first, *others = await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert shown(first)[0] is Code.UNAVAILABLE
        assert [np.frombuffer(shown(one)[3][0][2], "f4")[0] for one in others] == list(range(1, 8))
        assert model.stats.waiting == 0 and model.stats.success.count == 7 and model.stats.fail.count == 1


def batcher(executor: Executor, more: str = "") -> DynamicBatcher:
    return DynamicBatcher(config_of(MODEL + more), [executor], stats())


async def started(made: DynamicBatcher) -> DynamicBatcher:
    await made.start()
    await asyncio.sleep(0)
    return made


async def test_an_instance_gets_the_next_requests_while_it_runs_one() -> None:
    executor = Executor(gate := Gate())
    made = await started(batcher(executor))
    tasks = [asyncio.create_task(ask(made, request(id=str(n)))) for n in range(DEPTH + 2)]
    await until(lambda: len(executor.running) == DEPTH)
    assert made.pending == DEPTH + 1
    gate.open.set()
    await asyncio.gather(*tasks)
    assert [one.id for (one,) in executor.log] == [str(n) for n in range(DEPTH + 2)]
    await made.stop()


async def test_who_decides_something_by_waiting_does_not() -> None:
    two = [Executor(Gate(), "a"), Executor(Gate(), "b")]
    several = DynamicBatcher(config_of(MODEL), two, stats())
    batching = batcher(one := Executor(Gate()), "dynamic_batching { }")
    for made in (several, batching):
        await started(made)
        tasks = [asyncio.create_task(ask(made, request())) for _ in range(5)]
        await asyncio.sleep(0.01)
        await made.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [len(executor.running) for executor in (*two, one)] == [1, 1, 1]


async def test_order_is_kept_when_an_instance_dies() -> None:
    executor = Executor(gate := Gate())
    made = await started(batcher(executor))
    tasks = [asyncio.create_task(ask(made, request(id=str(n)))) for n in range(DEPTH + 2)]
    await until(lambda: len(executor.log) == 1)
    executor.kill()
    gate.open.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], TritiumError) and all(isinstance(one, list) for one in found[1:])
    assert [one.id for (one,) in executor.log] == [str(n) for n in range(DEPTH + 2)]
    assert made.pending == 0
    await made.stop()


async def test_what_nobody_wants_any_more_never_runs() -> None:
    executor = Executor(gate := Gate())
    counted = stats()
    made = await started(DynamicBatcher(config_of(MODEL), [executor], counted))
    tasks = [asyncio.create_task(ask(made, request(id=str(n)))) for n in range(4)]
    await until(lambda: made.pending == 3)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks[1:3], return_exceptions=True)
    assert made.pending == 1 and counted.waiting == 1
    gate.open.set()
    await asyncio.gather(tasks[0], tasks[3])
    await until(lambda: not executor.busy)
    assert [one.id for (one,) in executor.log] == ["0", "3"]
    assert counted.waiting == 0 and counted.execution_count == 2
    await made.stop()


async def test_unloading_ends_what_waits_in_front_of_an_instance() -> None:
    counted = stats()
    made = await started(DynamicBatcher(config_of(MODEL), [Executor(Gate())], counted))
    found: list[Any] = []
    for n in range(DEPTH + 2):
        made.submit(request(id=str(n)), Timing(), 1, found.append)
    await made.stop()
    assert len(found) == DEPTH + 2 and all("unloaded" in error.message for error in found)
    assert counted.waiting == 0
    assert (await refused(lambda: made.submit(request(), Timing(), 1, found.append))).code is Code.UNAVAILABLE


async def test_callbacks_and_iterators_get_the_same() -> None:
    made = await started(batcher(Executor(echo), "dynamic_batching { preserve_ordering: true }"))
    found: list[Any] = []
    cancel = made.submit(one := request(id="x"), Timing(), 1, found.append)
    (other,) = await ask(made, one)
    await until(lambda: bool(found))
    assert shown(found[0]) == shown(other)
    cancel()
    await made.stop()


def test_metrics_are_told_what_was_counted_since_the_last_time() -> None:
    metrics, one = Metrics(), stats()
    one.succeeded(3, 5000, Timing(queue_ns=1000))  # before it was attached: not of this load
    one.attach(metrics.add_model("m", "1"))

    def lines() -> dict[str, float]:
        text = metrics.render().decode().splitlines()
        pairs = [line.rpartition(" ") for line in text if 'model="m"' in line]
        return {name.partition("{")[0]: float(value) for name, _, value in pairs if "OTHER" not in name}

    assert lines()["nv_inference_request_success"] == 0
    for _ in range(2):
        one.pending(2)
        one.executed(3, input_ns=1000, infer_ns=2000, output_ns=3000)
        one.pending(-1)
        one.succeeded(3, 7_000, Timing(queue_ns=1000, input_ns=1000, infer_ns=2000, output_ns=3000))
    one.failed(Code.CANCELLED, 1000, Timing(executions=0.5))
    found = lines()
    assert found == lines()
    assert found["nv_inference_request_success"] == 2 and found["nv_inference_count"] == 6
    assert found["nv_inference_exec_count"] == 2.5 and found["nv_inference_pending_request_count"] == 2
    assert found["nv_inference_request_duration_us"] == 14 and found["nv_inference_queue_duration_us"] == 2
    assert (
        found["nv_inference_compute_input_duration_us"] == 2 and found["nv_inference_compute_output_duration_us"] == 6
    )
