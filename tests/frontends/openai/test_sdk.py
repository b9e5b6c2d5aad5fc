"""The official SDK against a live server: sync, async, streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.frontends.openai.conftest import Live
from tests.frontends.openai.fake import END, FakeModel, FakeTokenizer, tokens_of
from tritium.errors import Code, TritiumError

ASK = [{"role": "user", "content": "Say something"}]


@pytest.fixture
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=20) as one:
        yield one


def visible(live: Live, index: int = 0) -> str:
    """What the fake model answered to its request number ``index``, as text."""
    ids = tokens_of(live.server.seen[index])
    return FakeTokenizer().decode(ids)


def test_a_chat_is_answered(client: OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(model="fake", messages=ASK, max_tokens=40, seed=3)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert choice.message.role == "assistant"
    assert choice.message.content == visible(live)
    ids = tokens_of(live.server.seen[0])
    assert choice.finish_reason == ("stop" if ids[-1] == END else "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.prompt_tokens == len(live.server.seen[0].tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_a_chat_streams_role_text_end_and_usage(client: OpenAI, live: Live) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=ASK, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1] if c.choices[0].delta.role] == []
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == visible(live)
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens_of(live.server.seen[0]))
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_goes_along_when_asked_for(client: OpenAI) -> None:
    stream = client.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=20,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == counts[-2]


def test_a_completion_is_answered(client: OpenAI, live: Live) -> None:
    answer = client.completions.create(model="fake", prompt="Once upon", max_tokens=30)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == visible(live)


def test_a_completion_has_sixteen_tokens_when_nothing_is_said(client: OpenAI, live: Live) -> None:
    client.completions.create(model="fake", prompt="Once", extra_body={"ignore_eos": True})
    assert live.server.seen[0].params.max_tokens == 16


def test_several_prompts_and_choices_come_by_index(client: OpenAI, live: Live) -> None:
    prompts = ["one", "two"]
    answer = client.completions.create(model="fake", prompt=prompts, n=2, max_tokens=12, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [r.params.seed for r in live.server.seen] == [5, 6, 5, 6]
    assert [bytes(r.tokens).decode() for r in live.server.seen] == ["one", "one", "two", "two"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    assert len({r.id for r in live.server.seen}) == 4

    stream = client.completions.create(model="fake", prompt=prompts, n=2, max_tokens=12, seed=5, stream=True)
    texts = ["", "", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in answer.choices]


def test_token_ids_are_prompts(client: OpenAI, live: Live) -> None:
    client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=2)
    client.completions.create(model="fake", prompt=[[4, 5], [6]], max_tokens=2)
    assert [r.tokens for r in live.server.seen] == [[1, 2, 3], [4, 5], [6]]


def test_chat_logprobs_join_to_the_text(client: OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=ASK, max_tokens=60, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 60
    joined = b"".join(bytes(one.bytes or []) for one in logprobs.content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in logprobs.content)


def test_completion_logprobs_join_to_the_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="abc", max_tokens=60, logprobs=2, extra_body={"ignore_eos": True}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert "".join(tokens) == choice.text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_a_stop_string_never_shows(client: OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="x", max_tokens=80, extra_body={"ignore_eos": True}).choices[
        0
    ]
    stop = whole.text[20:23]
    expected = whole.text[: whole.text.index(stop)]
    cut = client.completions.create(
        model="fake", prompt="x", max_tokens=80, stop=stop, logprobs=1, extra_body={"ignore_eos": True}
    ).choices[0]
    assert cut.text == expected
    assert cut.finish_reason == "stop"
    assert cut.model_extra is not None
    assert cut.model_extra["stop_reason"] == stop
    assert cut.logprobs is not None
    assert "".join(cut.logprobs.tokens or []) == expected
    kept = client.completions.create(
        model="fake",
        prompt="x",
        max_tokens=80,
        stop=stop,
        extra_body={"ignore_eos": True, "include_stop_str_in_output": True},
    ).choices[0]
    assert kept.text == expected + stop


async def test_async_and_streams_at_once(live: Live) -> None:
    async with AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:

        async def whole(seed: int) -> str:
            answer = await client.chat.completions.create(model="fake", messages=ASK, max_tokens=30, seed=seed)
            return answer.choices[0].message.content or ""

        async def streamed(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="fake", messages=ASK, max_tokens=30, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        wholes = await asyncio.gather(*(whole(seed) for seed in range(8)))
        streams = await asyncio.gather(*(streamed(seed) for seed in range(8)))
    assert wholes == streams
    assert len(set(wholes)) > 4


def test_models_are_listed(client: OpenAI, live: Live) -> None:
    live.server.models.append(FakeModel("org/second"))
    assert [model.id for model in client.models.list()] == ["fake", "org/second"]
    model = client.models.retrieve("org/second")
    assert model.created == 1_700_000_000
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


@pytest.mark.parametrize("name", ["nope", "", "../x", "a/../b", "\x00", "fаke", "x" * 2**19, "tensors"])
def test_an_unknown_model_is_404(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=name, messages=ASK)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert len(caught.value.body["message"]) < 512  # type: ignore[index]


def test_a_prompt_that_is_too_long_names_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"256 tokens.*330 tokens \(300 in the prompt, 30") as caught:
        client.completions.create(model="fake", prompt=[7] * 300, max_tokens=30)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at least") as caught:
        client.completions.create(model="fake", prompt="a" * 2**19)
    assert caught.value.code == "context_length_exceeded"


def test_the_id_is_the_clients_when_it_gives_one(client: OpenAI, live: Live) -> None:
    ask = {"model": "fake", "prompt": "x", "max_tokens": 1}
    by_header = [client.completions.create(**ask, extra_headers={"X-Request-Id": "mine"}) for _ in range(2)]
    by_field = client.completions.create(**ask, extra_body={"request_id": "own"})
    assert [one.id for one in (*by_header, by_field)] == ["cmpl-mine", "cmpl-mine", "cmpl-own"]
    assert len({request.id for request in live.server.seen}) == 3


def test_priority_and_salt_reach_the_engine(client: OpenAI, live: Live) -> None:
    client.completions.create(
        model="fake", prompt="x", max_tokens=1, extra_body={"priority": -3, "cache_salt": "tenant a"}
    )
    assert live.server.seen[0].priority == -3
    assert live.server.seen[0].cache_salt == "tenant a"


def test_a_full_queue_is_503_with_retry_after(client: OpenAI, live: Live) -> None:
    live.server.refuse = TritiumError(Code.UNAVAILABLE, "the queue is full: 4 requests wait", retry_after_s=1.5)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="fake", messages=ASK, stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.type == "overloaded_error"


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error(client: OpenAI, live: Live) -> None:
    live.server.fail_after = 6
    received = 0
    more = {"ignore_eos": True}
    with pytest.raises(openai.APIError, match="the engine was lost while it answered"):
        for _ in client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=40, stream=True, extra_body=more
        ):
            received += 1
    assert received > 1
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="fake", messages=ASK, max_tokens=40, extra_body=more)
    assert caught.value.status_code == 503
