"""Tokenizers of GGUF files, written as the files of a folder and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from transformers import PreTrainedTokenizerFast

from tests.llm.test_tokenizer_gguf import sentencepiece_values
from tests.llm.tokenizer_samples import ANY_TEXT, TEXTS, Source, enlarged, llama_style
from tests.tiny import CHAT_TEMPLATE, SPECIAL, _tokenizer_json
from tritium.errors import TritiumError
from tritium.llm.checkpoint.metadata import tokenizer_files as read_files
from tritium.llm.tokenizer import Tokenizer, generation_ids, load_tokenizer, tokenizer_files


def byte_level_values(**more: Any) -> dict[str, Any]:
    model = json.loads(_tokenizer_json())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens[:-1]] + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def by_score_values(proto: bytes, **more: Any) -> dict[str, Any]:
    values = sentencepiece_values(proto, **more)
    values["tokenizer.ggml.tokens"] += ["<|eot_id|>", "<think>"]
    values["tokenizer.ggml.scores"] += [0.0, 0.0]
    values["tokenizer.ggml.token_type"] += [3, 4]
    return values


CASES = {
    "byte level": byte_level_values(),
    "byte level, bos and eos": byte_level_values(add_bos_token=True, add_eos_token=True, padding_token_id=0),
    "whole words": byte_level_values(pre="llama-bpe"),
    "nfc": byte_level_values(pre="qwen2"),
    "by score": by_score_values(llama_style()),
    "by score, enlarged": by_score_values(enlarged(llama_style()), add_eos_token=True),
    "by score, no prefix": by_score_values(llama_style(), add_space_prefix=False, add_bos_token=False),
}


def written(folder: Path, values: dict[str, Any]) -> Source:
    for name, content in tokenizer_files(values, 1024).items():
        (folder / name).write_bytes(content)
    return Source(read_files(folder), generation_config=generation_ids(values))


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    values = CASES[request.param]
    folder = tmp_path_factory.mktemp("files")
    return load_tokenizer(Source({"gguf": values})), load_tokenizer(written(folder, values))


def test_what_a_tokenizer_is_stays(pair: tuple[Tokenizer, Tokenizer]) -> None:
    before, after = pair
    assert (after.vocab_size, after.bos_token_id, after.eos_token_ids, after.chat_templates) == (
        before.vocab_size,
        before.bos_token_id,
        before.eos_token_ids,
        before.chat_templates,
    )
    for number in range(before.vocab_size):
        assert after.id_to_bytes(number) == before.id_to_bytes(number)
        assert after.is_special(number) == before.is_special(number)


@pytest.mark.parametrize("text", [*TEXTS, "a <think> b<think>c", "介绍一下世界介绍绍一下", "aaaaaaaaaaa aaaaa"])
def test_ids_stay(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    before, after = pair
    assert after.encode(text) == before.encode(text)
    for special in ("<|im_end|>", "<|eot_id|>", "</s>"):
        among = f"{text}{special}{text}"
        assert after.encode(among, allow_special=True) == before.encode(among, allow_special=True)


@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
def test_ids_of_any_text_stay(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    before, after = pair
    assert after.encode(text) == before.encode(text)
    assert after.decode(after.encode(text)) == before.decode(before.encode(text))


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_reads_the_byte_level_files(tmp_path: Path, text: str) -> None:
    values = CASES["byte level, bos and eos"] | {"tokenizer.chat_template": CHAT_TEMPLATE}
    ours, theirs = load_tokenizer(written(tmp_path, values)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs(text)["input_ids"][0] == 1 and theirs(text)["input_ids"][-1] == 2
    messages = [{"role": "user", "content": text}]
    assert theirs.apply_chat_template(messages, return_dict=False) == ours.encode_chat(
        messages, add_generation_prompt=False
    )
    assert (theirs.pad_token_id, theirs.model_max_length) == (0, 1024)


@pytest.mark.parametrize("proto", [llama_style(), enlarged(llama_style())], ids=["as trained", "enlarged"])
def test_sentencepiece_reads_the_model_as_the_original(tmp_path: Path, proto: bytes) -> None:
    import sentencepiece

    written(tmp_path, sentencepiece_values(proto))
    original = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ours = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert (ours.unk_id(), ours.bos_id(), ours.eos_id(), ours.pad_id()) == (0, 1, 2, -1)
    for text in TEXTS:
        assert ours.encode(text) == original.encode(text)


def test_named_chat_templates_stay(tmp_path: Path) -> None:
    values = byte_level_values() | {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    after = load_tokenizer(written(tmp_path, values))
    assert sorted(after.chat_templates) == ["default", "tool_use"]
    assert after.render_chat([{"role": "user", "content": "x"}], template="tool_use") == "b"


def test_ids_for_generation() -> None:
    values = byte_level_values(padding_token_id=0, eot_token_id=1)
    assert generation_ids(values) == {"eos_token_id": [2, 1, 0], "bos_token_id": 1, "pad_token_id": 0}


def test_a_vocabulary_without_an_unknown_token_is_refused() -> None:
    values = sentencepiece_values(llama_style())
    del values["tokenizer.ggml.token_type"]
    with pytest.raises(TritiumError, match=r"token_type names no unknown token"):
        tokenizer_files(values, 1024)
