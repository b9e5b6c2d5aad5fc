"""Small backends that do what a test tells them, and requests for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from tritium.backends.base import Backend, LoadContext, TextBackend, Timing
from tritium.backends.config import ModelConfig, TensorSpec
from tritium.errors import Code, TritiumError
from tritium.llm.types import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    MemoryBudget,
    SamplingParams,
    TokenDelta,
    WireError,
)
from tritium.types import DType, InferRequest, InferResponse, RequestedOutput, Tensor

ECHO = """
backend: "echo"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


class Echo(Backend):
    """Answers with its input. ``fail``, ``crash``, ``slow`` in the parameters of the model steer the load;
    ``answers``, ``error``, ``crash``, ``hang``, ``endless`` in those of a request steer the answer."""

    made: ClassVar[list[Echo]] = []
    load_gate: ClassVar[asyncio.Event | None] = None

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        self.loads = 0
        self.unloads = 0
        self.closed = 0
        self.up = False
        self.seen: list[InferRequest] = []
        self.gate = asyncio.Event()
        Echo.made.append(self)

    async def complete(self, config: ModelConfig) -> ModelConfig:
        if not config.outputs:
            config = replace(config, outputs=(TensorSpec("OUT", DType.FP32, (-1,)),))
        return config

    async def load(self) -> None:
        self.loads += 1
        parameters = self.context.config.parameters
        if Echo.load_gate is not None:
            await Echo.load_gate.wait()
        if parameters.get("fail") in ("all", self.context.version):
            raise TritiumError(Code.INTERNAL, "load refuses on purpose")
        if "crash" in parameters:
            raise RuntimeError("a secret")
        self.up = True

    async def unload(self) -> None:
        self.unloads += 1
        self.up = False
        self.gate.set()
        if "stubborn" in self.context.config.parameters:
            raise RuntimeError("will not go")

    def ready(self) -> bool:
        return self.up

    def reason(self) -> str:
        return "" if self.up else "asleep"

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        self.seen.append(request)
        say = request.parameters
        try:
            if "hang" in say:
                await self.gate.wait()
                if not self.up:
                    raise TritiumError(Code.UNAVAILABLE, "unloaded meanwhile")
            if "error" in say:
                raise TritiumError(Code[str(say["error"])], "as asked")
            if "crash" in say:
                raise ValueError("a secret")
            timing.queue_ns, timing.input_ns, timing.output_ns, timing.executions = 5, 3, 2, 0.5
            count = int(say.get("answers", 1))
            for index in range(count):
                out = Tensor("OUT", DType.FP32, request.inputs["IN"].shape, request.inputs["IN"].data)
                error = TritiumError(Code.UNKNOWN, "in the answer") if "error_answer" in say else None
                yield InferResponse("", "", "", [out], error=error, final=index == count - 1 and "endless" not in say)
            if "empty_final" in say:
                yield InferResponse("", "", "", final=True, empty=True)
        finally:
            self.closed += 1


class Words:
    """Stands for a tokenizer."""


class Text(TextBackend):
    """Counts from the last prompt token; parameters of the model as for Echo."""

    made: ClassVar[list[Text]] = []

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        self.aborted = 0
        self.up = False
        Text.made.append(self)

    async def load(self) -> None:
        self.tokenizer = Words()  # type: ignore[assignment]
        self.max_length, self.vocab_size, self.sampling_defaults = 64, 100, {"temperature": 0.5}
        self.up = True

    async def unload(self) -> None:
        self.up = False

    def ready(self) -> bool:
        return self.up

    def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        return Rows(self, request, timing)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        mode = request.cache_salt
        done = False
        try:
            for index in range(request.params.max_tokens or 1):
                token = TokenDelta(id=request.id, tokens=[request.tokens[-1] + 1 + index], queue_ns=7)
                yield token
            done = True
            if mode == "error":
                error = WireError(Code.UNAVAILABLE, "engine died", None, None)
                yield TokenDelta(id=request.id, tokens=[], finish=FinishReason.ERROR, error=error)
            elif mode != "unfinished":
                yield TokenDelta(id=request.id, tokens=[], finish=FinishReason.LENGTH, exec_share=0.25)
        finally:
            self.aborted += not done

    def engine_stats(self) -> list[EngineStats]:
        return [EngineStats(running=1, blocks_used=1, blocks_total=4)]

    def engine_infos(self) -> list[EngineInfo]:
        return [engine_info()]


class Rows:
    """An iterator that cannot be closed: one answer."""

    def __init__(self, backend: Text, request: InferRequest, timing: Timing) -> None:
        self.left = 1

    def __aiter__(self) -> Rows:
        return self

    async def __anext__(self) -> InferResponse:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return InferResponse("", "", "")


def engine_info() -> EngineInfo:
    budget = MemoryBudget(
        weights_bytes=1,
        activations_bytes=1,
        kv_bytes=1,
        kv_bytes_per_token=1,
        margin_bytes=1,
        num_blocks=4,
        block_size=16,
    )
    return EngineInfo(
        family="llama",
        device="cpu",
        dtype="float32",
        dtype_reason="test",
        max_length=64,
        max_rows=4,
        vocab_size=100,
        budget=budget,
        kernels="reference",
        startup={},
        notices=[],
    )


def request(model: str = "echo", rows: int = 1, version: str = "", id: str = "", **parameters: object) -> InferRequest:
    array = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return InferRequest(
        model=model,
        version=version,
        id=id,
        inputs={"IN": Tensor.from_numpy("IN", array)},
        outputs=[RequestedOutput("OUT")],
        arrived_ns=time.monotonic_ns(),
        parameters=dict(parameters),  # type: ignore[arg-type]
    )


def sequence(count: int = 3, mode: str = "") -> GenerateRequest:
    return GenerateRequest(
        id="g", tokens=[1, 2], params=SamplingParams(max_tokens=count), arrived_ns=time.monotonic_ns(), cache_salt=mode
    )


def write_model(repository: Path, name: str, text: str | None = ECHO, versions: tuple[str, ...] = ("1",)) -> Path:
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    for version in versions:
        (folder / version).mkdir(exist_ok=True)
    return folder
