from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings

from tests.llm.tokenizer_samples import ANY_TEXT, TEXTS, Source, enlarged, llama_style, sentencepiece_proto
from tritium.errors import TritiumError
from tritium.llm.tokenizer import Tokenizer, load_tokenizer

KINDS = {
    "llama": llama_style,
    "enlarged": lambda: enlarged(llama_style()),
    "unigram": lambda: sentencepiece_proto("unigram"),
    "unigram, byte fallback": lambda: sentencepiece_proto("unigram", byte_fallback=True),
    "bpe, defaults": lambda: sentencepiece_proto("bpe"),
    "no prefix": lambda: sentencepiece_proto("bpe", byte_fallback=True, add_dummy_prefix=False),
}


def write(folder: Path, proto: bytes, **config: Any) -> Source:
    (folder / "tokenizer.model").write_bytes(proto)
    return Source({"tokenizer.model": folder / "tokenizer.model", "tokenizer_config": config})


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    proto = KINDS[request.param]()
    ours = load_tokenizer(write(tmp_path_factory.mktemp("model"), proto))
    return ours, sentencepiece.SentencePieceProcessor(model_proto=proto)


@pytest.mark.parametrize("text", [*TEXTS, "介绍一下 TensorRT-LLM，thanks 👨‍👩‍👧 世界", "<s> and </s> and <unk>"])
def test_ids_are_those_of_sentencepiece(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, library = pair
    assert ours.encode(text) == [library.bos_id(), *library.encode(text)]


@settings(max_examples=80, deadline=None)
@given(text=ANY_TEXT)
def test_any_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, library = pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    if library.unk_id() not in ids:
        assert ours.decode(ids) == library.decode(ids)


def test_tokens_beyond_the_model(tmp_path: Path) -> None:
    source = write(tmp_path, llama_style(), legacy=False)
    size = sentencepiece.SentencePieceProcessor(model_proto=llama_style()).get_piece_size()
    source.tokenizer["tokenizer_config"]["added_tokens_decoder"] = {
        str(size): {"content": "<pad>", "special": True},
        str(size + 1): {"content": "<|im_end|>", "special": True},
    }
    source.tokenizer["added_tokens"] = {"<pad>": size, "工具箱": size + 2}
    ours = load_tokenizer(source)
    assert ours.vocab_size == size + 3
    ids = ours.encode("用工具箱<|im_end|>", add_special_tokens=False)
    assert size + 2 in ids and size + 1 not in ids
    assert ours.decode(ids) == "用工具箱<|im_end|>"
    ids = ours.encode("x<|im_end|>", allow_special=True)
    assert ids[-1] == size + 1 and ours.decode(ids) == "x"
    assert ours.decode(ids, skip_special_tokens=False) == "<s> x<|im_end|>"


@pytest.mark.parametrize("legacy", [True, False])
def test_the_prefix_behind_a_control_token(tmp_path: Path, legacy: bool) -> None:
    ours = load_tokenizer(write(tmp_path, llama_style(), legacy=legacy))
    library = sentencepiece.SentencePieceProcessor(model_proto=llama_style())
    ids = ours.encode("the</s>the", allow_special=True)
    want = [1, *library.encode("the"), 2, *library.encode("the")]
    assert (ids == want) is legacy
    assert ours.decode(ids) == ("the the" if legacy else "thethe")


def test_a_control_token_that_the_model_finds_in_any_text(tmp_path: Path) -> None:
    proto = sentencepiece_proto("bpe", byte_fallback=True, user_defined_symbols=["<|end|>", "<think>"])
    ours = load_tokenizer(write(tmp_path, proto, eos_token="<|end|>"))
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    end = library.piece_to_id("<|end|>")
    text = "one<|end|>two<|end|><|end|><think>"
    assert library.encode(text).count(end) == 3
    ids = ours.encode(text, add_special_tokens=False)
    assert end not in ids and ids[-1] == library.piece_to_id("<think>")
    assert ours.decode(ids) == text
    assert ours.encode("x<|end|>", allow_special=True)[-1] == end


def test_bos_and_eos_by_configuration(tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path, llama_style(), add_bos_token=False, add_eos_token=True))
    assert ours.encode("the")[-1] == 2 and ours.encode("the")[0] != 1
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(TritiumError, match=r"-m pip install 'tritium\[sentencepiece\]'"):
        load_tokenizer(write(tmp_path, b""))


@pytest.mark.parametrize("proto", [b"", b"no model at all", llama_style()[:100]])
def test_a_broken_model_is_named(tmp_path: Path, proto: bytes) -> None:
    with pytest.raises(TritiumError, match=r"tokenizer\.model"):
        load_tokenizer(write(tmp_path, proto))


def test_ids_that_contradict_are_named(tmp_path: Path) -> None:
    source = write(tmp_path, llama_style())
    source.tokenizer["added_tokens"] = {"<x>": 5}
    with pytest.raises(TritiumError, match="added token '<x>' has id 5, which is"):
        load_tokenizer(source)
    source.tokenizer["added_tokens"] = {"<x>": 10**9}
    with pytest.raises(TritiumError, match="added token '<x>' has id 1000000000"):
        load_tokenizer(source)
