from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from tests.llm.tokenizer_samples import ANY_TEXT, TEXTS, Source, enlarged, llama_style, smollm2
from tritium.errors import Code, TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.tokenizer import Tokenizer, load_tokenizer
from tritium.llm.tokenizer.from_gguf import WORD_RULES


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return load_tokenizer(read_metadata(smollm2()))


@pytest.fixture(scope="module")
def judge() -> Any:
    judge = PreTrainedTokenizerFast.from_pretrained(smollm2().parent, gguf_file=smollm2().name)
    # transformers does not know the word rule "smollm"; this is what the published tokenizer.json has.
    published = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    judge.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(published)
    return judge


def test_smollm2_loads_in_half_a_second() -> None:
    metadata = read_metadata(smollm2())
    spent = []
    for _ in range(3):
        start = time.process_time()
        load_tokenizer(metadata)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.5


def test_smollm2_special_tokens(ours: Tokenizer) -> None:
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (49152, 1, (2, 0))
    assert ours.encode("<|im_start|>x<|im_end|>", allow_special=True) == [1, 104, 2]
    assert ours.chat_templates == ("default",)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
    ],
)
def test_smollm2_ids_that_others_published(ours: Tokenizer, text: str, ids: list[int]) -> None:
    assert ours.encode(text) == ids


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|><|im_end|> <issue_start>"])
def test_smollm2_ids_are_those_of_transformers(ours: Tokenizer, judge: Any, text: str) -> None:
    assert ours.encode(text, allow_special=True) == judge(text)["input_ids"]


@pytest.fixture(scope="module")
def missing(ours: Tokenizer) -> set[int]:
    """Bytes that SmolLM2's vocabulary has no token for: some control characters, and none that a script needs."""
    pieces = {ours.id_to_bytes(number) for number in range(ours.vocab_size)}
    return {byte for byte in range(256) if bytes([byte]) not in pieces}


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_smollm2_on_any_text(ours: Tokenizer, judge: Any, missing: set[int], text: str) -> None:
    ids = ours.encode(text)
    assert ids == judge(text)["input_ids"]
    if missing.isdisjoint(text.encode()):
        assert ours.decode(ids) == text


def test_smollm2_chat(ours: Tokenizer, judge: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "介绍一下 TensorRT-LLM\n"}]
    for prompt in (True, False):
        want = judge.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ours.encode_chat(messages, add_generation_prompt=prompt) == want


def words(rule: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in WORD_RULES[rule].splits]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("rule", WORD_RULES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_word_rule_loses_nothing(rule: str, text: str) -> None:
    assert "".join(words(rule, text)) == text


@pytest.mark.parametrize(
    ("rule", "text", "want"),
    [
        ("gpt-2", "It's 12345 ok", ["It", "'s", " 12345", " ok"]),
        ("smollm", "It's 123 ok", ["It", "'s", " ", "1", "2", "3", " ok"]),
        ("default", "a+1234 (b)", ["a", "+", "123", "4", " ", "(", "b", ")"]),
        ("llama-bpe", "IT'S 12345 (ok)\n\nx", ["IT", "'S", " ", "123", "45", " (", "ok", ")\n\n", "x"]),
        ("qwen2", "IT'S 123\n", ["IT", "'S", " ", "1", "2", "3", "\n"]),
        ("tekken", "HelloWorld 12/x", ["Hello", "World", " ", "1", "2", "/x"]),
        ("gpt-4o", "don't HelloWORLD 1234", ["don't", " Hello", "WORLD", " ", "123", "4"]),
        ("deepseek-coder", "a 12中文。\n", ["a", " ", "1", "2", "中文", "。", "\n"]),
        ("deepseek-v3", "a 1234中文ひ (b", ["a", " ", "123", "4", "中文ひ", " (", "b"]),
    ],
)
def test_word_rules(rule: str, text: str, want: list[str]) -> None:
    assert words(rule, text) == want


@settings(max_examples=50, deadline=None)
@given(text=ANY_TEXT)
def test_the_qwen2_rule_is_that_of_transformers(text: str) -> None:
    published = pre_tokenizers.Split(Regex(QWEN2), "isolated").pre_tokenize_str(text)
    assert words("qwen2", text) == [word for word, _ in published]


@settings(max_examples=50, deadline=None)
@given(text=ANY_TEXT)
def test_the_smollm_rule_is_digits_then_byte_level(text: str) -> None:
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ).pre_tokenize_str(text)
    assert [len(word.encode()) for word in words("smollm", text)] == [len(word) for word, _ in published]


def sentencepiece_values(proto: bytes, **extra: Any) -> dict[str, Any]:
    """GGUF keys as a converter writes them for a sentencepiece model."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    kinds = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte}
    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in ids],
        "tokenizer.ggml.scores": [model.get_score(number) for number in ids],
        "tokenizer.ggml.token_type": [next((k for k, is_ in kinds.items() if is_(number)), 1) for number in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in extra.items()}


@pytest.fixture(scope="module", params=["as trained", "enlarged"])
def by_score(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    import sentencepiece

    proto = llama_style() if request.param == "as trained" else enlarged(llama_style())
    return load_tokenizer(Source({"gguf": sentencepiece_values(proto)})), sentencepiece.SentencePieceProcessor(
        model_proto=proto
    )


@pytest.mark.parametrize("text", [*TEXTS, "介绍一下世界介绍绍一下", "aaaaaaaaaaa aaaaa"])
def test_scores_merge_as_in_sentencepiece(by_score: tuple[Tokenizer, Any], text: str) -> None:
    ours, library = by_score
    assert ours.encode(text) == [1, *library.encode(text)]
    assert ours.decode(ours.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_scores_on_any_text(by_score: tuple[Tokenizer, Any], text: str) -> None:
    ours, library = by_score
    if "▁" not in text:  # which means a space to both, and comes back as one
        assert ours.encode(text) == [1, *library.encode(text)]
        assert ours.decode(ours.encode(text)) == text


def test_scores_in_long_text() -> None:
    ours = load_tokenizer(Source({"gguf": sentencepiece_values(llama_style())}))
    start = time.process_time()
    assert ours.decode(ours.encode("介绍a" * 50_000)) == "介绍a" * 50_000
    assert time.process_time() - start < 10


def test_control_tokens_among_scored_text() -> None:
    values = sentencepiece_values(llama_style(), add_bos_token=False)
    values["tokenizer.ggml.tokens"] += ["<|eot_id|>", "<think>"]
    values["tokenizer.ggml.scores"] += [0.0, 0.0]
    values["tokenizer.ggml.token_type"] += [3, 4]
    ours = load_tokenizer(Source({"gguf": values}))
    end, think = ours.vocab_size - 2, ours.vocab_size - 1
    assert ours.eos_token_ids == (2, end)
    assert ours.encode("<think>") == [think]
    assert end not in ours.encode("a<|eot_id|>")
    ids = ours.encode("one<|eot_id|>two", allow_special=True)
    # GGUF's space prefix also goes before text behind a control token.
    assert ids == [*ours.encode("one"), end, *ours.encode("two")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; expected 'gpt2' or 'llama'"),
        ({"model": "gpt2", "pre": "tomorrow", "merges": []}, "tokenizer.ggml.pre is 'tomorrow'; expected one of"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges is missing"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 values for"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 values for"),
        ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id is 1000000; the vocabulary has"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TritiumError) as caught:
        load_tokenizer(Source({"gguf": sentencepiece_values(llama_style(), **change)}))
    assert message in caught.value.message
    assert caught.value.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)


def test_named_chat_templates() -> None:
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b{{ tools|length }}"}
    ours = load_tokenizer(Source({"gguf": sentencepiece_values(llama_style()) | templates}))
    messages = [{"role": "user", "content": "x"}]
    assert ours.render_chat(messages) == "a"
    assert ours.render_chat(messages, tools=[{"type": "function"}]) == "b1"
    assert ours.render_chat(messages, template="tool_use", tools=[{}, {}]) == "b2"
