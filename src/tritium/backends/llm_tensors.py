"""An LLM as tensors: InferRequest to GenerateRequests, TokenDeltas to InferResponses.

Each model takes two sets of tensors: text (``text_input`` to ``text_output``, the names of vLLM's backend) and
tokens (``input_ids`` to ``output_ids``, those of TensorRT-LLM's).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from tritium.backends.base import TextBackend, Timing
from tritium.backends.config import ANY, DynamicBatching, ModelConfig, TensorSpec
from tritium.backends.llm_columns import Column, json_object, shorten
from tritium.backends.llm_settings import LlmSettings
from tritium.errors import TritiumError, invalid
from tritium.llm.params import is_sampling_field, make_params
from tritium.llm.types import GenerateRequest, SamplingParams, TokenDelta
from tritium.types import DType, InferRequest, InferResponse, Tensor

DEFAULT_MAX_TOKENS = 16
# Tokens that ``previous_ids`` holds at most: enough for the rest of a character, and for detokenizers that look back.
LOOK_BACK = 32

# Inputs with one value per sequence: name -> (datatype, sampling parameter that it is).
_SAMPLING_INPUTS: dict[str, tuple[DType, str]] = {
    "max_tokens": (DType.INT32, "max_tokens"),
    "request_output_len": (DType.INT32, "max_tokens"),
    "min_tokens": (DType.INT32, "min_tokens"),
    "min_length": (DType.INT32, "min_tokens"),
    "temperature": (DType.FP32, "temperature"),
    "top_k": (DType.INT32, "top_k"),
    "runtime_top_k": (DType.INT32, "top_k"),
    "top_p": (DType.FP32, "top_p"),
    "runtime_top_p": (DType.FP32, "top_p"),
    "min_p": (DType.FP32, "min_p"),
    "presence_penalty": (DType.FP32, "presence_penalty"),
    "frequency_penalty": (DType.FP32, "frequency_penalty"),
    "repetition_penalty": (DType.FP32, "repetition_penalty"),
    "seed": (DType.UINT64, "seed"),
    "random_seed": (DType.UINT64, "seed"),
    "end_id": (DType.INT32, "stop_token_ids"),
    "ignore_eos": (DType.BOOL, "ignore_eos"),
}
_FLAGS = ("stream", "streaming", "exclude_input_in_output")
_ONLY_ONE = ("beam_width",)


def _standard_inputs() -> dict[str, TensorSpec]:
    specs = [
        TensorSpec("text_input", DType.BYTES, (1,), optional=True),
        TensorSpec("input_ids", DType.INT32, (ANY,), optional=True),
        TensorSpec("input_lengths", DType.INT32, (1,), optional=True),
        TensorSpec("stop_words", DType.BYTES, (ANY,), optional=True),
        TensorSpec("stop", DType.BYTES, (ANY,), optional=True),
        TensorSpec("sampling_parameters", DType.BYTES, (1,), optional=True),
        TensorSpec("pad_id", DType.INT32, (1,), optional=True),
    ]
    specs += [TensorSpec(name, dtype, (1,), optional=True) for name, (dtype, _) in _SAMPLING_INPUTS.items()]
    specs += [TensorSpec(name, DType.BOOL, (1,), optional=True) for name in _FLAGS]
    specs += [TensorSpec(name, DType.INT32, (1,), optional=True) for name in _ONLY_ONE]
    return {spec.name: spec for spec in specs}


STANDARD_INPUTS = _standard_inputs()
STANDARD_OUTPUTS = {
    "text_output": TensorSpec("text_output", DType.BYTES, (1,)),
    "output_ids": TensorSpec("output_ids", DType.INT32, (ANY, ANY)),
    "sequence_length": TensorSpec("sequence_length", DType.INT32, (ANY,)),
    "finish_reason": TensorSpec("finish_reason", DType.BYTES, (1,)),
    "previous_ids": TensorSpec("previous_ids", DType.INT32, (ANY,)),
}


def complete_tensors(config: ModelConfig) -> ModelConfig:
    """Declared tensors as they are, all optional, and the standard ones behind them.

    Raises:
        TritiumError: INVALID_ARGUMENT for a declared tensor that an LLM has not, or of another kind of type.
    """
    for declared, standard, what in (
        (config.inputs, STANDARD_INPUTS, "input"),
        (config.outputs, STANDARD_OUTPUTS, "output"),
    ):
        for spec in declared:
            known = standard.get(spec.name)
            if known is None:
                raise invalid(
                    f"{what} '{spec.name}' has no meaning for an LLM, expected one of {', '.join(standard)}",
                    param=spec.name,
                )
            if _kind(spec.dtype) != _kind(known.dtype):
                raise invalid(
                    f"{what} '{spec.name}' has type {spec.dtype.value}, expected {known.dtype.value}", param=spec.name
                )
    names = {spec.name for spec in config.inputs}
    inputs = [replace(spec, optional=True) for spec in config.inputs]
    inputs += [spec for name, spec in STANDARD_INPUTS.items() if name not in names]
    names = {spec.name for spec in config.outputs}
    outputs = [*config.outputs, *(spec for name, spec in STANDARD_OUTPUTS.items() if name not in names)]
    return replace(config, inputs=tuple(inputs), outputs=tuple(outputs))


def _kind(dtype: DType) -> str:
    return "bytes" if dtype is DType.BYTES else dtype.numpy.kind.replace("u", "i")


@dataclass(slots=True)
class _Row:
    """One sequence of a request and what came of it.

    Attributes:
        before: the last tokens before ``tokens``, of the prompt or of earlier answers.
        finish: why the sequence ended; "" while it goes on.
    """

    prompt: str | None
    request: GenerateRequest
    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    before: list[int] = field(default_factory=list[int])
    finish: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    """An inference request, read."""

    rows: list[_Row]
    batched: bool
    stream: bool
    exclude_input: bool | None
    pad_id: int
    wanted: list[str]


class TensorForm:
    """How one loaded LLM reads and writes tensors.

    Args:
        backend: runs the sequences.
        config: the completed configuration; ``max_batch_size`` above 0 puts a batch dimension in front.
    """

    def __init__(self, backend: TextBackend, settings: LlmSettings, config: ModelConfig) -> None:
        self._backend = backend
        self._settings = settings
        self._batched = config.max_batch_size > 0
        declared = config.output("output_ids")
        self._batching = config.batching
        self._flat_output = declared is not None and len(declared.dims) == 1

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncGenerator[InferResponse]:
        """One answer, or one per step when the request says ``stream``; the last one is final."""
        begun = time.monotonic_ns()
        job = await asyncio.to_thread(self._read, request)
        timing.input_ns += time.monotonic_ns() - begun
        if not job.stream:
            await self._run_all(job.rows, timing)
            begun = time.monotonic_ns()
            answer = self._answer(request, job, job.rows)
            timing.output_ns += time.monotonic_ns() - begun
            yield answer
            return
        row = job.rows[0]
        before = row.before
        async with aclosing(timing.watch(row.request, self._backend.generate(row.request))) as deltas:
            async for delta in deltas:
                piece = _Row(row.prompt, row.request, before=before)
                _extend(piece, delta)
                before = (before + delta.tokens)[-LOOK_BACK:]
                answer = self._answer(request, job, [piece])
                answer.final = delta.finish is not None
                yield answer

    async def _run_all(self, rows: list[_Row], timing: Timing) -> None:
        """All sequences at once; the first error ends the others and is the request's."""
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(self._run(row, timing))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, row: _Row, timing: Timing) -> None:
        async with aclosing(timing.watch(row.request, self._backend.generate(row.request))) as deltas:
            async for delta in deltas:
                _extend(row, delta)

    # -- reading ------------------------------------------------------------------------------------------

    def _read(self, request: InferRequest) -> _Job:
        inputs = {name: Column(tensor, self._batched) for name, tensor in request.inputs.items()}
        given = [name for name in ("text_input", "input_ids") if name in inputs]
        if len(given) != 1:
            raise invalid(f"the inputs hold {given or 'neither'}, expected one of text_input and input_ids")
        if "beam_width" in inputs and any(inputs["beam_width"].numbers(row) != [1] for row in inputs["beam_width"]):
            raise invalid("beam_width is not 1, expected 1: beam search is not supported", param="beam_width")
        rows = [self._row(request, inputs, given[0], index) for index in inputs[given[0]]]
        stream = any(name in inputs and inputs[name].flag() for name in ("stream", "streaming"))
        if stream and len(rows) != 1:
            raise invalid(f"stream is true for {len(rows)} sequences, expected one per request", param="stream")
        exclude = self._settings.exclude_input
        if "exclude_input_in_output" in inputs:
            exclude = inputs["exclude_input_in_output"].flag()
        pad_id = next(iter(self._backend.tokenizer.eos_token_ids), 0)
        if "pad_id" in inputs:
            pad_id = int(inputs["pad_id"].numbers(0)[0])
        default = {"text_input": ["text_output"], "input_ids": ["output_ids", "sequence_length"]}[given[0]]
        wanted = [output.name for output in request.outputs] or default
        return _Job(rows, self._batched, stream, exclude, pad_id, wanted)

    def _row(self, request: InferRequest, inputs: Mapping[str, Column], source: str, index: int) -> _Row:
        prompt: str | None = None
        if source == "text_input":
            prompt = inputs[source].text(index)
            self._check_size(prompt, source)
            tokens = self._backend.tokenizer.encode(prompt)
        else:
            tokens = [int(t) for t in inputs[source].numbers(index)]
            if "input_lengths" in inputs:
                tokens = shorten(tokens, int(inputs["input_lengths"].numbers(index)[0]))
        self._check(tokens, source)
        params = self._params(request, inputs, index)
        if params.seed is not None and len(inputs["seed" if "seed" in inputs else source]) == 1:
            params.seed += index
        deadline = request.arrived_ns + request.timeout_us * 1000 if request.timeout_us else None
        suffix = f"/{index}" if index else ""
        generate = GenerateRequest(
            id=f"{request.id or 'infer'}/{request.arrived_ns:x}{suffix}",
            tokens=tokens,
            params=params,
            arrived_ns=request.arrived_ns,
            priority=self._class_number(request.priority),
            tenant=request.tenant,
            queue_deadline_ns=deadline,
        )
        return _Row(prompt, generate, before=tokens[-LOOK_BACK:])

    def _class_number(self, priority: int) -> int:
        """Lower runs first, 0 is the default; Triton's 1 is the highest; undeclared levels do not count."""
        if not isinstance(self._batching, DynamicBatching) or not 1 <= priority <= self._batching.levels:
            return 0
        return priority - (self._batching.default_level or self._batching.levels)

    def _check_size(self, text: str, source: str) -> None:
        """Refuses a text that cannot fit before its tokenization, which would take long."""
        if len(text) > self._backend.max_length:
            at_least = len(text.encode()) // self._backend.tokenizer.longest_token
            if at_least >= self._backend.max_length:
                raise self._too_long(source, f"at least {at_least}")

    def _too_long(self, source: str, length: str) -> TritiumError:
        return invalid(
            f"{source} has {length} tokens, expected fewer than the context of {self._backend.max_length}",
            param=source,
            reason="context_length_exceeded",
        )

    def _check(self, tokens: list[int], source: str) -> None:
        if not tokens:
            raise invalid(f"{source} is empty, expected at least one token", param=source)
        for position, token in enumerate(tokens):
            if not 0 <= token < self._backend.vocab_size:
                raise invalid(
                    f"{source}[{position}] is {token}, expected a token id from 0 to {self._backend.vocab_size - 1}",
                    param=source,
                )
        if len(tokens) >= self._backend.max_length:
            raise self._too_long(source, str(len(tokens)))

    def _params(self, request: InferRequest, inputs: Mapping[str, Column], index: int) -> SamplingParams:
        given: dict[str, Any] = {k: v for k, v in request.parameters.items() if is_sampling_field(k)}
        if "sampling_parameters" in inputs:
            given.update(json_object(inputs["sampling_parameters"].text(index)))
        for name in _SAMPLING_INPUTS.keys() & inputs.keys():
            value = inputs[name].numbers(index)
            if len(value) != 1:
                raise invalid(f"{name} has {len(value)} values for a sequence, expected 1", param=name)
            given[name] = value[0]
        for name in ("stop_words", "stop"):
            if name in inputs:
                given[name] = [text for text in inputs[name].texts(index) if text]
        params = make_params(given, self._backend.sampling_defaults, vocab_size=self._backend.vocab_size)
        if params.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
        return params

    # -- writing ------------------------------------------------------------------------------------------

    def _answer(self, request: InferRequest, job: _Job, rows: list[_Row]) -> InferResponse:
        alias = self._settings.alias
        whole = not job.stream
        ids_with_prompt = whole and not (alias != "tensorrtllm" if job.exclude_input is None else job.exclude_input)
        text_with_prompt = whole and not (alias != "vllm" if job.exclude_input is None else job.exclude_input)
        answer = InferResponse(request.model, request.version, request.id)
        for name in job.wanted:
            if name == "text_output":
                texts = [((row.prompt or "") if text_with_prompt else "") + row.text for row in rows]
                shape = (len(rows), 1) if job.batched else (len(rows),)
                answer.outputs.append(Tensor.from_strings(name, [t.encode() for t in texts], shape))
                continue
            if name == "finish_reason":
                shape = (len(rows), 1) if job.batched else (len(rows),)
                answer.outputs.append(Tensor.from_strings(name, [row.finish.encode() for row in rows], shape))
                continue
            ids = [(row.request.tokens if ids_with_prompt else []) + row.tokens for row in rows]
            if name == "output_ids":
                array = self._ids(ids, job.pad_id)
            elif name == "previous_ids":
                array = _right_aligned([[] if ids_with_prompt else row.before for row in rows])
            else:
                array = _lengths(ids)
            answer.outputs.append(Tensor.from_numpy(name, array if job.batched else array[0]))
        return answer

    def _ids(self, ids: list[list[int]], pad_id: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """[batch, beams, length], or [batch, length] where the configuration declares one dimension."""
        array = np.full((len(ids), max(map(len, ids))), pad_id, dtype=np.int32)
        for row, tokens in zip(array, ids, strict=True):
            row[: len(tokens)] = tokens
        return array if self._flat_output else array[:, None, :]


def _extend(row: _Row, delta: TokenDelta) -> None:
    row.tokens += delta.tokens
    row.text += delta.text
    if delta.finish is not None:
        row.finish = delta.finish.value


def _lengths(ids: list[list[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([[len(tokens)] for tokens in ids], dtype=np.int32)


def _right_aligned(ids: list[list[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[batch, longest row]; what a row lacks in front is -1, which is no token."""
    array = np.full((len(ids), max(map(len, ids))), -1, dtype=np.int32)
    for row, tokens in zip(array, ids, strict=True):
        row[len(row) - len(tokens) :] = tokens
    return array
