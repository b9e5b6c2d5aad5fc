"""A stream says what the whole answer says, whatever the deltas look like."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontends.openai.fake import FakeModel, FakeServer
from tritium.errors import Code, TritiumError
from tritium.frontends.openai.chat import Call, Preparer
from tritium.frontends.openai.schema import ChatRequest, CompletionRequest, decode
from tritium.frontends.openai.stream import Deltas, chunks, whole
from tritium.llm.types import FinishReason, TokenDelta, WireError


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def prepare(body: dict[str, Any], server: FakeServer) -> Call:
    kind = ChatRequest if "messages" in body else CompletionRequest
    return Preparer().prepare(decode(json.dumps(body).encode(), kind), server.models[0], time.monotonic_ns())  # type: ignore[arg-type]


async def run(body: dict[str, Any], burst: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole body, and the events of the stream."""
    server = FakeServer(burst=burst, models=[FakeModel(max_length=2048)])
    found: list[Any] = []
    for stream in (False, True):
        call = prepare(body | {"stream": stream}, server)
        deltas = Deltas([server.generate("fake", "1", one) for one in call.requests], never, 10)
        if stream:
            found.append(b"".join([event async for event in chunks(call, deltas, [])]).decode())
        else:
            found.append(json.loads(await whole(call, deltas, [])))
        await deltas.aclose()
    events = [line.removeprefix("data: ") for line in found[1].split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert not server.open
    assert server.aborted == 0
    return found[0], [json.loads(event) for event in events]


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


def assembled(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [
        {"text": "", "finish": None, "logprobs": None, "ended": False} for _ in range(count)
    ]
    for event in events:
        for part in event["choices"]:
            choice = choices[part["index"]]
            assert not choice["ended"]
            choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
            if part["logprobs"] is not None:
                logprobs = choice["logprobs"] = choice["logprobs"] or {}
                for key, value in part["logprobs"].items():
                    logprobs[key] = logprobs.get(key, []) + value if key in LISTS else value
            if part["finish_reason"] is not None:
                choice["finish"], choice["ended"] = (part["finish_reason"], part["stop_reason"]), True
    return choices


BODIES = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 80),
        "seed": st.integers(0, 10**6),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "stop": st.sampled_from([None, "the", ["ck f", "o w"], "介", "绍", "🦊", "ï", ["\ufffd"], "zzz"]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 1),
    }
)


@settings(max_examples=50, deadline=None)
@given(body=BODIES, chat=st.booleans(), logprobs=st.sampled_from([None, 0, 2]), burst=st.integers(1, 9))
async def test_a_stream_joins_to_the_whole(body: dict[str, Any], chat: bool, logprobs: int | None, burst: int) -> None:
    if chat:
        body = body | {"messages": [{"role": "user", "content": "hi"}]}
        body |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    else:
        body = body | {"prompt": ["one", "two"], "logprobs": logprobs}
    answer, events = await run(body, burst)
    choices = assembled(events, len(answer["choices"]))
    for part, choice in zip(answer["choices"], choices, strict=True):
        text = part["message"]["content"] if chat else part["text"]
        assert choice["text"] == text
        assert choice["finish"] == (part["finish_reason"], part["stop_reason"])
        if logprobs is None:
            assert part["logprobs"] is None
            assert choice["logprobs"] is None
            continue
        expected = part["logprobs"]
        assert (choice["logprobs"] or {key: [] if key in LISTS else None for key in expected}) == expected
        if chat:
            raw = b"".join(bytes(one["bytes"] or []) for one in expected["content"])
            # A character that the stop string cut leaves its first bytes behind.
            assert raw.decode(errors="replace").rstrip("\ufffd") == text.rstrip("\ufffd")
        else:
            assert "".join(expected["tokens"]) == text
            assert expected["text_offset"] == [
                len("".join(expected["tokens"][:i])) for i in range(len(expected["tokens"]))
            ]


async def test_choices_interleave() -> None:
    _, events = await run({"prompt": "x", "n": 3, "max_tokens": 30, "ignore_eos": True, "seed": 1}, 1)
    order = [event["choices"][0]["index"] for event in events]
    assert sorted(set(order)) == [0, 1, 2]
    assert order != sorted(order)


async def test_a_chat_stream_begins_each_choice_with_its_role() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 9}
    _, events = await run(body | {"stream_options": None}, 2)
    for index in (0, 1):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert all("role" not in one["delta"] for one in own[1:])
        assert all("usage" not in event for event in events)


async def test_invalid_bytes_do_not_break_an_answer() -> None:
    """Byte tokens that make no character (C53): U+FFFD in the text, exact in ``bytes``."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True, "logprobs": True}
    for seed in range(60):
        answer, _ = await run(body | {"seed": seed}, 1)
        content = answer["choices"][0]["logprobs"]["content"]
        if "\ufffd" in answer["choices"][0]["message"]["content"]:
            assert any(entry["token"].startswith("\\x") for entry in content)
            return
    raise AssertionError("no seed cut a character")


async def deltas_of(*deltas: TokenDelta) -> AsyncGenerator[TokenDelta]:
    for delta in deltas:
        yield delta


def of(tokens: list[int], **more: Any) -> TokenDelta:
    return TokenDelta(id="r", tokens=tokens, text="x" * len(tokens), **more)


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (
            [of([], finish=FinishReason.ERROR, error=WireError(Code.UNAVAILABLE, "it was lost"))],
            Code.UNAVAILABLE,
            "lost",
        ),
        ([of([], finish=FinishReason.ERROR)], Code.INTERNAL, "failed"),
        ([], Code.INTERNAL, "without a reason"),
    ],
)
async def test_however_a_generation_fails_what_came_before_is_given_out(
    last: list[TokenDelta], code: Code, said: str
) -> None:
    deltas = Deltas([deltas_of(of([1]), *last)], never, 10)
    assert [(index, delta.tokens) for index, delta in await deltas.next()] == [(0, [1])]
    with pytest.raises(TritiumError, match=said) as caught:
        await deltas.next()
    assert caught.value.code is code
    await deltas.aclose()


async def test_one_failure_ends_all_choices() -> None:
    server = FakeServer(first_s=30)
    call = prepare({"prompt": "x", "n": 2}, server)
    sources = [server.generate("fake", "1", one) for one in call.requests]
    deltas = Deltas([*sources, deltas_of()], never, 10)
    with pytest.raises(TritiumError):
        await deltas.next()
    assert len(server.open) == 2
    await deltas.aclose()
    assert not server.open


async def test_an_aborted_answer_says_so() -> None:
    call = prepare({"prompt": "x"}, FakeServer())
    deltas = Deltas([deltas_of(of([1]), of([], finish=FinishReason.ABORT))], never, 10)
    assert json.loads(await whole(call, deltas, []))["choices"][0]["finish_reason"] == "abort"
    await deltas.aclose()
