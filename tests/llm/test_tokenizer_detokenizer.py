from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.llm.tokenizer_samples import ANY_TEXT, TEXTS, Source, llama_style, write_json
from tritium.llm.tokenizer import Tokenizer, load_tokenizer

KINDS = ("byte level", "legacy", "unigram", "sentencepiece")


@pytest.fixture(scope="module", params=KINDS)
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("detokenizer")
    if request.param == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(llama_style())
        return load_tokenizer(Source({"tokenizer.model": folder / "tokenizer.model"}))
    return load_tokenizer(write_json(folder, request.param))


def pieces(ours: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> list[str]:
    detokenizer = ours.detokenizer(**options)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    out = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_no_broken_character(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    out = pieces(ours, ids, list(range(len(ids))))
    assert "".join(out) == ours.decode(ids)
    if "<unk>" not in ours.decode(ids, skip_special_tokens=False):
        assert "\ufffd" not in "".join(out)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_split(ours: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, ours.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=10))
    for skip in (True, False):
        assert "".join(pieces(ours, ids, cuts, skip_special_tokens=skip)) == ours.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT, at=st.integers(0, 100))
def test_a_continuation_is_decoded_in_its_context(ours: Tokenizer, text: str, at: int) -> None:
    ids = ours.encode(text)
    at %= len(ids) + 1
    detokenizer = ours.detokenizer(ids[:at])
    tail = detokenizer.push(ids[at:]) + detokenizer.flush()
    before, after = (
        b"".join(ours.id_to_bytes(number) for number in part if not ours.is_special(number))
        for part in (ids[:at], ids[at:])
    )
    if not before and ours.decode([*ids[at:]]) != after.decode(errors="replace"):
        after = after.removeprefix(b" ")  # it opens the text, so the space that encoding added goes
    assert tail == after.decode(errors="replace")


def test_invalid_bytes_once_and_on(tmp_path: Any) -> None:
    ours = load_tokenizer(write_json(tmp_path, "legacy"))
    byte = {value: ours.encode(f"<0x{value:02X}>", allow_special=True) for value in (0xE4,)}
    assert byte  # spelled out, a byte token is text
    of = {ours.id_to_bytes(number): number for number in range(ours.vocab_size) if ours.token_text(number) != ""}
    x, lead, more, last, bad = (of[piece] for piece in (b"x", b"\xe4", b"\xbd", b"\xa0", b"\xff"))
    for ids, want in (
        ([x, lead, more, last, x], "x你x"),
        ([lead, x], "\ufffdx"),
        ([lead, more, x, lead, more, last], "\ufffdx你"),
        ([bad, x, bad], "\ufffdx\ufffd"),
        ([lead, more], "\ufffd"),
    ):
        for cuts in ([], list(range(9))):
            assert "".join(pieces(ours, ids, cuts)) == want
    assert (ours.token_text(lead), ours.id_to_bytes(lead)) == ("\ufffd", b"\xe4")


def test_held_back_bytes_are_at_most_a_character(ours: Tokenizer) -> None:
    detokenizer = ours.detokenizer()
    seen = ""
    ids = ours.encode("你好👨‍👩‍👧 한국어" * 3)
    for count, number in enumerate(ids, 1):
        seen += detokenizer.push([number])
        raw = b"".join(ours.id_to_bytes(each) for each in ids[:count] if not ours.is_special(each))
        assert len(raw.removeprefix(b" ")) - len(seen.encode()) in (0, 1, 2, 3) or "<unk>" in str(raw)


def test_control_tokens_show_on_demand(ours: Tokenizer) -> None:
    ids = ours.encode("a</s>", allow_special=True, add_special_tokens=False)
    assert ours.decode(ids) == "a"
    assert "".join(pieces(ours, ids, [1, 2], skip_special_tokens=False)) == "a</s>"


def test_a_long_prompt_costs_nothing(ours: Tokenizer) -> None:
    prompt = ours.encode("word " * 2000) * 20
    start = time.process_time()
    for _ in range(200):
        ours.detokenizer(prompt).push([prompt[-1]])
    assert time.process_time() - start < 0.5


def test_time_per_token_is_constant(ours: Tokenizer) -> None:
    ids = ours.encode("The quick brown fox. " * 50)

    def spend(rounds: int) -> float:
        detokenizer = ours.detokenizer()
        start = time.process_time()
        for _ in range(rounds):
            for number in ids:
                detokenizer.push([number])
        return time.process_time() - start

    spend(1)
    assert spend(40) < 20 * spend(10)  # 4 when linear, 16 when quadratic
