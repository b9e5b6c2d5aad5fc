"""An LLM as tensors: both sets in and out, with a backend that counts instead of thinking."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tritium.backends.base import LoadContext, TextBackend, Timing
from tritium.backends.config import DynamicBatching, ModelConfig, TensorSpec
from tritium.backends.llm_settings import Alias, LlmSettings
from tritium.backends.llm_tensors import (
    DEFAULT_MAX_TOKENS,
    LOOK_BACK,
    STANDARD_INPUTS,
    STANDARD_OUTPUTS,
    TensorForm,
    complete_tensors,
)
from tritium.errors import Code, TritiumError
from tritium.llm.config import EngineConfig
from tritium.llm.types import EngineInfo, EngineStats, FinishReason, GenerateRequest, TokenDelta
from tritium.types import DType, InferRequest, InferResponse, RequestedOutput, Tensor

VOCAB = 128


class Letters:
    """A tokenizer whose tokens are ASCII codes."""

    eos_token_ids = (3,)
    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))


class Counting(TextBackend):
    """Answers each prompt with its last token plus one, plus two and so on."""

    def __init__(self) -> None:
        super().__init__(LoadContext("m", "1", ModelConfig("m", None)))
        self.tokenizer = Letters()  # type: ignore[assignment]
        self.max_length, self.vocab_size = 64, VOCAB
        self.sampling_defaults = {"temperature": 0.5}
        self.seen: list[GenerateRequest] = []
        self.closed = 0

    async def load(self) -> None: ...

    async def unload(self) -> None: ...

    def ready(self) -> bool:
        return True

    def stream(self, request: InferRequest, timing: Timing) -> Any:
        raise NotImplementedError

    def engine_stats(self) -> list[EngineStats]:
        return []

    def engine_infos(self) -> list[EngineInfo]:
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        self.seen.append(request)
        if request.tokens == [1]:
            raise TritiumError(Code.UNAVAILABLE, "full")
        count = request.params.max_tokens or 0
        try:
            for step in range(count):
                await asyncio.sleep(0)
                token = (request.tokens[-1] + 1 + step) % VOCAB
                end = FinishReason.LENGTH if step == count - 1 else None
                yield TokenDelta(
                    id=request.id, tokens=[token], text=chr(token), finish=end, queue_ns=5, exec_share=0.5 if end else 0
                )
        finally:
            self.closed += 1


def form(alias: Alias = "tritium", batch: int = 4, exclude: bool | None = None, **config: Any) -> TensorForm:
    completed = complete_tensors(ModelConfig("m", None, max_batch_size=batch, **config))
    settings = LlmSettings(alias, EngineConfig(model="x"), exclude_input=exclude)
    return TensorForm(Counting(), settings, completed)


def tensor(name: str, value: Any, dtype: Any = None) -> Tensor:
    if name in STANDARD_INPUTS and dtype is None:
        dtype = STANDARD_INPUTS[name].dtype.numpy
    return Tensor.from_numpy(name, np.array(value, dtype=dtype))


def request(outputs: list[str] | None = None, parameters: dict[str, Any] | None = None, **inputs: Any) -> InferRequest:
    tensors = {name: tensor(name, value) for name, value in inputs.items()}
    wanted = [RequestedOutput(name) for name in outputs or []]
    return InferRequest("m", "1", "id-1", tensors, wanted, arrived_ns=1000, parameters=parameters or {})


async def run(one: TensorForm, asked: InferRequest) -> list[InferResponse]:
    return [answer async for answer in one.stream(asked, Timing())]


def outputs(answer: InferResponse) -> dict[str, Any]:
    return {t.name: t.numpy().tolist() for t in answer.outputs}


async def test_text_in_text_out() -> None:
    (answer,) = await run(form(), request(text_input=[["AB"]], max_tokens=[[3]]))
    assert outputs(answer) == {"text_output": [[b"CDE"]]}
    assert (answer.final, answer.id, answer.outputs[0].shape) == (True, "id-1", (1, 1))


async def test_ids_in_ids_out() -> None:
    (answer,) = await run(form(), request(input_ids=[[65, 66]], request_output_len=[[2]]))
    assert outputs(answer) == {"output_ids": [[[67, 68]]], "sequence_length": [[2]]}
    assert answer.outputs[0].dtype is DType.INT32


async def test_a_batch_is_padded_with_the_end_token() -> None:
    asked = request(input_ids=[[65, 66], [70, 0]], input_lengths=[[2], [1]], request_output_len=[[1], [3]])
    (answer,) = await run(form(), asked)
    assert outputs(answer) == {"output_ids": [[[67, 3, 3]], [[71, 72, 73]]], "sequence_length": [[1], [3]]}
    (answer,) = await run(form(), request(**{**_arrays(asked), "pad_id": [[0], [0]]}))
    assert outputs(answer)["output_ids"][0] == [[67, 0, 0]]


def _arrays(asked: InferRequest) -> dict[str, Any]:
    return {name: t.numpy().tolist() for name, t in asked.inputs.items()}


async def test_without_a_batch_dimension() -> None:
    (answer,) = await run(form(batch=0), request(input_ids=[65], request_output_len=[2]))
    assert outputs(answer) == {"output_ids": [[66, 67]], "sequence_length": [2]}
    (answer,) = await run(form(batch=0), request(text_input=["A"], max_tokens=[2]))
    assert outputs(answer) == {"text_output": [b"BC"]}


async def test_declared_with_one_dimension_there_are_no_beams() -> None:
    flat = form(outputs=(TensorSpec("output_ids", DType.INT32, (-1,)),))
    (answer,) = await run(flat, request(input_ids=[[65]], request_output_len=[[2]]))
    assert outputs(answer)["output_ids"] == [[66, 67]]


async def test_any_outputs_from_any_inputs() -> None:
    (answer,) = await run(form(), request(["text_output", "output_ids"], input_ids=[[65]], max_tokens=[[1]]))
    assert outputs(answer) == {"text_output": [[b"B"]], "output_ids": [[[66]]]}


@pytest.mark.parametrize(
    ("alias", "exclude", "text", "ids"),
    [
        ("tritium", None, b"B", [66]),
        ("vllm", None, b"AB", [66]),
        ("tensorrtllm", None, b"B", [65, 66]),
        ("vllm", True, b"B", [66]),
        ("tritium", False, b"AB", [65, 66]),
    ],
)
async def test_the_prompt_follows_the_alias(alias: Alias, exclude: bool | None, text: bytes, ids: list[int]) -> None:
    both = ["text_output", "output_ids"]
    (answer,) = await run(form(alias, exclude=exclude), request(both, text_input=[["A"]], max_tokens=[[1]]))
    assert outputs(answer) == {"text_output": [[text]], "output_ids": [[ids]]}
    asked = request(both, text_input=[["A"]], max_tokens=[[1]], exclude_input_in_output=[[True]])
    (answer,) = await run(form(alias, exclude=exclude), asked)
    assert outputs(answer) == {"text_output": [[b"B"]], "output_ids": [[[66]]]}


async def test_a_stream_has_one_answer_a_step_without_the_prompt() -> None:
    answers = await run(form("vllm"), request(text_input=[["A"]], max_tokens=[[3]], stream=[[True]]))
    assert [outputs(a)["text_output"] for a in answers] == [[[b"B"]], [[b"C"]], [[b"D"]]]
    assert [a.final for a in answers] == [False, False, True]


async def test_each_answer_of_a_stream_says_what_came_before_it_and_whether_it_is_the_last() -> None:
    wanted = ("output_ids", "previous_ids", "finish_reason")
    asked = request(input_ids=[[65, 66]], max_tokens=[[3]], stream=[[True]])
    asked.outputs = [RequestedOutput(name) for name in wanted]
    found = [outputs(a) for a in await run(form(), asked)]
    assert [one["output_ids"] for one in found] == [[[[67]]], [[[68]]], [[[69]]]]
    assert [one["previous_ids"] for one in found] == [[[65, 66]], [[65, 66, 67]], [[65, 66, 67, 68]]]
    assert [one["finish_reason"] for one in found] == [[[b""]], [[b""]], [[b"length"]]]


@pytest.mark.parametrize(("alias", "before"), [("tritium", [[-1, 65], [66, 67]]), ("tensorrtllm", [[], []])])
async def test_what_came_before_a_whole_answer(alias: Alias, before: list[list[int]]) -> None:
    """Where the answer begins with the prompt, nothing did."""
    asked = request(input_ids=[[65, 0], [66, 67]], input_lengths=[[1], [2]], max_tokens=[[40]])
    asked.outputs = [RequestedOutput("previous_ids"), RequestedOutput("finish_reason")]
    (answer,) = await run(form(alias), asked)
    assert outputs(answer) == {"previous_ids": before, "finish_reason": [[b"length"], [b"length"]]}


async def test_previous_ids_look_back_so_far() -> None:
    asked = request(input_ids=[[65]], max_tokens=[[40]], stream=[[True]])
    asked.outputs = [RequestedOutput("previous_ids")]
    found = [outputs(a)["previous_ids"][0] for a in await run(form(), asked)]
    assert found[-1] == [*range(73, 105)] and len(found[-1]) == LOOK_BACK


async def test_leaving_a_stream_closes_the_sequence() -> None:
    one = form()
    async with aclosing(
        one.stream(request(text_input=[["A"]], max_tokens=[[9]], streaming=[[True]]), Timing())
    ) as answers:
        async for _ in answers:
            break
    assert one._backend.closed == 1  # type: ignore[attr-defined]


async def test_values_come_from_inputs_parameters_json_and_the_model() -> None:
    one = form()
    asked = request(
        parameters={"top_k": 7, "other": "kept out"},
        text_input=[["A"]],
        temperature=[[0.25]],
        stop_words=[["x", ""]],
        sampling_parameters=[[json.dumps({"max_tokens": "2", "presence_penalty": 0.5})]],
    )
    await run(one, asked)
    (seen,) = one._backend.seen  # type: ignore[attr-defined]
    params = seen.params
    assert (params.top_k, params.temperature, params.stop) == (7, 0.25, ["x"])
    assert (params.max_tokens, params.presence_penalty) == (2, 0.5)
    await run(one, request(text_input=[["A"]]))
    params = one._backend.seen[-1].params  # type: ignore[attr-defined]
    assert (params.temperature, params.max_tokens) == (0.5, DEFAULT_MAX_TOKENS)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    one = form()
    monkeypatch.setattr(Letters, "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(TritiumError, match="at least 9000 tokens, expected fewer than the context of 64"):
        await run(one, request(text_input=[["A" * 9000]]))


async def test_rows_of_a_seeded_batch_differ() -> None:
    one = form()
    await run(one, request(text_input=[["A"], ["A"]], seed=[[5]], max_tokens=[[1]]))
    assert [r.params.seed for r in one._backend.seen] == [5, 6]  # type: ignore[attr-defined]


async def test_times_and_executions_are_counted() -> None:
    timing = Timing()
    one = form()
    async for _ in one.stream(request(text_input=[["A"], ["B"]], max_tokens=[[2], [2]]), timing):
        pass
    assert (timing.queue_ns, timing.executions) == (5, 1.0)


async def test_one_failing_row_fails_the_request() -> None:
    with pytest.raises(TritiumError, match="full"):
        await run(form(), request(input_ids=[[1], [65]], max_tokens=[[1], [40]]))


async def test_priorities_are_those_that_the_file_declares() -> None:
    one = form(batching=DynamicBatching(levels=3, default_level=2))
    for priority in (0, 1, 3, 9):
        asked = request(text_input=[["A"]], max_tokens=[[1]])
        asked.priority = priority
        await run(one, asked)
    assert [r.priority for r in one._backend.seen] == [0, -1, 1, 0]  # type: ignore[attr-defined]


async def test_a_timeout_is_a_deadline_in_the_queue() -> None:
    one = form()
    asked = request(text_input=[["A"]], max_tokens=[[1]])
    asked.timeout_us = 7
    await run(one, asked)
    assert one._backend.seen[0].queue_deadline_ns == 8000  # type: ignore[attr-defined]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "hold neither, expected one of text_input and input_ids"),
    ({"text_input": [["A"]], "input_ids": [[5]]}, "expected one of text_input and input_ids"),
    ({"text_input": [[""]]}, "text_input is empty"),
    ({"text_input": [[b"\xff"]]}, "text_input is not UTF-8"),
    ({"input_ids": [[5, -1]]}, "input_ids\\[1\\] is -1, expected a token id from 0 to 127"),
    ({"input_ids": [[5, 128]]}, "input_ids\\[1\\] is 128"),
    ({"input_ids": [[5] * 64]}, "input_ids has 64 tokens, expected fewer than the context of 64"),
    ({"input_ids": [[5]], "input_lengths": [[2]]}, "input_lengths is 2, expected 1 to 1"),
    ({"input_ids": [[5], [6], [7]], "max_tokens": [[2], [2]]}, "max_tokens has 2 rows, expected one per sequence"),
    ({"text_input": [["A"]], "temperature": [[float("nan")]]}, "temperature is nan"),
    ({"text_input": [["A"]], "max_tokens": [[0]]}, "max_tokens is 0"),
    ({"text_input": [["A"]], "max_tokens": [[1, 2]]}, "max_tokens has 2 values"),
    ({"text_input": [["A"]], "beam_width": [[2]]}, "beam_width is not 1"),
    ({"text_input": [["A"], ["B"]], "stream": [[True]]}, "stream is true for 2 sequences"),
    ({"text_input": [["A"]], "sampling_parameters": [["{"]]}, "sampling_parameters is not JSON"),
    ({"text_input": [["A"]], "sampling_parameters": [["[" * 30000]]}, "sampling_parameters is not JSON"),
    ({"text_input": [["A"]], "sampling_parameters": [["[]"]]}, "no JSON object"),
    ({"text_input": [["A"]], "sampling_parameters": [['{"best_of": 2}']]}, "'best_of' is not a sampling parameter"),
]


@pytest.mark.parametrize(("inputs", "text"), BAD)
async def test_bad_input_is_named(inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(TritiumError, match=text) as caught:
        await run(form(), request(**inputs))
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_declared_tensors_stay_and_the_standard_ones_follow() -> None:
    declared = TensorSpec("input_ids", DType.INT64, (-1,))
    config = complete_tensors(ModelConfig("m", None, inputs=(declared,)))
    assert config.inputs[0].dtype is DType.INT64
    assert config.inputs[0].optional
    assert {spec.name for spec in config.inputs} == set(STANDARD_INPUTS)
    assert {spec.name for spec in config.outputs} == set(STANDARD_OUTPUTS)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"inputs": (TensorSpec("image", DType.FP32, (3,)),)}, "input 'image' has no meaning for an LLM"),
        ({"outputs": (TensorSpec("logits", DType.FP32, (3,)),)}, "output 'logits' has no meaning"),
        ({"inputs": (TensorSpec("input_ids", DType.FP32, (3,)),)}, "input 'input_ids' has type FP32, expected INT32"),
    ],
)
def test_a_tensor_that_no_llm_has_is_refused_at_load(config: dict[str, Any], text: str) -> None:
    with pytest.raises(TritiumError, match=text):
        complete_tensors(ModelConfig("m", None, **config))
