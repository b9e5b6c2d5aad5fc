from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from transformers import PreTrainedTokenizerFast

from tests.llm.tokenizer_samples import ANY_TEXT, SPECIAL, TEXTS, Source, write_json
from tests.tiny import make_checkpoint
from tritium.errors import Code, TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.tokenizer import Tokenizer, load_tokenizer

KINDS = ("byte level", "whole words", "unigram", "legacy")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    source = write_json(folder, request.param)
    return load_tokenizer(source), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, judge = pair
    assert ours.encode(text) == judge(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == judge(text, add_special_tokens=False)["input_ids"]


def test_allowed_control_tokens_are_those_of_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, judge = pair
    text = "<|im_start|>user\nHello <think> [INST] 工具 world</s>\n <|im_end|>\n"
    assert ours.encode(text, allow_special=True) == judge(text)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_has_the_ids_of_transformers_and_comes_back(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, judge = pair
    ids = ours.encode(text)
    assert ids == judge(text)["input_ids"]
    if judge.unk_token_id not in ids and judge.convert_tokens_to_ids("<unk>") not in ids:
        assert ours.decode(ids) == judge.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", [*SPECIAL, *(f"a{token}b {token}" for token in SPECIAL), "".join(SPECIAL)])
def test_user_text_never_becomes_a_control_token(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    ids = ours.encode(text, add_special_tokens=False)
    unknown = set(ours.encode("<unk>", add_special_tokens=False, allow_special=True))
    assert not [number for number in ids if ours.is_special(number) and number not in unknown]
    if unknown.isdisjoint(ids):
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_non_special_added_tokens_still_apply(pair: tuple[Tokenizer, Any]) -> None:
    ours, judge = pair
    ids = ours.encode("a<think>b", add_special_tokens=False)
    assert judge.convert_tokens_to_ids("<think>") in ids
    assert "<think>" in ours.decode(ids)


def test_bos_is_never_doubled(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    ids = ours.encode("<s>hello", allow_special=True)
    assert ids.count(ours.bos_token_id or -1) == 1
    assert ours.encode("hello")[0] == ours.bos_token_id


@pytest.mark.parametrize("flag", [True, False])
def test_the_post_processor_wins_over_configuration(tmp_path: Path, flag: bool) -> None:
    ours = load_tokenizer(write_json(tmp_path, "byte level", add_bos_token=flag))
    assert ours.encode("hi") == PreTrainedTokenizerFast.from_pretrained(tmp_path)("hi")["input_ids"]


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, False), (True, None), (None, True)])
def test_configuration_decides_where_the_file_says_nothing(tmp_path: Path, bos: bool | None, eos: bool | None) -> None:
    flags = {name: flag for name, flag in (("add_bos_token", bos), ("add_eos_token", eos)) if flag is not None}
    source = write_json(tmp_path, "byte level", **flags)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"post_processor": None}))
    ours = load_tokenizer(source)
    ids, bare = ours.encode("hi"), ours.encode("hi", add_special_tokens=False)
    assert ids == [ours.bos_token_id] * bool(bos) + bare + [ours.eos_token_ids[0]] * bool(eos)


def test_end_tokens_come_from_everywhere(tmp_path: Path) -> None:
    source = write_json(tmp_path, "byte level")
    source.generation_config = {"eos_token_id": [2, 4]}
    assert load_tokenizer(source).eos_token_ids == (4, 2)
    source.generation_config, source.config = {}, {"eos_token_id": 0}
    assert load_tokenizer(source).eos_token_ids == (4, 0)
    for wrong in ("x", -1, [2, "a"], [True], 1.5):
        source.generation_config = {"eos_token_id": wrong}
        with pytest.raises(TritiumError, match=r"generation_config.json: eos_token_id is .*, expected a token id"):
            load_tokenizer(source)


def test_one_token_alone(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    ids = ours.encode("你", add_special_tokens=False)
    assert b"".join(map(ours.id_to_bytes, ids)).lstrip() in ("你".encode(), b"<unk>")
    assert ours.token_text(ours.encode("<|im_end|>", allow_special=True)[-1]) == "<|im_end|>"
    beyond = ours.vocab_size + 7
    assert (ours.id_to_bytes(beyond), ours.token_text(beyond), ours.decode([beyond, -1])) == (b"", "", "")


def test_encoding_in_threads_gives_the_same_ids(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    alone = [ours.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(ours.encode, TEXTS)) == alone


def test_an_ordinary_token_named_as_padding_stays_text(tmp_path: Path) -> None:
    ours = load_tokenizer(write_json(tmp_path, "byte level", pad_token="!"))
    assert ours.decode(ours.encode("stop!!")) == "stop!!"


def test_tokens_added_by_configuration(tmp_path: Path) -> None:
    source = write_json(tmp_path, "byte level")
    size = load_tokenizer(source).vocab_size
    entry = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": True}
    source.tokenizer["tokenizer_config"]["added_tokens_decoder"] = {str(size): entry}
    ours = load_tokenizer(source)
    assert ours.vocab_size == size + 1
    assert ours.encode("a<|tool|>  b", allow_special=True)[2] == size
    assert ours.decode([size]) == ""


def test_the_tiny_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    ours = load_tokenizer(read_metadata(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (0, (2,), 384)
    assert ours.decode(ours.encode("介绍 <|im_end|>")) == "介绍 <|im_end|>"


def test_half_a_surrogate_pair_is_named(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(TritiumError, match=r"U\+D83D.*at character 2"):
        pair[0].encode("ab\ud83d")


BROKEN: dict[str, Any] = {
    "no json": "{",
    "no model": {},
    "model is a list": {"model": []},
    "no vocab": {"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}},
    "vocab of numbers": {"model": {"type": "BPE", "vocab": [1, 2], "merges": []}, "decoder": {"type": "ByteLevel"}},
    "ids far apart": {"model": {"vocab": {"a": 10**9}}, "decoder": {"type": "ByteLevel"}},
    "added token without id": {"model": {"vocab": {}}, "added_tokens": [{"content": "x"}]},
    "added ids with a hole": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 7, "content": "x", "special": True}],
    },
    "no decoder": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
    "word pieces": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "WordPiece"}},
    "unknown model": {"model": {"type": "X", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}},
    "merge of nothing": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]},
        "decoder": {"type": "ByteLevel"},
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    text = BROKEN[name] if isinstance(BROKEN[name], str) else json.dumps(BROKEN[name])
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TritiumError, match=r"tokenizer\.json") as caught:
        load_tokenizer(Source({"tokenizer.json": tmp_path / "tokenizer.json"}))
    assert caught.value.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)


def test_a_deep_file_is_refused(tmp_path: Path) -> None:
    nested = '{"type":"Sequence","pretokenizers":[' * 10_000 + "]}" * 10_000
    (tmp_path / "tokenizer.json").write_text('{"model":{"vocab":{}},"pre_tokenizer":' + nested + "}")
    with pytest.raises(TritiumError, match=r"tokenizer\.json"):
        load_tokenizer(Source({"tokenizer.json": tmp_path / "tokenizer.json"}))


def test_a_regular_expression_without_end_fails_one_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_json(tmp_path, "byte level")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, document["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    ours = load_tokenizer(source)
    with pytest.raises(TritiumError, match="could not be tokenized"):
        ours.encode("a" * 40 + "b")
    assert ours.decode(ours.encode("hello")) == "hello"


def test_no_tokenizer_at_all() -> None:
    with pytest.raises(TritiumError, match=r"expected tokenizer\.json, tokenizer\.model or GGUF"):
        load_tokenizer(Source({}))
