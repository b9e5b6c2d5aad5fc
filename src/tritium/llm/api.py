"""The engine for scripts: no server, blocking calls, tokens and text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from tritium.errors import TritiumError, invalid
from tritium.llm.checkpoint import read_metadata
from tritium.llm.client import EngineClient
from tritium.llm.config import EngineConfig
from tritium.llm.models.families import resolve
from tritium.llm.names import find_model
from tritium.llm.params import make_params
from tritium.llm.tokenizer import load_tokenizer
from tritium.llm.types import EngineInfo, GenerateRequest, SamplingParams, TokenDelta, TokenLogprob

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or stop token id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and what the model made of it.

    Attributes:
        prompt: the text, None when token ids were given.
        cached_tokens: prompt tokens that came from the prefix cache.
        first_token_s: seconds from submission to the first token.
        elapsed_s: seconds from submission to the end.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int
    first_token_s: float
    elapsed_s: float


class LLM:
    """A model to call from a script; the engine runs in a process of its own.

    Args:
        model: a checkpoint folder, a GGUF file, or a name such as ``smollm2``.
        settings: fields of ``EngineConfig``.

    Raises:
        TritiumError: the model cannot be found or loaded, or a setting is unknown.

    Example:
        >>> llm = LLM("smollm2")
        >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        path = find_model(str(model))
        known = {f.name for f in fields(EngineConfig)} - {"model"}
        for name in settings:
            if name not in known:
                raise invalid(f"'{name}' is not a setting of the engine, expected one of {sorted(known)}", param=name)
        config = EngineConfig(model=str(path), **settings).checked()
        metadata = read_metadata(path)
        self.tokenizer = load_tokenizer(metadata)
        self._vocab_size = resolve(metadata).vocab
        self._client = EngineClient(config, self.tokenizer, name=str(model))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tritium-llm", daemon=True)
        self._thread.start()
        self._number = 0
        try:
            self.info: EngineInfo = self._wait(self._client.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, batched as the engine sees fit.

        Args:
            prompts: texts or lists of token ids; one alone is taken as a list of one.
            params: for all of them, or one each.

        Raises:
            TritiumError: a prompt or a sampling value is wrong; nothing has run then.
        """
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise invalid(f"{len(each)} sampling parameters for {len(batch)} prompts", param="params")
        requests = [self._request(prompt, p) for prompt, p in zip(batch, each, strict=True)]

        async def run() -> list[RequestOutput]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(*pair)) for pair in zip(batch, requests, strict=True)]
            return [task.result() for task in tasks]

        try:
            return self._wait(run())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """Answers a conversation, ``[{"role": "user", "content": "..."}, ...]``, through the chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], params)[0]

    def stream(self, prompt: Prompt | list[dict[str, Any]], params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the text of one answer as it comes; leaving the loop early stops the engine's work on it.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.tokenizer.encode_chat([dict(m) for m in prompt if isinstance(m, Mapping)])
        request = self._request(prompt, params or SamplingParams())  # pyright: ignore[reportArgumentType]
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()

        async def run() -> None:
            try:
                async for delta in self._client.generate(request):
                    pieces.put(delta.text)
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                if piece:
                    yield piece
        finally:
            task.cancel()

    def close(self) -> None:
        """Ends the engine."""
        if self._loop.is_running():
            self._wait(self._client.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerateRequest:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt, self._vocab_size)
        if not tokens:
            raise invalid("a prompt is empty, expected at least one token", param="prompt")
        if len(tokens) >= self.info.max_length:
            raise invalid(
                f"a prompt has {len(tokens)} tokens, expected fewer than the context of {self.info.max_length}",
                param="prompt",
                reason="context_length_exceeded",
            )
        checked = make_params(msgspec.structs.asdict(params), vocab_size=self._vocab_size)
        self._number += 1
        return GenerateRequest(
            id=f"script-{self._number}", tokens=tokens, params=checked, arrived_ns=time.monotonic_ns()
        )

    async def _answer(self, prompt: Prompt, request: GenerateRequest) -> RequestOutput:
        begun = time.monotonic_ns()
        text, tokens, logprobs, first_ns = "", [], [], 0
        last: TokenDelta | None = None
        async for delta in self._client.generate(request):
            text += delta.text
            tokens += delta.tokens
            logprobs += delta.logprobs or []
            first_ns = first_ns or delta.first_token_ns
            last = delta
        assert last is not None and last.finish is not None
        wanted = logprobs if request.params.logprobs is not None else None
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.tokens,
            outputs=[Completion(0, text, tokens, wanted, last.finish.value, last.stop_reason)],
            cached_tokens=last.cached_tokens,
            first_token_s=(first_ns - begun) / 1e9,
            elapsed_s=(time.monotonic_ns() - begun) / 1e9,
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]  # pyright: ignore[reportReturnType]
    return items  # pyright: ignore[reportReturnType]


def _token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """A prompt that is no text; integers of numpy and torch will do."""
    if not isinstance(prompt, Iterable):
        raise invalid(f"a prompt is {prompt!r}, expected a text or a list of token ids", param="prompt")
    found: list[int] = []
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= index(token) < vocab_size:
            raise invalid(
                f"prompt[{position}] is {token!r}, expected a token id from 0 to {vocab_size - 1}", param="prompt"
            )
        found.append(index(token))
    return found


__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams", "TritiumError"]
