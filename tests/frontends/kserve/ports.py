"""Python models behind both ways of both protocols: the short ones, and those that answer everything."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from tritium.frontends.grpc import GrpcFrontend
from tritium.frontends.grpc_transport import Transport
from tritium.frontends.http import HttpListener, app
from tritium.frontends.kserve.short import ShortInfer
from tritium.observability.metrics import Metrics
from tritium.serving.server import Server

MOODS = """
import json
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        outputs = [pb_utils.Tensor("OUT", value), pb_utils.Tensor("SUM", value.sum(axis=1, keepdims=True))]
        mood = float(value.reshape(-1)[0]) if value.size else 0
        if mood == -1:
            raise ValueError("a bad mood")
        if mood == -2:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no, thank you"))
        if mood == -3:
            return pb_utils.InferenceResponse(outputs, parameters={"mood": 3, "say": json.loads(request.parameters())})
        if mood == -4:
            time.sleep(float(value.reshape(-1)[1]))
        return pb_utils.InferenceResponse(outputs)
"""
WORDS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
MODELS = {
    "moods": (
        MOODS,
        """backend: "python" max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: -1 }
        output { name: "OUT" data_type: TYPE_FP32 dims: -1 } output { name: "SUM" data_type: TYPE_FP32 dims: 1 }""",
    ),
    "words": (
        WORDS,
        """backend: "python" input { name: "IN" data_type: TYPE_STRING dims: -1 }
        output { name: "OUT" data_type: TYPE_STRING dims: -1 } dynamic_batching { }""",
    ),
}


class Ports:
    """One server behind both ways of both protocols, on an event loop in a thread."""

    def __init__(self, repository: Path) -> None:
        for name, (code, config) in MODELS.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(config)
            (repository / name / "1" / "model.py").write_text(code)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.metrics = Metrics()
        self.server = Server([repository], metrics=self.metrics)
        self.run(self._start())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def _start(self) -> None:
        await self.server.start()
        assert not self.server.failures()
        applications = [
            app(self.server, max_body_bytes=4 << 20, body_timeout_s=0.5, short=way) for way in (True, False)
        ]
        self.short: ShortInfer = applications[0]._short  # type: ignore[attr-defined]
        self.listeners = [HttpListener(application) for application in applications]
        self.http = [await listener.start("127.0.0.1", 0) for listener in self.listeners]
        self.fronts = [
            GrpcFrontend(self.server, max_message_bytes=4 << 20, transport=Transport(core=core))
            for core in (False, True)
        ]
        self.grpc = [await front.start("127.0.0.1", 0) for front in self.fronts]

    def stop(self) -> None:
        async def end() -> None:
            await asyncio.gather(*(one.stop(0.5) for one in (*self.listeners, *self.fronts)))
            await self.server.drain(1.0)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
