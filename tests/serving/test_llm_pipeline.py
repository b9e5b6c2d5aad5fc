"""A language model as a step between Python models: the repository of examples/ensemble_llm with a tiny model."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from tests.serving.support import refused
from tests.tiny_gguf import make_gguf
from tritium.errors import Code
from tritium.llm.types import EngineStats
from tritium.serving.server import Server
from tritium.types import InferRequest, InferResponse, RequestedOutput, Tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ensemble_llm" / "models"
# The engine frees blocks in the step after the word has come; on a busy machine it is that many short steps ahead of
# what this process knows of it. Nobody would have stopped it before 900.
AHEAD = 100
PROMPT = "介绍一下 the quick brown fox 🙂"
FRAGILE = """
    def answer(self, request):
        if pb_utils.get_input_tensor_by_name(request, "previous_ids").as_numpy()[0][-1] >= 0:
            self.count = getattr(self, "count", 0) + 1
            if self.count % 4 == 0:
                raise ValueError("a detokenizer that breaks")
        return self.whole_answer(request)

    def whole_answer(self, request):
"""
SLOW = "    def answer(self, request):\n        import time\n        time.sleep(0.05)\n"
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        stream = pb_utils.get_input_tensor_by_name(request, "stream").as_numpy()[0, 0]
        outgoing = pb_utils.InferenceRequest(
            model_name="llm",
            request_id=request.request_id(),
            requested_output_names=["output_ids", "finish_reason"],
            inputs=request.inputs(),
            parameters={"temperature": 0.0},
        )
        answers = outgoing.exec(decoupled=True) if stream else [outgoing.exec()]
        for answer in answers:
            if answer.has_error():
                sender.send(pb_utils.InferenceResponse(error=answer.error()))
            elif request.is_cancelled():
                answers.cancel()
            elif answer.output_tensors():
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 16
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }
]
model_transaction_policy { decoupled: true }
"""


def write_variant(repository: Path, name: str, answer: str, more: str = "") -> None:
    """An ensemble ``name`` whose detokenizer, ``name``_text, has another ``answer``."""
    shutil.copytree(repository / "detokenizer", repository / f"{name}_text")
    file = repository / f"{name}_text" / "1" / "model.py"
    file.write_text(file.read_text().replace("    def answer(self, request):\n", answer))
    shutil.copytree(repository / "ensemble", repository / name)
    config = repository / name / "config.pbtxt"
    text = config.read_text().replace('"detokenizer"', f'"{name}_text"')
    config.write_text(text.replace("ensemble_scheduling {", f"ensemble_scheduling {{ {more}"))


def write_repository(folder: Path, model: Path) -> Path:
    repository = folder / "models"
    shutil.copytree(EXAMPLE, repository)
    for config in repository.glob("*/config.pbtxt"):
        config.write_text(config.read_text().replace('"smollm2"', f'"{model}"'))
    llm = repository / "llm" / "config.pbtxt"
    for key, value in (("dtype", "float32"), ("kv_cache_bytes", "16000000"), ("threads", "1")):
        llm.write_text(llm.read_text() + f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    write_variant(repository, "fragile", FRAGILE)
    write_variant(repository, "slow", SLOW, "max_inflight_requests: 1")
    (repository / "caller" / "1").mkdir(parents=True)
    (repository / "caller" / "config.pbtxt").write_text(CALLER_CONFIG)
    (repository / "caller" / "1" / "model.py").write_text(CALLER)
    return repository


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("pipeline")
    made = Server([write_repository(folder, make_gguf(folder / "tiny.gguf"))])
    try:
        await made.start()
        assert made.failures() == {}
        yield made
    finally:
        await made.drain(0.1)


def ask(model: str, *texts: str, stream: bool = False, tokens: int = 24, **more: float) -> InferRequest:
    inputs = {"text_input": Tensor.from_strings("text_input", [t.encode() for t in texts], (len(texts), 1))}
    given = {
        "max_tokens": np.int32(tokens),
        "stream": np.bool_(stream),
        "ignore_eos": np.bool_(True),
        "temperature": np.float32(0),
    } | more
    for name, value in given.items():
        inputs[name] = Tensor.from_numpy(name, np.full((len(texts), 1), value))
    return InferRequest(model, "", "r", inputs, [RequestedOutput("text_output")], time.monotonic_ns())


async def pieces(server: Server, request: InferRequest) -> list[str]:
    async with aclosing(server.infer_stream(request)) as answers:
        return [text(answer)[0] async for answer in answers if not answer.empty]


def text(answer: InferResponse) -> list[str]:
    return [value.decode() for value in answer.outputs[0].strings()]


def stats(server: Server) -> EngineStats:
    return server.engines()[0].stats[0]


@pytest.mark.parametrize("seed", [None, 5])
async def test_the_text_is_that_of_text_input(server: Server, seed: int | None) -> None:
    """A random model writes much that is no UTF-8: the replacement characters must be the same ones too."""
    more = {} if seed is None else {"seed": np.uint64(seed), "temperature": np.float32(1.5)}
    (expected,) = text(await server.infer(ask("llm", PROMPT, **more)))
    assert text(await server.infer(ask("ensemble", PROMPT, **more))) == [expected]
    found = await pieces(server, ask("ensemble", PROMPT, stream=True, **more))
    assert "".join(found) == expected
    assert len(found) > 4
    streamed = await pieces(server, ask("llm", PROMPT, stream=True, **more))
    assert "".join(streamed) == expected


async def test_a_batch_of_texts(server: Server) -> None:
    texts = ("The", PROMPT, "server for language models")
    expected = [text(await server.infer(ask("llm", one)))[0] for one in texts]
    assert text(await server.infer(ask("ensemble", *texts))) == expected


async def test_characters_are_never_cut(server: Server) -> None:
    """The prompt's own characters come back one token, which is part of a character, at a time."""
    detokenizer = "detokenizer"
    tokenizer = server.text_model("llm").tokenizer
    ids = tokenizer.encode(PROMPT * 2)
    found = ""
    for at, token in enumerate(ids):
        before = ids[max(0, at - 32) : at] or [-1]
        inputs = {
            "output_ids": np.array([[[token]]], np.int32),
            "sequence_length": np.array([[1]], np.int32),
            "previous_ids": np.array([before], np.int32),
        }
        tensors = {name: Tensor.from_numpy(name, array) for name, array in inputs.items()}
        tensors["finish_reason"] = Tensor.from_strings("finish_reason", [b""], (1, 1))
        (piece,) = text(await server.infer(InferRequest(detokenizer, "", "", tensors, [], time.monotonic_ns())))
        assert "\ufffd" not in piece
        found += piece
    assert found == PROMPT * 2


async def test_a_client_that_leaves_frees_the_blocks(server: Server) -> None:
    request = ask("ensemble", PROMPT, stream=True, tokens=900)
    async with aclosing(server.infer_stream(request)) as answers:
        async for _ in answers:
            if stats(server).blocks_used:
                break
    left_at = stats(server).steps
    async with asyncio.timeout(10):
        while stats(server).running or stats(server).blocks_used:
            await asyncio.sleep(0.002)
    assert stats(server).steps - left_at <= AHEAD


async def test_a_cancelled_call_without_a_stream_frees_the_blocks(server: Server) -> None:
    task = asyncio.create_task(server.infer(ask("ensemble", PROMPT, tokens=900)))
    async with asyncio.timeout(10):
        while not stats(server).running:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left_at = stats(server).steps
        while stats(server).running or stats(server).blocks_used:
            await asyncio.sleep(0.002)
    assert stats(server).steps - left_at <= AHEAD


async def test_an_error_of_the_engine_names_the_ensemble(server: Server) -> None:
    error = await refused(server.infer(ask("ensemble", "word " * 3000)))
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message.startswith("in ensemble 'ensemble', input_ids has ")
    assert "expected fewer than the context of 1024" in error.message
    error = await refused(server.infer(ask("ensemble", "word", tokens=-3)))
    assert error.code is Code.INVALID_ARGUMENT and "max_tokens" in error.message


async def test_a_step_that_fails_behind_the_engine_ends_the_sequence(server: Server) -> None:
    found: list[str] = []

    async def read() -> None:
        async with aclosing(server.infer_stream(ask("fragile", PROMPT, stream=True, tokens=900))) as answers:
            async for answer in answers:
                found.append(text(answer)[0])

    error = await refused(read())
    assert error.message.startswith("in ensemble 'fragile', ") and "a detokenizer that breaks" in error.message
    assert found == (await pieces(server, ask("ensemble", PROMPT, stream=True, tokens=24)))[: len(found)]
    async with asyncio.timeout(10):
        while stats(server).running or stats(server).blocks_used:
            await asyncio.sleep(0.002)


async def test_max_inflight_requests_holds_the_engines_answers_back(server: Server) -> None:
    """While the slow step works, tokens join: fewer answers, the same text."""
    expected = await pieces(server, ask("ensemble", PROMPT, stream=True, tokens=60))
    found = await pieces(server, ask("slow", PROMPT, stream=True, tokens=60))
    assert "".join(found) == "".join(expected)
    assert len(found) < 45


async def test_a_client_that_does_not_read_holds_the_engines_answers_back(server: Server) -> None:
    (expected,) = text(await server.infer(ask("llm", PROMPT, tokens=400)))
    found: list[str] = []
    async with aclosing(server.infer_stream(ask("ensemble", PROMPT, stream=True, tokens=400))) as answers:
        async for answer in answers:
            if not found:
                async with asyncio.timeout(60):
                    while stats(server).running:
                        await asyncio.sleep(0.01)
            found += [] if answer.empty else text(answer)
    assert "".join(found) == expected
    assert len(found) < 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_python_model_calls_the_engine(server: Server, stream: bool) -> None:
    ids = server.text_model("llm").tokenizer.encode(PROMPT)
    arrays = {
        "input_ids": np.array([ids], np.int32),
        "max_tokens": np.array([[12]], np.int32),
        "stream": np.array([[stream]]),
    }
    found: list[int] = []
    reasons: list[bytes] = []
    expected: list[int] = []
    for model, into in (("llm", expected), ("caller", found)):
        inputs = {name: Tensor.from_numpy(name, array) for name, array in arrays.items()}
        request = InferRequest(model, "", "b", inputs, [], time.monotonic_ns(), {"temperature": 0.0})
        request.outputs = [RequestedOutput("output_ids"), RequestedOutput("finish_reason")]
        async with aclosing(server.infer_stream(request)) as answers:
            async for answer in answers:
                assert answer.error is None
                tensors = {tensor.name: tensor for tensor in answer.outputs}
                if tensors:
                    into += tensors["output_ids"].numpy().reshape(-1).tolist()
                    reasons += tensors["finish_reason"].strings()
    assert found == expected and len(found) > 1
    assert set(reasons[:-1]) <= {b"", b"length", b"stop"} and reasons[-1] in (b"length", b"stop")


async def test_a_caller_whose_client_leaves_ends_its_call(server: Server) -> None:
    ids = server.text_model("llm").tokenizer.encode(PROMPT)
    arrays = {
        "input_ids": np.array([ids], np.int32),
        "max_tokens": np.array([[900]], np.int32),
        "stream": np.array([[True]]),
    }
    inputs = {name: Tensor.from_numpy(name, array) for name, array in arrays.items()}
    request = InferRequest("caller", "", "b", inputs, [], time.monotonic_ns(), {})
    async with aclosing(server.infer_stream(request)) as answers:
        async for _ in answers:
            break
    async with asyncio.timeout(10):
        while stats(server).running or stats(server).blocks_used:
            await asyncio.sleep(0.002)
