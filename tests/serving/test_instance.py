"""Instances: batches, decoupled answers, cancellation, deaths and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.backends.python_models import (
    DECOUPLED,
    ECHO,
    FLOATS,
    NOTHING,
    answer,
    answers,
    floats,
    replies,
    running,
    value,
    write,
)
from tests.backends.python_models import request as ask
from tritium.errors import Code, TritiumError
from tritium.serving.instance import Instance
from tritium.types import Tensor

SLOW = """
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(float(pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0]))
        return [pb_utils.InferenceResponse(r.inputs()[:0]) for r in requests]
"""
COUNT_DOWN = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            threading.Thread(target=self.pour, args=(request.get_response_sender(), count), daemon=True).start()

    def pour(self, sender, count):
        for left in range(count, 0, -1):
            time.sleep(0.01)
            if sender.is_cancelled():
                error = pb_utils.TritonError(f"stopped at {left}", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([left], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_a_batch_is_one_execution(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO) as instance:
        found = await answers(instance, ask(floats(1, 2)), ask(floats(3)), ask(floats()))
        assert [value(one) for one in found] == [[1, 2], [3], []]
        execution = instance.execute([ask(floats(4))])
        assert instance.busy and not execution.returned
        with pytest.raises(TritiumError, match="busy"):
            instance.execute([ask(floats(5))])
        (reply,) = await execution.some()
        assert await execution.some() == []
        assert reply.index == 0 and execution.times is not None and execution.times.infer_ns > 0
        assert not instance.busy


async def test_large_tensors_use_no_names_and_are_given_back(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO) as instance:
        before = set(os.listdir("/dev/shm"))
        for size in (1 << 13, 1 << 20, 100, 3 << 20):
            array = np.arange(size, dtype=np.float32)
            (found,) = await answers(instance, ask(Tensor.from_numpy("IN", array)))
            assert np.array_equal(found.outputs[0].numpy(), array)
        assert set(os.listdir("/dev/shm")) <= before
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            await answers(instance, *(ask(Tensor.from_numpy("IN", array)) for _ in range(3)))
            # Two for each segment: ours, to lend it, and that of its mapping.
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 16


async def test_more_new_segments_than_one_message_carries(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO) as instance:
        arrays = [np.full(1 << 14, i, dtype=np.float32) for i in range(150)]
        found = await answers(instance, *(ask(Tensor.from_numpy("IN", a)) for a in arrays))
        assert [one.outputs[0].numpy()[-1] for one in found] == list(range(150))


async def test_kept_answers_stay_what_they_were(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO) as instance:
        kept = []
        for i in range(8):
            (found,) = await answers(instance, ask(Tensor.from_numpy("IN", np.full(1 << 14, i, dtype=np.float32))))
            kept.append(found.outputs[0].numpy())
        assert [int(k.min()) for k in kept] == [int(k.max()) for k in kept] == list(range(8))


async def test_a_decoupled_instance_is_free_while_it_answers(tmp_path: Path) -> None:
    async with running(tmp_path, COUNT_DOWN, DECOUPLED) as instance:
        first = instance.execute([ask(floats(20))])
        await instance.free()
        assert first.returned and not first.over
        second = [reply async for reply in instance.execute([ask(floats(2)), ask(floats(0))])]
        assert [r.response.empty for r in second if r.index == 1 and r.response] == [True]
        shown = [r.response.final for r in second if r.index == 0 and r.response]
        assert shown == [False, False, True]
        assert len([reply async for reply in first]) == 21


async def test_cancellation_reaches_the_model(tmp_path: Path) -> None:
    async with running(tmp_path, COUNT_DOWN, DECOUPLED) as instance:
        execution = instance.execute([ask(floats(3)), ask(floats(100000))])
        await execution.some()
        execution.cancel(1)
        seen = [reply async for reply in execution]
        last = [r.response for r in seen if r.index == 1][-1]
        assert last is not None and last.error is not None and last.error.code is Code.CANCELLED
        assert last.final and "stopped at" in last.error.message
        left = instance.execute([ask(floats(100000))])
        await left.some()
        await left.aclose()
        assert left.over and await left.some() == []
        assert value((await answers(instance, ask(floats(1))))[0]) == [1]


async def test_a_dead_process_hits_only_what_is_inside(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as instance:
        await answer(instance, ask(floats(0)))
        life, pid = instance.life, instance.pid
        execution = instance.execute([ask(floats(30)), ask(floats(0))])
        await asyncio.sleep(0.05)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TritiumError, match="demo_0") as caught:
            await execution.some()
        assert caught.value.code is Code.UNAVAILABLE
        assert not instance.ready and "started again" in instance.reason
        with pytest.raises(TritiumError) as caught:
            instance.execute([ask(floats(0))])
        assert caught.value.code is Code.UNAVAILABLE
        async with asyncio.timeout(20):
            await instance.free()
        assert instance.life == life + 1 and instance.pid != pid
        await answer(instance, ask(floats(0)))


async def test_a_model_that_dies_again_and_again_is_started_with_pauses(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests):\n        import os; os._exit(3)\n"
    async with running(tmp_path, code) as instance:
        begin = time.monotonic()
        for _ in range(3):
            with pytest.raises(TritiumError):
                await answer(instance, ask(floats(1)))
        await instance.free()
        assert 0.25 + 0.5 <= time.monotonic() - begin < 20


async def test_a_failed_restart_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    code = f"""
class TritonPythonModel:
    def initialize(self, args):
        import os
        if os.path.exists({str(marker)!r}):
            os.remove({str(marker)!r})
            raise RuntimeError("not yet")

    def execute(self, requests):
        import os; os._exit(3)
"""
    async with running(tmp_path, code) as instance:
        marker.touch()
        with pytest.raises(TritiumError):
            await answer(instance, ask(floats(1)))
        async with asyncio.timeout(20):
            await instance.free()
        assert not marker.exists()


async def test_stop_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    instance = Instance(write(tmp_path, SLOW), "demo_0", NOTHING)
    await instance.start()
    execution = instance.execute([ask(floats(0.3))])
    waiting = asyncio.create_task(instance.free())
    await asyncio.sleep(0)
    reader = asyncio.create_task(execution.some())
    await instance.stop()
    assert len(await reader) == 1, "a batch that runs is finished first"
    with pytest.raises(TritiumError, match="stopped"):
        await waiting
    assert not instance.ready and instance.pid is None
    await instance.stop()


async def test_free_is_announced(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO) as instance:
        told: list[bool] = []
        instance.on_free = lambda: told.append(instance.busy)
        await answer(instance, ask(floats(1)))
        assert told == [False]


async def test_the_loading_may_be_given_up(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    instance = Instance(write(tmp_path, code), "demo_0", NOTHING)
    task = asyncio.create_task(instance.start())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert instance.pid is None and not instance.ready


async def test_replies_of_two_kinds_of_failure(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        if len(requests) > 1:
            raise ValueError("too many")
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))]
"""
    async with running(tmp_path, code, FLOATS) as instance:
        (reply,) = await replies(instance, ask(floats(1)))
        assert reply.response and reply.response.error and not reply.failed
        assert reply.response.error.code is Code.NOT_FOUND
        raised = await replies(instance, ask(floats(1)), ask(floats(1)))
        assert [r.failed for r in raised] == [True, True]
