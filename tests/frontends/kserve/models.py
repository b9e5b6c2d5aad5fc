"""Models that the front ends are tried with: a real Server over a small backend, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tritium.backends.base import Backend, Timing
from tritium.errors import Code, TritiumError
from tritium.frontends.grpc import GrpcFrontend
from tritium.frontends.http import HttpListener, app
from tritium.frontends.kserve.shared import Shared
from tritium.observability.metrics import Metrics
from tritium.serving.server import Server
from tritium.types import InferRequest, InferResponse, Tensor

TYPES = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
    "BF16",
]
CONFIGS = {
    "echo": """max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }""",
    "texts": """input { name: "IN" data_type: TYPE_STRING dims: -1 }
        output { name: "OUT" data_type: TYPE_STRING dims: -1 }""",
    "one_text": """max_batch_size: 2
        input { name: "IN" data_type: TYPE_STRING dims: 1 } output { name: "OUT" data_type: TYPE_STRING dims: 1 }""",
    "types": "".join(
        f'input {{ name: "IN_{t}" data_type: TYPE_{t} dims: -1 optional: true }}'
        f'output {{ name: "OUT_{t}" data_type: TYPE_{t} dims: -1 }}'
        for t in TYPES
    ),
    "grid": """input { name: "IN" data_type: TYPE_INT32 dims: [2, 3] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [2, 3] }""",
    "repeat": """input { name: "ITEMS" data_type: TYPE_INT32 dims: -1 }
        output { name: "ITEM" data_type: TYPE_INT32 dims: 1 } model_transaction_policy { decoupled: true }""",
    "tokens": """input { name: "ITEMS" data_type: TYPE_INT32 dims: -1 }
        output { name: "ITEM" data_type: TYPE_INT32 dims: 1 }""",
}


class Mirror(Backend):
    """Answers with its inputs, or once for each of ITEMS; the parameters of a request say what else happens.

    ``error`` (a code) or ``error_answer``; ``wait_ms`` before each answer; ``hang``; ``fail_at`` (ITEMS);
    ``with_last`` makes the last item final instead of an empty answer.
    """

    left: ClassVar[list[str]] = []
    seen: ClassVar[list[InferRequest]] = []
    running = 0

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        say = request.parameters
        Mirror.seen.append(request)
        Mirror.running += 1
        finished = False
        try:
            if "error" in say:
                raise TritiumError(Code[str(say["error"])], "as asked", retry_after_s=2.5)
            answers = self._items(request) if "ITEMS" in request.inputs else self._mirror(request)
            for answer in answers:
                await asyncio.sleep(1000.0 if "hang" in say else float(say.get("wait_ms", 0)) / 1000)
                finished = answer.final
                yield answer
        finally:
            Mirror.running -= 1
            if not finished:
                Mirror.left.append(request.id)

    def _mirror(self, request: InferRequest) -> list[InferResponse]:
        if "error_answer" in request.parameters:
            error = TritiumError(Code.UNAVAILABLE, "an answer as asked")
            return [InferResponse("", "", "", error=error)]
        wanted = [output.name for output in request.outputs]
        found = [Tensor(n.replace("IN", "OUT"), t.dtype, t.shape, t.data) for n, t in request.inputs.items()]
        outputs = [t for t in found if not wanted or t.name in wanted]
        return [InferResponse("", "", "", outputs, {"note": 7} if "note" in request.parameters else {})]

    def _items(self, request: InferRequest) -> list[InferResponse]:
        say = request.parameters
        items = request.inputs["ITEMS"].numpy()
        answers: list[InferResponse] = []
        for index, item in enumerate(items):
            out = Tensor.from_numpy("ITEM", np.array([item], dtype=np.int32))
            error = TritiumError(Code.UNKNOWN, f"no item at {index}") if say.get("fail_at") == index else None
            answers.append(InferResponse("", "", "", [] if error else [out], error=error, final=False))
        if "with_last" in say:
            answers[-1].final = True
        else:
            answers.append(InferResponse("", "", "", final=True, empty=True))
        return answers


class Live:
    """The models behind both ports, on an event loop in a thread."""

    def __init__(self, repository: Path, shared: Shared | None = None, **limits: Any) -> None:
        self.shared = shared or Shared()
        for name, config in CONFIGS.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(f'backend: "mirror" {config}')
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(self._start(repository, limits))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine over there and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self, repository: Path, limits: dict[str, Any]) -> None:
        self.metrics = Metrics()
        names = [name for name in CONFIGS if name != "one_text"]
        self.server = Server([repository], control="explicit", load_models=names, name="live", metrics=self.metrics)
        await self.server.start()
        assert not self.server.failures()
        self.http = HttpListener(app(self.server, self.metrics, self.shared, max_body_bytes=4 << 20, **limits))
        self.http_port = await self.http.start("127.0.0.1", 0)
        self.grpc = GrpcFrontend(self.server, self.shared, max_message_bytes=4 << 20, write_timeout_s=1.5)
        self.grpc_port = await self.grpc.start("127.0.0.1", 0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def stop(self) -> None:
        """Ends both ports and the loop."""

        async def end() -> None:
            await asyncio.gather(self.http.stop(0.5), self.grpc.stop(0.5))
            await self.server.drain(1.0)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def wait(test: Any, seconds: float = 5.0) -> bool:
    """Waits until ``test()`` holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if test():
            return True
        time.sleep(0.01)
    return False
