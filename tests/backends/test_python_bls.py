"""Python models that ask the server: other models, loads, metrics, log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.python_models import FLOATS, answer, answers, floats, metrics, running, services, value
from tests.backends.python_models import request as ask
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.observability.logs import LogState
from tritium.serving.services import Client
from tritium.types import InferRequest, InferResponse, Tensor


class FakeServer:
    """Models ``double`` (one answer), ``many`` (decoupled), ``endless``, ``late`` and ``sick``."""

    def __init__(self) -> None:
        self.seen: list[InferRequest] = []
        self.closed = 0
        self.together = 0
        self.most = 0

    async def __call__(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.seen.append(request)
        if request.model not in ("double", "many", "endless", "late"):
            raise TritiumError(Code.NOT_FOUND, f"Request for unknown model: '{request.model}' is not found")
        array = request.inputs["IN"].numpy()
        if request.model == "double":
            self.together += 1
            self.most = max(self.most, self.together)
            await asyncio.sleep(0.02)
            self.together -= 1
            yield self._answer(array * 2, True)
            return
        if request.model == "late":
            yield self._answer(array, False)
            raise TritiumError(Code.UNAVAILABLE, "gone")
        try:
            count = 1 << 30 if request.model == "endless" else int(array[0])
            for i in range(count):
                yield self._answer(np.array([i], np.float32), False)
                await asyncio.sleep(0.001)
            yield InferResponse("", "", "", final=True, empty=True)
        finally:
            self.closed += 1

    @staticmethod
    def _answer(array: Any, final: bool) -> InferResponse:
        return InferResponse("", "", "", [Tensor.from_numpy("OUT", array)], {"p": 1}, None, final)


MODEL = """
import asyncio

class TritonPythonModel:
    def make(self, model, request, **more):
        return pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["OUT"], inputs=[request.inputs()[0]], **more)

    def out(self, *values):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))])

    def take(self, response):
        if response.has_error():
            raise pb_utils.TritonModelException(f"{response.error().code().name}: {response.error().message()}")
        return pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
"""


async def test_a_call_waits_for_its_answer(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    def execute(self, requests):
        found = []
        for r in requests:
            inner = self.make("double", r, request_id="inner", correlation_id=9, flags=1, timeout=77, model_version=3,
                              parameters={"a": 1},
                              preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0))
            response = inner.exec()
            assert json.loads(response.parameters()) == {"p": 1}
            found.append(self.out(*self.take(response)))
        return found
"""
    )
    server = FakeServer()
    async with running(tmp_path, code, FLOATS, services(call=server)) as instance:
        found = await answers(instance, ask(floats(1, 2)), ask(floats(3)))
        assert [value(one) for one in found] == [[2, 4], [6]]
        inner = server.seen[0]
        assert (inner.model, inner.version, inner.id, inner.timeout_us) == ("double", "3", "inner", 77)
        assert inner.sequence is not None and (inner.sequence.id, inner.sequence.start) == (9, True)
        assert inner.parameters == {"a": 1} and [o.name for o in inner.outputs] == ["OUT"]
        large = np.arange(1 << 19, dtype=np.float32)
        (big,) = await answers(instance, ask(Tensor.from_numpy("IN", large)))
        assert np.array_equal(big.outputs[0].numpy(), large * 2)


async def test_errors_of_a_call(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    def execute(self, requests):
        said = []
        for model in ("nobody", "many", "late"):
            try:
                said.append(str(self.take(self.make(model, requests[0]).exec())))
            except pb_utils.TritonModelException as error:
                said.append(str(error))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(said, dtype=np.object_))])]
"""
    )
    server = FakeServer()
    async with running(tmp_path, code, FLOATS, services(call=server)) as instance:
        said = value(await answer(instance, ask(floats(5))))
        assert said[0] == b"NOT_FOUND: Request for unknown model: 'nobody' is not found"
        assert said[1].startswith(b"INVALID_ARG: Model many is using the decoupled.")
        assert said[2].startswith(b"INVALID_ARG: Model late is using the decoupled.")


async def test_calls_at_the_same_time(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    async def execute(self, requests):
        calls = [self.make("double", r).async_exec() for r in requests]
        return [self.out(*self.take(response)) for response in await asyncio.gather(*calls)]
"""
    )
    server = FakeServer()
    async with running(tmp_path, code, FLOATS, services(call=server)) as instance:
        found = await answers(instance, *(ask(floats(i)) for i in range(8)))
        assert [value(one) for one in found] == [[2 * i] for i in range(8)]
        assert server.most == 8


async def test_a_loop_of_the_models_own_and_threads(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    def execute(self, requests):
        from concurrent.futures import ThreadPoolExecutor

        async def both():
            return await asyncio.gather(*(self.make("double", requests[0]).async_exec() for _ in range(2)))

        first, second = (self.take(r)[0] for r in asyncio.run(both()))
        with ThreadPoolExecutor(4) as pool:
            rest = list(pool.map(lambda _: self.take(self.make("double", requests[0]).exec())[0], range(8)))
        return [self.out(first, second, *rest)]
"""
    )
    async with running(tmp_path, code, FLOATS, services(call=FakeServer())) as instance:
        async with asyncio.timeout(20):
            assert value(await answer(instance, ask(floats(4)))) == [8] * 10


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_answers_of_decoupled_models(tmp_path: Path, how: str) -> None:
    sync = """
    def execute(self, requests):
        parts = list(self.make("many", requests[0]).exec(decoupled=True))
        last = parts.pop()
        assert not last.has_error() and last.output_tensors() == []
        return [self.out(*(self.take(p)[0] for p in parts))]
"""
    other = """
    async def execute(self, requests):
        first, second = await asyncio.gather(
            *(self.make("many", requests[0]).async_exec(decoupled=True) for _ in range(2)))
        found = [p async for p in first][:-1] + [p for p in second][:-1]
        return [self.out(*(self.take(p)[0] for p in found))]
"""
    async with running(tmp_path, MODEL + (sync if how == "sync" else other), FLOATS, services(call=FakeServer())) as i:
        async with asyncio.timeout(20):
            assert value(await answer(i, ask(floats(3)))) == [0, 1, 2] * (1 if how == "sync" else 2)


async def test_answers_that_nobody_wants_any_more(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] > 0:
            iterator = self.make("endless", requests[0]).exec(decoupled=True)
            next(iterator)
            iterator.cancel()
            return [self.out(len(list(iterator)) >= 0)]
        next(self.make("endless", requests[0]).exec(decoupled=True))
        return [self.out(1)]
"""
    )
    server = FakeServer()
    async with running(tmp_path, code, FLOATS, services(call=server)) as instance:
        for number, wanted in ((1, 1), (0, 2)):
            await answer(instance, ask(floats(number)))
            async with asyncio.timeout(10):
                while server.closed < wanted:
                    await asyncio.sleep(0.01)


async def test_calls_end_with_the_process(tmp_path: Path) -> None:
    code = (
        MODEL
        + """
    def execute(self, requests):
        iterator = self.make("endless", requests[0]).exec(decoupled=True)
        next(iterator)
        import os; os._exit(1)
"""
    )
    server = FakeServer()
    async with running(tmp_path, code, FLOATS, services(call=server)) as instance:
        with pytest.raises(TritiumError):
            await answer(instance, ask(floats(1)))
        async with asyncio.timeout(10):
            while not server.closed:
                await asyncio.sleep(0.01)


async def test_loading_models(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.load_model("a")
        pb_utils.load_model("b", config='{"x": 1}', files={"file:1/model.py": b"code"})
        try:
            pb_utils.load_model("broken")
        except pb_utils.TritonModelException as error:
            assert "cannot be loaded" in str(error)
        else:
            raise AssertionError
        pb_utils.unload_model("a", unload_dependents=True)
        ready = [pb_utils.is_model_ready("a"), pb_utils.is_model_ready(model_name="b", model_version="2")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(ready, np.float32))])]
"""
    done: list[Any] = []

    async def load(name: str, config: str | None, files: Any) -> None:
        if name == "broken":
            raise TritiumError(Code.INVALID_ARGUMENT, "broken cannot be loaded")
        done.append((name, config, files))

    async def unload(name: str, dependents: bool) -> None:
        done.append((name, dependents))

    async def ready(name: str, version: str) -> bool:
        return (name, version) == ("b", "2")

    given = services(load=load, unload=unload, ready=ready)
    async with running(tmp_path, code, FLOATS, given) as instance:
        assert value(await answer(instance, ask(floats(1)))) == [0, 1]
    assert done == [("a", None, None), ("b", '{"x": 1}', {"file:1/model.py": b"code"}), ("a", True)]


async def test_metrics(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def initialize(self, args):
        F = pb_utils.MetricFamily
        self.apples = F(name="apples_total", description="Apples", kind=F.COUNTER).Metric(labels={"model": "demo"})
        self.level = F("level", "Level", F.GAUGE).Metric()
        self.sizes = F("sizes", "Sizes", F.HISTOGRAM).Metric(labels={}, buckets=[1, 2.5])
        for wrong in (lambda: F("no name", "x", F.GAUGE), lambda: self.apples.set(1), lambda: self.sizes.increment(1),
                      lambda: self.apples.increment(-1), lambda: self.level.observe(1), lambda: self.sizes.value(),
                      lambda: F("h", "x", F.HISTOGRAM).Metric()):
            try:
                wrong()
            except pb_utils.TritonModelException:
                continue
            raise AssertionError("accepted")

    def execute(self, requests):
        for value in requests[0].inputs()[0].as_numpy():
            self.apples.increment(value)
            self.level.set(value)
            self.sizes.observe(value)
        now = np.array([self.apples.value(), self.level.value()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", now)])]
"""
    registry = metrics()
    async with running(tmp_path, code, FLOATS, services(metrics=registry)) as instance:
        assert value(await answer(instance, ask(floats(1, 4)))) == [5, 4]
        page = registry.render().decode()
        for line in ('apples_total{model="demo"} 5.0', "level 4.0", 'sizes_bucket{le="2.5"} 1.0', "sizes_count 2.0"):
            assert line in page.splitlines()
    unread = code.replace('lambda: F("no name", "x", F.GAUGE), ', "")
    async with running(tmp_path / "again", unread, FLOATS) as instance:
        assert value(await answer(instance, ask(floats(2, 1)))) == [3, 1]


async def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        log = pb_utils.Logger
        log.log("plain"); log.log_info("i"); log.log_warn("w"); log.log_error("e"); log.log_verbose("v")
        log.log("leveled", log.WARNING)
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    with caplog.at_level(logging.DEBUG, "tritium"):
        async with running(tmp_path, code) as instance:
            await answer(instance, ask(floats(1)))
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "tritium.serving.services"]
    assert lines == [
        *(("INFO", "plain"), ("INFO", "i"), ("WARNING", "w"), ("ERROR", "e"), ("DEBUG", "v"), ("WARNING", "leveled")),
    ]


async def test_a_running_model_follows_the_log_settings(tmp_path: Path) -> None:
    """Lines that nobody wants are not even sent; the model's own use of ``logging`` stays its own."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        import logging
        pb_utils.Logger.log_verbose("a step")
        pb_utils.Logger.log_warn("a worry")
        levels = [logging.getLogger(name).getEffectiveLevel() for name in ("tritium", "mine")]
        out = pb_utils.Tensor("OUT", np.array(levels, np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
    sent: list[str] = []
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "_write", lambda self, level, text: sent.append(level))
        async with running(tmp_path, code) as instance:
            for switches in (LogState("text", 1, True, True, True), LogState("text", 0, True, False, True)):
                patch.setattr(logs, "state", lambda switches=switches: switches)
                logs.announce()
                found.append(value(await answer(instance, ask(floats(1)))))
    assert sent == ["debug", "warning"]
    assert found == [[logging.DEBUG, logging.WARNING], [logging.INFO, logging.WARNING]]
