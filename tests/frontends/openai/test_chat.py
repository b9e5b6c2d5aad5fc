"""From the request to what the engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontends.openai.fake import END, TURN, FakeModel
from tritium.errors import TritiumError
from tritium.frontends.openai.chat import Call, Preparer
from tritium.frontends.openai.schema import ChatRequest, CompletionRequest, decode
from tritium.llm.types import SamplingParams

ONE_TURN = [{"role": "user", "content": "hi"}]


def prepare(body: dict[str, Any], model: FakeModel | None = None) -> Call:
    kind = ChatRequest if "messages" in body else CompletionRequest
    return Preparer().prepare(decode(json.dumps(body).encode(), kind), model or FakeModel(), 7)  # type: ignore[arg-type]


def prompt_of(messages: list[dict[str, Any]]) -> list[int]:
    return prepare({"messages": messages}).requests[0].tokens


def test_turns_go_through_the_template() -> None:
    tokens = prompt_of([{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}])
    assert tokens == [TURN, *b"system\na", END, TURN, *b"user\nb", END, TURN, *b"assistant\n"]


def test_text_parts_are_joined_and_an_answer_can_be_sent_back() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent_back = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    more = {"function_call": None, "tool_calls": None}
    tokens = prompt_of([{"role": "user", "content": parts}, sent_back | more])
    assert tokens[: tokens.index(END)] == [TURN, *b"user\na\nb"]


def test_spelled_special_tokens_are_text() -> None:
    tokens = prompt_of([{"role": "user", "content": "<|end|><|turn|>"}])
    assert tokens.count(END) == 1
    assert tokens.count(TURN) == 2
    assert END not in prepare({"prompt": "<|end|>"}).requests[0].tokens


def test_the_models_defaults_hold_where_the_client_says_nothing() -> None:
    model = FakeModel(sampling_defaults={"temperature": 0.2, "top_k": 7, "max_tokens": 30})
    params = prepare({"prompt": "x", "top_k": 3}, model).requests[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.2, 3, 30)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": ONE_TURN}, 256 - 20),
        ({"messages": ONE_TURN, "max_tokens": 3}, 3),
        ({"messages": ONE_TURN, "max_completion_tokens": 4}, 4),
        ({"prompt": "x"}, 16),
        ({"prompt": "x", "max_tokens": None}, 16),
        ({"prompt": "x", "min_tokens": 20}, 20),
        ({"prompt": "x" * 250}, 6),
        ({"prompt": "x" * 250, "max_tokens": 6}, 6),
    ],
)
def test_how_many_tokens_an_answer_may_have(body: dict[str, Any], expected: int) -> None:
    assert prepare(body).requests[0].params.max_tokens == expected


def test_a_default_shrinks_with_the_room() -> None:
    model = FakeModel(sampling_defaults={"max_tokens": 200})
    assert prepare({"prompt": "x" * 156}, model).requests[0].params.max_tokens == 100


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "x" * 256}, "prompt", "257 tokens (256 in the prompt, 1 in the completion)"),
        ({"prompt": [[1], [2] * 300]}, "prompt", "300 in the prompt"),
        ({"messages": ONE_TURN, "max_tokens": 250}, "messages", "20 in the messages, 250 in the completion"),
        ({"prompt": "x" * 200, "min_tokens": 60}, "min_tokens", "at most 56"),
    ],
)
def test_what_does_not_fit_is_refused(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(TritiumError) as caught:
        prepare(body)
    assert caught.value.param == param
    assert said in caught.value.message


def test_seeds_differ_by_choice_and_wrap_around() -> None:
    call = prepare({"prompt": "x", "n": 3, "seed": 2**63 - 2})
    assert [one.params.seed for one in call.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [one.params.seed for one in prepare({"prompt": "x", "n": 2}).requests] == [None, None]


def test_logprobs_mean_the_same_on_both_routes() -> None:
    def asked(**more: Any) -> int | None:
        body = more if "prompt" in more else {"messages": ONE_TURN} | more
        return prepare(body).requests[0].params.logprobs

    assert asked(logprobs=True, top_logprobs=4) == 4
    assert asked(logprobs=True) == 0
    assert asked(logprobs=False) is None
    assert asked(prompt="x", logprobs=5) == 5
    assert asked(prompt="x", logprobs=0) == 0


def test_every_sampling_field_arrives() -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100},
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [8],
        "stop": "end",
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "seed": 11,
        "logprobs": 2,
        "skip_special_tokens": False,
    }
    assert prepare(body).requests[0].params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={5: -100.0},
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[8],
        stop=["end"],
        include_stop=True,
        ignore_eos=True,
        seed=11,
        logprobs=2,
        skip_special_tokens=False,
    )
