"""The official OpenAI SDK, unchanged, against a live server: sync, async and streaming."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.chain import TEXT, make_chain
from tests.e2e.live import LiveServer

ASK: list[Any] = [{"role": "user", "content": "Tell me about the quick brown fox"}]
STORY = "Once upon a time there was a little model"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 40}
OPTIONS: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
CHAIN: dict[str, Any] = {"model": "chain", "temperature": 0, "messages": ASK}


@pytest.fixture(scope="module")
def client(tiny_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny_server.url}/v1", **OPTIONS) as one:
        yield one


@pytest.fixture
async def aclient(tiny_server: LiveServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{tiny_server.url}/v1", **OPTIONS) as one:
        yield one


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model whose greedy answer is ``TEXT``."""
    folder = tmp_path_factory.mktemp("chain")
    arguments = [str(make_chain(folder / "model")), "--served-model-name=chain", "--dtype=float32"]
    with (
        LiveServer(arguments, folder / "log") as live,
        OpenAI(base_url=f"{live.url}/v1", **OPTIONS) as one,
    ):
        yield one


@pytest.fixture(scope="module")
def story(client: OpenAI) -> str:
    """The greedy continuation of ``STORY``."""
    return client.completions.create(prompt=STORY, **GREEDY).choices[0].text


def contents(chunks: list[Any], index: int = 0) -> list[str]:
    """The pieces of one answer of a chat's stream."""
    return [c.delta.content for chunk in chunks for c in chunk.choices if c.index == index and c.delta.content]


def texts(chunks: list[Any], index: int = 0) -> list[str]:
    """The pieces of one answer of a completion's stream."""
    return [c.text for chunk in chunks for c in chunk.choices if c.index == index and c.text]


# -- chats and completions ------------------------------------------------------------------------------------


def test_chat_whole_and_streamed_are_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASK, **GREEDY)
    assert whole.object == "chat.completion" and whole.model == "tiny"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, stream_options=options, **GREEDY))
    assert "".join(contents(chunks)) == whole.choices[0].message.content
    assert len(contents(chunks)) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_completion_whole_and_streamed_are_the_same(client: OpenAI, story: str) -> None:
    whole = client.completions.create(prompt=STORY, **GREEDY)
    assert whole.object == "text_completion"
    assert whole.choices[0].text == story
    assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 40
    chunks = list(client.completions.create(prompt=STORY, stream=True, **GREEDY))
    assert "".join(texts(chunks)) == story
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


async def test_async_client(aclient: AsyncOpenAI, story: str) -> None:
    whole, stream = await asyncio.gather(
        aclient.completions.create(prompt=STORY, **GREEDY),
        aclient.completions.create(prompt=STORY, stream=True, **GREEDY),
    )
    assert whole.choices[0].text == story
    assert "".join(texts([chunk async for chunk in stream])) == story
    chat = await aclient.chat.completions.create(messages=ASK, **GREEDY)
    chunks = [c async for c in await aclient.chat.completions.create(messages=ASK, stream=True, **GREEDY)]
    assert "".join(contents(chunks)) == chat.choices[0].message.content


async def test_a_stream_that_is_left_frees_its_blocks(aclient: AsyncOpenAI, tiny_server: LiveServer) -> None:
    values = GREEDY | {"max_tokens": 900}
    stream = await aclient.completions.create(prompt=STORY, stream=True, extra_body={"ignore_eos": True}, **values)
    async for _ in stream:
        break
    assert tiny_server.metric("tritium_requests_running", model="tiny") == 1
    await stream.close()
    async with asyncio.timeout(30):
        while tiny_server.metric("tritium_requests_running", model="tiny"):
            await asyncio.sleep(0.05)
    assert tiny_server.metric("tritium_kv_cache_usage_ratio", model="tiny") == 0


def test_max_tokens(client: OpenAI) -> None:
    for limit in (1, 7):
        answer = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=limit)
        assert answer.usage is not None and answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"
    answer = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_completion_tokens=3)
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    default = client.completions.create(model="tiny", prompt=STORY, temperature=0, extra_body={"ignore_eos": True})
    assert default.usage is not None and default.usage.completion_tokens == 16


def test_several_answers(client: OpenAI) -> None:
    values: dict[str, Any] = {"model": "tiny", "prompt": STORY, "n": 3, "temperature": 1, "seed": 11}
    answer = client.completions.create(max_tokens=12, extra_body={"ignore_eos": True}, **values)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    found = [c.text for c in answer.choices]
    assert len(set(found)) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 36
    stream = client.completions.create(max_tokens=12, stream=True, extra_body={"ignore_eos": True}, **values)
    chunks = list(stream)
    assert ["".join(texts(chunks, index)) for index in range(3)] == found
    same = client.chat.completions.create(messages=ASK, n=3, **GREEDY)
    assert len({c.message.content for c in same.choices}) == 1


def test_several_prompts(client: OpenAI, story: str) -> None:
    answer = client.completions.create(prompt=[STORY, "def main():", STORY], **GREEDY)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == answer.choices[2].text == story != answer.choices[1].text


def test_prompt_of_token_ids(client: OpenAI) -> None:
    ids = [5, 17, 33, 60, 7]
    answer = client.completions.create(prompt=ids, **GREEDY)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    both = client.completions.create(prompt=[ids, ids[::-1]], **GREEDY)
    assert both.choices[0].text == answer.choices[0].text
    assert both.usage is not None and both.usage.prompt_tokens == 2 * len(ids)


def test_equal_long_prompts_share_their_blocks(client: OpenAI) -> None:
    ids = [3 + (7 * i * i + i) % 380 for i in range(150)]
    first, second = (client.completions.create(prompt=ids, **GREEDY) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second)]  # type: ignore[union-attr]
    assert cached == [0, 144]  # whole blocks of 16


# -- stops ----------------------------------------------------------------------------------------------------


def test_stop_string_ends_the_answer_and_never_shows(client: OpenAI, story: str) -> None:
    found = re.search(r"[ -~]{3}", story)
    assert found is not None, "the greedy answer has no three plain characters in a row"
    stop = found[0]
    before = story[: story.index(stop)]
    answer = client.completions.create(prompt=STORY, stop=["never there", stop], **GREEDY)
    assert answer.choices[0].text == before
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": stop}
    chunks = list(client.completions.create(prompt=STORY, stop=stop, stream=True, **GREEDY))
    assert "".join(texts(chunks)) == before
    assert chunks[-1].choices[0].finish_reason == "stop"
    shown = client.completions.create(
        prompt=STORY, stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert shown.choices[0].text == before + stop


def test_no_part_of_a_stop_string_is_streamed(chain: OpenAI) -> None:
    for stop in (":", "orRM-L", "龍🙂", "🙂é!", "é!"):
        chunks = list(chain.chat.completions.create(stop=[stop], stream=True, **CHAIN))
        assert "".join(contents(chunks)) == TEXT[: TEXT.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    # What only begins like the stop string is held back, then given.
    chunks = list(chain.chat.completions.create(stop=["龍🙂!", "é!?"], stream=True, **CHAIN))
    assert "".join(contents(chunks)) == TEXT


def test_chinese_and_emoji_stream_whole_characters(chain: OpenAI) -> None:
    chunks = list(chain.chat.completions.create(stream=True, **CHAIN))
    pieces = contents(chunks)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) >= 10
    assert chunks[-1].choices[0].finish_reason == "stop"
    for limit in range(1, 24):
        cut = chain.chat.completions.create(max_tokens=limit, **CHAIN).choices[0].message.content or ""
        assert TEXT.startswith(cut.rstrip("\ufffd"))
        stream = chain.chat.completions.create(max_tokens=limit, stream=True, **CHAIN)
        assert "".join(contents(list(stream))) == cut


def test_chinese_and_emoji_go_in_as_they_are(client: OpenAI) -> None:
    prompt = "介绍一下模型推理服务器 🙂🚀 𠮷"
    whole = client.completions.create(prompt=prompt, **GREEDY)
    escaped = httpx.post(  # the same text as JSON escapes
        f"{client.base_url}completions",
        content=b'{"model":"tiny","temperature":0,"max_tokens":40,"prompt":"'
        + "".join(
            f"\\u{int.from_bytes(unit, 'big'):04x}"
            for unit in re.findall(rb"..", prompt.encode("utf-16-be"), re.DOTALL)
        ).encode()
        + b'"}',
        headers={"content-type": "application/json"},
        timeout=120,
    )
    assert escaped.json()["choices"][0]["text"] == whole.choices[0].text
    assert escaped.json()["usage"]["prompt_tokens"] == whole.usage.prompt_tokens  # type: ignore[union-attr]


# -- sampling -------------------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(aclient: AsyncOpenAI) -> None:
    async def ask(seed: int | None) -> str:
        answer = await aclient.completions.create(
            model="tiny", prompt=STORY, temperature=1, max_tokens=48, seed=seed, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    alone = await ask(1234)
    assert await ask(1234) == alone
    assert await ask(1235) != alone
    crowd = await asyncio.gather(*(ask(1234 if place == 4 else None) for place in range(9)))
    assert crowd[4] == alone
    assert len(set(crowd)) == 9


def test_chat_logprobs(client: OpenAI, chain: OpenAI) -> None:
    answer = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **GREEDY)
    listed = answer.choices[0].logprobs
    assert listed is not None and listed.content is not None and answer.usage is not None
    assert len(listed.content) == answer.usage.completion_tokens
    for entry in listed.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert entry.top_logprobs[0].bytes == entry.bytes
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
    values = CHAIN | {"logprobs": True, "top_logprobs": 1}
    entries = chain.chat.completions.create(**values).choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == TEXT
    chunks = list(chain.chat.completions.create(stream=True, **values))
    streamed = [e for chunk in chunks for e in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in entries]


def test_completion_logprobs(client: OpenAI, story: str) -> None:
    answer = client.completions.create(prompt=STORY, logprobs=2, **GREEDY).choices[0]
    listed = answer.logprobs
    assert answer.text == story and listed is not None
    assert listed.tokens is not None and listed.token_logprobs is not None and listed.top_logprobs is not None
    assert "".join(listed.tokens) == story
    assert listed.text_offset == [len("".join(listed.tokens[:i])) for i in range(len(listed.tokens))]
    for logprob, best in zip(listed.token_logprobs, listed.top_logprobs, strict=True):
        assert logprob == max(best.values())
        assert len(best) == 2
    plain = client.completions.create(prompt=STORY, **GREEDY).choices[0]
    assert plain.logprobs is None


# -- models and errors ----------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [(model.id, model.root) for model in listed] == [("tiny", "tiny"), ("org/Tiny", "tiny")]  # type: ignore[attr-defined]
    assert [client.models.retrieve(model.id) for model in listed] == listed
    answer = client.completions.create(model="org/Tiny", prompt="Once", max_tokens=2)
    assert answer.model == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", -1, "-1"),
        ("top_p", 0, "0"),
        ("max_tokens", 0, "0"),
        ("frequency_penalty", 3, "3"),
        ("n", 0, "0"),
        ("seed", "x", '"x"'),
        ("logit_bias", {"9999": 1}, "9999"),
        ("stop", ["a"] * 17, "17"),
        ("top_logprobs", 21, "21"),
        ("messages", [], "empty"),
        ("response_format", {"type": "json_object"}, "json_object"),
        ("no_such_field", 1, "no_such_field"),
    ],
)
def test_bad_values_are_named(client: OpenAI, field: str, value: object, shown: str) -> None:
    body: dict[str, Any] = {field: value} | ({"logprobs": True} if field == "top_logprobs" else {})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.param is not None and error.param.startswith(field)
    assert field in error.message
    assert shown.strip('"') in error.message


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=ASK)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "gpt-4o" in caught.value.message


def test_prompt_that_does_not_fit(client: OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="tiny", prompt=[5] * 1024, max_tokens=1),
        lambda: client.completions.create(model="tiny", prompt=STORY, max_tokens=1024),
        lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "fox " * 5000}]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param in ("prompt", "messages")
        assert "maximum context length is 1024 tokens" in caught.value.message


def test_token_ids_out_of_the_vocabulary(client: OpenAI) -> None:
    for ids, where in (([5, 384], "prompt[1]"), ([-1], "prompt[0]")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=ids)
        assert caught.value.param == where
        assert f"{where} is {ids[-1]}, expected a token id from 0 to 383" in caught.value.message


def test_an_error_in_a_stream_comes_before_it(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=STORY, stream=True, temperature=-3)
    assert caught.value.param == "temperature"
