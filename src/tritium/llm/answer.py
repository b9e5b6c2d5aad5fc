"""One request's answer on its way to the reader: tokens become text, stop strings end it."""

from __future__ import annotations

import asyncio

import msgspec

from tritium.errors import TritiumError
from tritium.llm.stops import StopMatcher
from tritium.llm.tokenizer import Tokenizer
from tritium.llm.types import FinishReason, GenerateRequest, TokenDelta, to_wire


class Answer:
    """A request in flight: what came for it and was not read yet."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self.crashes = 0
        self.answered = False
        self._detokenizer = tokenizer.detokenizer(request.tokens, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include=params.include_stop)
        self._hidden = frozenset() if params.include_stop else frozenset(params.stop_token_ids)
        self._count = 0
        self._pending: TokenDelta | None = None
        self._arrived = asyncio.Event()

    async def next(self) -> TokenDelta:
        """Everything that came since the last call, as one delta."""
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._pending = self._pending, None
        assert delta is not None
        return delta

    def push(self, delta: TokenDelta) -> bool:
        """Adds text to a delta and leaves it for the reader; whether a stop string ended the request."""
        self.answered = self.answered or bool(delta.tokens)
        ended = self._fill_text(delta) if delta.error is None else False
        self._pending = delta if self._pending is None else join(self._pending, delta)
        self._arrived.set()
        return ended

    def fail(self, error: TritiumError) -> None:
        """Ends the request with an error."""
        self.push(TokenDelta(id=self.request.id, tokens=[], finish=FinishReason.ERROR, error=to_wire(error)))

    def _fill_text(self, delta: TokenDelta) -> bool:
        tokens = delta.tokens
        if delta.finish is FinishReason.STOP and tokens and tokens[-1] in self._hidden:
            tokens = tokens[:-1]
        text = ""
        for position, token in enumerate(tokens):
            self._count += 1
            piece = self._detokenizer.push([token])
            if self._count < self.request.params.min_tokens:
                text += self._stops.flush() + piece
                continue
            sent, stop = self._stops.push(piece)
            text += sent
            if stop is not None:
                self._cut(delta, position + 1, text, stop)
                return True
        if delta.finish is not None:
            sent, stop = self._stops.push(self._detokenizer.flush())
            text += sent
            if stop is not None:
                self._cut(delta, len(tokens), text, stop)
                return False
            text += self._stops.flush()
        delta.text = text
        return False

    @staticmethod
    def _cut(delta: TokenDelta, count: int, text: str, stop: str) -> None:
        delta.tokens = delta.tokens[:count]
        delta.logprobs = delta.logprobs[:count] if delta.logprobs is not None else None
        delta.text, delta.stop_reason, delta.finish = text, stop, FinishReason.STOP


def join(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two deltas of one request, read as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return msgspec.structs.replace(
        second,
        tokens=first.tokens + second.tokens,
        logprobs=logprobs,
        text=first.text + second.text,
    )
