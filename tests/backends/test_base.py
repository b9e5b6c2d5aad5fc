from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tritium.backends import BACKENDS, PLATFORMS, detect, find
from tritium.backends.base import Backend, LoadContext, TextBackend, Timing
from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.llm.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tritium.types import InferRequest, InferResponse


class Plain(Backend):
    """The least that a backend must be."""

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        yield InferResponse("", "", "")


class Seen:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.queued: list[float] = []
        self.first: list[float] = []
        self.inter: list[tuple[bool, int]] = []

    def observe_queue(self, seconds: float) -> None:
        self.queued.append(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        self.inter.append((seconds >= 0, count))


class Deltas:
    """An iterator that cannot be closed."""

    def __init__(self, *deltas: TokenDelta) -> None:
        self.left = list(deltas)

    def __aiter__(self) -> Deltas:
        return self

    async def __anext__(self) -> TokenDelta:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)


def delta(tokens: list[int], **rest: object) -> TokenDelta:
    return TokenDelta(id="a", tokens=tokens, **rest)  # type: ignore[arg-type]


def asked(arrived_ns: int = 0) -> GenerateRequest:
    return GenerateRequest(id="a", tokens=[1], params=SamplingParams(), arrived_ns=arrived_ns)


async def test_what_a_backend_need_not_say():
    config = ModelConfig("m", source=None)
    backend = Plain(LoadContext("m", "1", config))
    assert await backend.complete(config) is config
    assert backend.reason() == ""
    assert not isinstance(backend, TextBackend)


async def test_times_of_a_sequence():
    seen = Seen()
    timing = Timing(seen)
    deltas = Deltas(
        delta([]),
        delta([1], queue_ns=2_000_000_000, first_token_ns=5_000_000_000),
        delta([2, 3]),
        delta([], finish=FinishReason.STOP, exec_share=0.5),
    )
    assert len([d async for d in timing.watch(asked(1_000_000_000), deltas)]) == 4
    assert (seen.queued, seen.first, seen.inter) == ([2.0], [4.0], [(True, 2)])
    assert (timing.queue_ns, timing.executions) == (2_000_000_000, 0.5)


async def test_rows_add_up():
    timing = Timing()
    for queue_ns in (5, 9, 2):
        deltas = Deltas(delta([1], queue_ns=queue_ns), delta([2], finish=FinishReason.LENGTH, exec_share=0.25))
        async for _ in timing.watch(asked(), deltas):
            pass
    assert (timing.queue_ns, timing.executions) == (9, 0.75)


async def test_the_first_token_is_now_when_nobody_says():
    seen = Seen()
    async for _ in Timing(seen).watch(asked(arrived_ns=1 << 62), Deltas(delta([1]))):
        pass
    assert seen.first == [0.0]


async def test_closing_closes_what_is_watched():
    closed: list[bool] = []

    async def endless() -> AsyncIterator[TokenDelta]:
        try:
            while True:
                yield delta([1])
        finally:
            closed.append(True)

    watched = Timing().watch(asked(), endless())
    await anext(watched)
    await watched.aclose()
    assert closed == [True]


def test_the_aliases_of_the_language_models():
    assert {BACKENDS[name] for name in ("tritium", "tensorrtllm", "vllm")} == {"tritium.backends.llm:LlmBackend"}
    assert PLATFORMS["tensorrt_llm"] == "tensorrtllm"
    assert set(PLATFORMS.values()) <= set(BACKENDS)


def test_backends_are_found_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BACKENDS, "tensorrtllm", f"{__name__}:Plain")
    assert find("tensorrtllm", "nope", "m") is Plain
    assert find("", "tensorrt_llm", "m") is Plain
    for backend, platform, param in (
        ("nope", "", "backend"),
        ("", "nope", "platform"),
        ("nope", "tensorrt_llm", "backend"),
    ):
        with pytest.raises(TritiumError, match="unable to find backend library for backend 'nope'") as caught:
            find(backend, platform, "m")
        assert (caught.value.code, caught.value.param) == (Code.INVALID_ARGUMENT, param)
        assert caught.value.message.endswith(f"Backends here: {', '.join(BACKENDS)}")


def test_a_folder_that_is_not_there_tells_nothing(tmp_path: Path):
    assert detect(tmp_path / "gone") == ""
