"""A server with the methods that the OpenAI routes call; its tokens are a function of prompt and seed."""

from __future__ import annotations

import asyncio
import codecs
import random
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

import msgspec

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.answer import Answer
from tritium.llm.types import FinishReason, GenerateRequest, TokenDelta, TokenLogprob

WORDS = ["Hello", " world", " the", " quick", " fox", "\n", " 介", "绍", "🦊", " naïve", " fin", "!"]
END, TURN = 256 + len(WORDS), 257 + len(WORDS)
SPECIAL = {END: "<|end|>", TURN: "<|turn|>"}


class FakeDetokenizer:
    def __init__(self, tokenizer: FakeTokenizer, skip: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(self._bytes(i) for i in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in SPECIAL and self._skip else self._tokenizer.id_to_bytes(token)


class FakeTokenizer:
    """256 bytes, a few words (with half a character at the end of some), two special tokens."""

    vocab_size = 258 + len(WORDS)
    eos_token_ids = (END,)
    bos_token_id = None

    @property
    def longest_token(self) -> int:
        return max(len(self.id_to_bytes(token)) for token in range(self.vocab_size))

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        assert not allow_special
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [TURN, *self.encode(message["role"] + "\n" + message["content"]), END]
        return [*ids, TURN, *self.encode("assistant\n")]

    def id_to_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return SPECIAL[token].encode() if token in SPECIAL else WORDS[token - 256].encode()

    def token_text(self, token: int) -> str:
        return self.id_to_bytes(token).decode(errors="replace")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        one = FakeDetokenizer(self, skip_special_tokens)
        return one.push(ids) + one.flush()

    def detokenizer(self, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> FakeDetokenizer:
        return FakeDetokenizer(self, skip_special_tokens)


@dataclass(frozen=True)
class FakeModel:
    name: str = "fake"
    version: str = "1"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    max_length: int = 256
    vocab_size: int = FakeTokenizer.vocab_size
    sampling_defaults: dict[str, object] = field(default_factory=dict)
    created_s: int = 1_700_000_000


def tokens_of(request: GenerateRequest) -> list[int]:
    """What the fake model answers; characters of several bytes come whole or byte by byte."""
    params = request.params
    draw = random.Random(repr((request.tokens, None if params.greedy else params.seed)))
    ids: list[int] = []
    assert params.max_tokens is not None
    while len(ids) < params.max_tokens:
        if draw.random() < 0.05 and not params.ignore_eos and len(ids) >= params.min_tokens:
            return [*ids, END]
        word = draw.randrange(len(WORDS))
        ids += list(WORDS[word].encode()) if draw.random() < 0.4 else [256 + word]
    return ids[: params.max_tokens]


def logprob_of(token: int, count: int) -> TokenLogprob:
    top = [((token + i) % FakeTokenizer.vocab_size, -0.5 - i) for i in range(count)]
    return TokenLogprob(token, -0.5, top)


@dataclass
class FakeServer:
    """Knobs say how it behaves; ``open`` are the ids of requests whose iterators are not closed."""

    models: list[FakeModel] = field(default_factory=lambda: [FakeModel()])
    step_s: float = 0.0
    first_s: float = 0.0
    fail_after: int | None = None
    refuse: TritiumError | None = None
    burst: int = 3
    open: set[str] = field(default_factory=set)
    aborted: int = 0
    seen: list[GenerateRequest] = field(default_factory=list)

    def llm_names(self) -> list[str]:
        return [model.name for model in self.models]

    def text_model(self, name: str, version: str = "") -> FakeModel:
        if name == "tensors":
            raise invalid("model 'tensors' is not a language model")
        for model in self.models:
            if model.name == name:
                return model
        raise TritiumError(Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found")

    async def generate(self, name: str, version: str, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        assert self.text_model(name).version == version
        self.seen.append(request)
        self.open.add(request.id)
        finished = False
        try:
            async for delta in self._deltas(request):
                finished = delta.finish is not None
                yield delta
        finally:
            self.open.remove(request.id)
            self.aborted += not finished

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        if self.refuse is not None:
            raise self.refuse
        params = request.params
        ends = [] if params.ignore_eos else [END]
        told = msgspec.structs.replace(
            request, params=msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, *ends])
        )
        answer = Answer(told, FakeTokenizer())  # pyright: ignore[reportArgumentType]
        ids, sizes = tokens_of(request), random.Random(request.id.rpartition("-")[2])
        await asyncio.sleep(self.first_s)
        at = 0
        while at < len(ids):
            if self.fail_after is not None and at >= self.fail_after:
                raise TritiumError(Code.UNAVAILABLE, "the engine was lost while it answered", retry_after_s=1)
            size = sizes.randint(1, self.burst)
            ended = answer.push(self._delta(request, ids, at, at + size))
            delta = await answer.next()
            yield delta
            if ended or delta.finish is not None:
                return
            at += size
            await asyncio.sleep(self.step_s)

    def _delta(self, request: GenerateRequest, ids: list[int], start: int, end: int) -> TokenDelta:
        new = ids[start:end]
        delta = TokenDelta(id=request.id, tokens=new, cached_tokens=min(4, len(request.tokens) - 1))
        if request.params.logprobs is not None:
            delta.logprobs = [logprob_of(token, request.params.logprobs) for token in new]
        if end >= len(ids):
            delta.finish = FinishReason.LENGTH
            if ids[-1] == END and not request.params.ignore_eos:
                delta.finish, delta.stop_reason = FinishReason.STOP, END
        return delta
