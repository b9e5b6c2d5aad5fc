"""From what an engine answers to what a client reads: deltas become chunks, or one whole body.

``Deltas`` gathers the generations of one call, ``Choice`` keeps what each of them has said, and ``chunks``
and ``whole`` are the two ways to write it down; they share everything but the writing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, UnsetType

from tritium.errors import Code, TritiumError
from tritium.frontends.openai.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptDetails,
    Usage,
    encode,
    error_body,
)
from tritium.frontends.openai.chat import Call
from tritium.frontends.openai.logprobs import Entry, Ledger, Renderer
from tritium.llm.types import FinishReason, GenerateRequest, TokenDelta
from tritium.observability import logs

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_log = logs.get(__name__)


class ClientGone(Exception):
    """The client closed its connection."""


class Deltas:
    """The deltas of several generations, as they come; closing it closes all of them.

    Args:
        sources: one iterator per choice.
        receive: the ASGI channel of the request, whose body was read: it tells when the client leaves.
        keepalive_s: silence after which ``next`` gives an empty list, in seconds.
    """

    def __init__(
        self,
        sources: list[AsyncGenerator[TokenDelta]],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        keepalive_s: float,
    ) -> None:
        self._ready: deque[tuple[int, TokenDelta]] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._quiet_since = self._loop.time()
        self._due = False
        self._timer = self._loop.call_later(keepalive_s, self._tick)
        self._tasks = [asyncio.create_task(self._pump(i, source)) for i, source in enumerate(sources)]
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    async def next(self) -> list[tuple[int, TokenDelta]]:
        """All that came since the last call, with the index of its choice; [] after a long silence.

        Raises:
            TritiumError: a generation failed; what came before was given out.
            ClientGone: nobody reads any more.
        """
        while not self._ready and self._error is None and not self._due:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None and (not self._ready or isinstance(self._error, ClientGone)):
            raise self._error
        self._due = False
        self._quiet_since = self._loop.time()
        batch = list(self._ready)
        self._ready.clear()
        return batch

    async def aclose(self) -> None:
        """Ends every generation that still runs; returns when their iterators are closed."""
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, index: int, source: AsyncGenerator[TokenDelta]) -> None:
        try:
            async with aclosing(source):
                finished = False
                async for delta in source:
                    if delta.error is not None:
                        raise delta.error.exception()
                    if delta.finish is FinishReason.ERROR:
                        raise TritiumError(Code.INTERNAL, "the generation failed")
                    finished = delta.finish is not None
                    self._ready.append((index, delta))
                    self._arrived.set()
                if not finished:
                    raise TritiumError(Code.INTERNAL, "the generation ended without a reason")
        except TritiumError as error:
            self._fail(error)
        except Exception:
            _log.exception("a generation failed unexpectedly")
            self._fail(TritiumError(Code.INTERNAL, "the server failed to answer this request"))

    async def _watch(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientGone())

    def _fail(self, error: Exception) -> None:
        if self._error is None or isinstance(error, ClientGone):
            self._error = error
        self._arrived.set()

    def _tick(self) -> None:
        left = self._quiet_since + self._keepalive_s - self._loop.time()
        if left <= 0:
            self._due, left = True, self._keepalive_s
            self._arrived.set()
        self._timer = self._loop.call_later(left, self._tick)


class Choice:
    """One answer in the making."""

    def __init__(self, call: Call, index: int, request: GenerateRequest) -> None:
        self.index = index
        self.prompt_tokens = len(request.tokens)
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.begun = False
        self._ends = call.model.tokenizer.eos_token_ids
        self._ledger: Ledger | None = None
        if request.params.logprobs is not None:
            self._ledger = Ledger(call.model.tokenizer, request)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client asked for log-probabilities."""
        return self._ledger is not None

    def add(self, delta: TokenDelta) -> tuple[str, list[Entry]]:
        """The text that a delta adds, and what is known of its tokens when the client asked for it."""
        self.output_tokens += len(delta.tokens)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.finish is not None:
            self.finish = delta.finish.value
            # The model's own end is no reason worth telling, in vLLM neither.
            self.stop_reason = None if delta.stop_reason in self._ends else delta.stop_reason
        return delta.text, [] if self._ledger is None else self._ledger.add(delta)

    def usage(self) -> Usage:
        """The tokens of this answer alone, so far."""
        return _usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)


class Writer:
    """Writes one call's answers in the form of its route."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._renderer = Renderer(call.model.tokenizer)
        self.choices = [Choice(call, index, request) for index, request in enumerate(call.requests)]

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> Usage:
        """The tokens of the call: prompts once each, outputs of all choices."""
        firsts = self.choices[:: self._call.choices]
        return _usage(
            sum(choice.prompt_tokens for choice in firsts),
            sum(choice.output_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in firsts),
        )

    def events(self, batch: list[tuple[int, TokenDelta]]) -> bytes:
        """The chunks that these deltas make."""
        out: list[bytes] = []
        for index, delta in batch:
            choice = self.choices[index]
            text, entries = choice.add(delta)
            make = self._chat_chunks if self._call.chat else self._completion_chunks
            out += [self._chunk(made, choice) for made in make(choice, text, entries)]
        return b"".join(out)

    def ending(self) -> bytes:
        """What follows the last chunk with text."""
        if not self._call.include_usage:
            return DONE
        return _event(self._completion("chunk", [], self.usage())) + DONE

    def body(self, texts: list[str], entries: list[list[Entry]]) -> bytes:
        """The whole answer."""
        if self._call.chat:
            choices = [
                ChatChoice(c.index, ChatMessage(texts[c.index]), self._chat_logprobs(c, entries[c.index]), *_ending(c))
                for c in self.choices
            ]
        else:
            choices = [
                CompletionChoice(c.index, texts[c.index], self._logprobs(c, entries[c.index]), *_ending(c))
                for c in self.choices
            ]
        return encode(self._completion("whole", choices, self.usage()))

    def _chat_chunks(self, choice: Choice, text: str, entries: list[Entry]) -> list[ChatChunkChoice]:
        made: list[ChatChunkChoice] = []
        if not choice.begun:
            choice.begun = True
            made.append(ChatChunkChoice(choice.index, ChatDelta(role="assistant", content="")))
        if text or entries:
            made.append(ChatChunkChoice(choice.index, ChatDelta(content=text), self._chat_logprobs(choice, entries)))
        if choice.finish is not None:
            made.append(ChatChunkChoice(choice.index, ChatDelta(), None, *_ending(choice)))
        return made

    def _completion_chunks(self, choice: Choice, text: str, entries: list[Entry]) -> list[CompletionChoice]:
        logprobs = self._logprobs(choice, entries)
        if choice.finish is not None:
            return [CompletionChoice(choice.index, text, logprobs, *_ending(choice))]
        return [CompletionChoice(choice.index, text, logprobs)] if text or entries else []

    def _chat_logprobs(self, choice: Choice, entries: list[Entry]) -> ChatLogprobs | None:
        return self._renderer.chat(entries) if choice.wants_logprobs else None

    def _logprobs(self, choice: Choice, entries: list[Entry]) -> CompletionLogprobs | None:
        return self._renderer.completion(entries) if choice.wants_logprobs else None

    def _chunk(self, made: ChatChunkChoice | CompletionChoice, choice: Choice) -> bytes:
        usage: Usage | UnsetType | None = UNSET
        if self._call.include_usage:
            usage = choice.usage() if self._call.continuous_usage else None
        return _event(self._completion("chunk", [made], usage))

    def _completion(self, form: str, choices: list[Any], usage: Usage | UnsetType | None) -> Completion:
        call = self._call
        kind = "text_completion"
        if call.chat:
            kind = "chat.completion.chunk" if form == "chunk" else "chat.completion"
        return Completion(call.id, kind, call.created, call.model.name, choices, usage)


async def chunks(call: Call, deltas: Deltas, first: list[tuple[int, TokenDelta]]) -> AsyncGenerator[bytes]:
    """The server-sent events of a call.

    Args:
        first: what ``deltas`` gave already.

    Raises:
        ClientGone: nobody reads any more.
    """
    writer = Writer(call)
    batch = first
    try:
        while True:
            if events := writer.events(batch) if batch else KEEP_ALIVE:
                yield events
            if writer.done:
                break
            batch = await deltas.next()
    except TritiumError as error:
        _log.warning("a stream ended with an error", id=call.id, model=call.model.name, reason=error.message)
        yield b"data: " + error_body(error) + b"\n\n"
        return
    yield writer.ending()


async def whole(call: Call, deltas: Deltas, first: list[tuple[int, TokenDelta]]) -> bytes:
    """The body of a call that does not stream.

    Raises:
        TritiumError: a generation failed.
        ClientGone: nobody reads any more.
    """
    writer = Writer(call)
    texts: list[list[str]] = [[] for _ in call.requests]
    entries: list[list[Entry]] = [[] for _ in call.requests]
    batch = first
    while True:
        for index, delta in batch:
            text, found = writer.choices[index].add(delta)
            texts[index].append(text)
            entries[index] += found
        if writer.done:
            return writer.body(["".join(parts) for parts in texts], entries)
        batch = await deltas.next()


def _event(chunk: Completion) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def _ending(choice: Choice) -> tuple[str | None, int | str | None]:
    return choice.finish, choice.stop_reason


def _usage(prompt: int, output: int, cached: int) -> Usage:
    return Usage(prompt, output, prompt + output, PromptDetails(min(cached, prompt)))
