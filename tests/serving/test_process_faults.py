"""What a model does to its own process stays there: forks, texts that have no form, memory that is not to be had."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.backends.python_models import ECHO, answer, floats, metrics, running, services, value
from tests.backends.python_models import request as ask
from tritium.backends import wire
from tritium.errors import LOST, TritiumError

FORK = """
import os

class TritonPythonModel:
    def execute(self, requests):
        if self.mode(requests) == 1 and os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        if self.mode(requests) == 2:
            os.fork()
        if self.mode(requests) == 3:
            time.sleep(30)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([os.getpid()], np.float32))])]

    def mode(self, requests):
        return int(pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0])
"""
TEXTS = r"""
class TritonPythonModel:
    def execute(self, requests):
        mode = int(pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0])
        pb_utils.Logger.log_info("no \udc80 text")
        if mode == 1:
            raise ValueError("no \udc80 text")
        if mode == 2:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no \udc80 text"))]
        parameters = {3: {"a": 1 << 64}, 4: {"a": "\udc80"}, 5: {"\udc80": 1}}.get(mode)
        return [pb_utils.InferenceResponse(requests[0].inputs()[:0], parameters=parameters)]
"""
LABELS = """
class TritonPythonModel:
    def execute(self, requests):
        family = pb_utils.MetricFamily(name="own", description="own", kind=pb_utils.MetricFamily.COUNTER)
        family.Metric(labels={"no label": "1"})
        return [pb_utils.InferenceResponse()]
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_death_is_seen_although_a_forked_process_lives_on(tmp_path: Path) -> None:
    async with running(tmp_path, FORK) as instance:
        await answer(instance, ask(floats(1)))
        await instance.free()
        run = instance.execute([ask(floats(3))])
        pid = instance.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TritiumError, match="not healthy") as died:
            async with asyncio.timeout(20):
                await run.some()
        assert died.value.reason == LOST


async def test_a_forked_process_does_not_answer_too(tmp_path: Path) -> None:
    async with running(tmp_path, FORK) as instance:
        for mode in (2, 0, 2, 0, 0):
            assert value(await answer(instance, ask(floats(mode)))) == [instance.pid]


@pytest.mark.parametrize(
    ("mode", "message"),
    [(1, "udc80 text"), (2, "udc80 text"), (3, "64 bits"), (4, "UTF-8"), (5, "UTF-8")],
)
async def test_what_has_no_form_is_an_error_of_the_request(tmp_path: Path, mode: int, message: str) -> None:
    async with running(tmp_path, TEXTS) as instance:
        pid = instance.pid
        error = (await answer(instance, ask(floats(mode)))).error
        assert error is not None
        assert message in error.message
        assert (await answer(instance, ask(floats(0)))).error is None
        assert instance.pid == pid


async def test_labels_that_would_break_the_page_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, LABELS, given=services(metrics=metrics())) as instance:
        error = (await answer(instance, ask(floats(0)))).error
        assert error is not None
        assert "metric label is 'no label'" in error.message


async def test_a_batch_that_cannot_be_sent_leaves_the_instance_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async with running(tmp_path, ECHO) as instance:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "pack_request", full)
            with pytest.raises(OSError, match="Too many"):
                instance.execute([ask(floats(1))])
        assert not instance.busy
        assert value(await answer(instance, ask(floats(1)))) == [1]
