"""The one validator of sampling values: every wrong one is named as the client spelled it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.errors import Code, TritiumError
from tritium.llm.params import is_sampling_field, make_params
from tritium.llm.types import SamplingParams

BAD: list[tuple[str, Any, str]] = [
    ("temperature", -1, "temperature is -1, expected a number from 0 to 100"),
    ("temperature", math.nan, "temperature is nan"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", "NaN", "temperature is 'NaN'"),
    ("temperature", 10**400, "temperature is 1000"),
    ("temperature", True, "temperature is True"),
    ("top_p", 0, "top_p is 0, expected a number above 0 to 1"),
    ("top_p", 1.1, "top_p is 1.1"),
    ("top_k", -2, "top_k is -2, expected an integer from -1"),
    ("top_k", 1.5, "top_k is 1.5"),
    ("top_k", 2**63, "top_k is 9223372036854775808, expected an integer from -1 to 2147483647"),
    ("min_p", 1.01, "min_p is 1.01"),
    ("presence_penalty", 2.0001, "presence_penalty is 2.0001, expected a number from -2 to 2"),
    ("frequency_penalty", math.nan, "frequency_penalty is nan"),
    ("repetition_penalty", 0, "repetition_penalty is 0, expected a number above 0"),
    ("repetition_penalty", 1e38, "repetition_penalty is 1e\\+38"),
    ("logit_bias", {"-1": 1}, "logit_bias key is '-1', expected a token id from 0 to 99"),
    ("logit_bias", {"100": 1}, "logit_bias key is 100"),
    ("logit_bias", {"x": 1}, "logit_bias key is 'x'"),
    ("logit_bias", {"5": 1e9}, "logit_bias\\[5\\] is 1000000000.0, expected a number from -100 to 100"),
    ("logit_bias", {"5": math.nan}, "logit_bias\\[5\\] is nan"),
    ("logit_bias", {str(i): 0 for i in range(1025)}, "logit_bias is '1025 entries', expected at most 1024"),
    ("logit_bias", [1], "logit_bias is \\[1\\], expected an object"),
    ("max_tokens", 0, "max_tokens is 0, expected an integer from 1"),
    ("max_completion_tokens", -1, "max_completion_tokens is -1"),
    ("min_tokens", -1, "min_tokens is -1"),
    ("min_tokens", 2**64, "expected an integer from 0 to 2147483647"),
    ("max_tokens", 2**64, "expected an integer from 1 to 2147483647"),
    ("stop_token_ids", [100], "stop_token_ids\\[0\\] is 100, expected a token id"),
    ("stop_token_ids", "x", "stop_token_ids is 'x'"),
    ("stop_token_ids", list(range(99)) * 11, "expected at most 1024"),
    ("stop", "", "stop\\[0\\] is '', expected a string that is not empty"),
    ("stop", ["a", 5], "stop\\[1\\] is 5"),
    ("stop", {"a": 1}, "stop is \\{'a': 1\\}"),
    ("stop", ["a"] * 17, "stop is '17 strings', expected at most 16"),
    ("stop", ["é" * 600], "stop\\[0\\] is '1200 bytes', expected at most 1024"),
    ("stop", ["\ud800"], "valid Unicode"),
    ("ignore_eos", 1, "ignore_eos is 1, expected true or false"),
    ("seed", 2**63, "seed is 9223372036854775808"),
    ("seed", 1.5, "seed is 1.5"),
    ("logprobs", 21, "logprobs is 21, expected an integer from 0 to 20"),
    ("temprature", 1, "'temprature' is not a sampling parameter"),
]


@pytest.mark.parametrize(("name", "value", "text"), BAD)
def test_a_wrong_value_is_named(name: str, value: Any, text: str) -> None:
    with pytest.raises(TritiumError, match=text) as caught:
        make_params({name: value}, vocab_size=100)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 512


def test_values_aliases_and_defaults() -> None:
    given_values = {"max_completion_tokens": 5, "stop": "x", "logit_bias": {"7": -1, 8: 2.0}, "top_p": None}
    params = make_params(given_values, {"top_p": 0.5, "temperature": 0.7, "max_output_len": 9}, vocab_size=100)
    assert params == SamplingParams(max_tokens=5, stop=["x"], logit_bias={7: -1.0, 8: 2.0}, top_p=0.5, temperature=0.7)


def test_nothing_given_is_the_plain_default() -> None:
    assert make_params({}, vocab_size=10) == SamplingParams()


def test_min_tokens_may_not_pass_max_tokens() -> None:
    with pytest.raises(TritiumError, match="min_tokens is 5, expected at most max_tokens, which is 4"):
        make_params({"min_tokens": 5, "max_tokens": 4}, vocab_size=10)


def test_one_end_id_is_a_list_of_one() -> None:
    assert make_params({"end_id": 3}, vocab_size=10).stop_token_ids == [3]


def test_a_denormal_temperature_is_greedy() -> None:
    assert make_params({"temperature": 1e-320}, vocab_size=10).greedy


def test_known_spellings() -> None:
    assert is_sampling_field("max_new_tokens")
    assert not is_sampling_field("text_input")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted({name for name, *_ in BAD})), JSON)
def test_any_value_gives_params_or_a_tritium_error(name: str, value: Any) -> None:
    try:
        params = make_params({name: value}, vocab_size=100)
    except TritiumError as error:
        assert error.param is not None
    else:
        assert math.isfinite(params.temperature)
