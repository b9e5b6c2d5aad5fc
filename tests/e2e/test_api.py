"""``from tritium import LLM, SamplingParams``: scripts without a server, on a checkpoint and on a GGUF file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.chain import TEXT, make_chain
from tests.tiny_gguf import make_gguf
from tritium import LLM, SamplingParams
from tritium.errors import Code, TritiumError
from tritium.llm.types import EngineStats

PROMPT = "介绍一下TensorRT-LLM"
GREEDY = SamplingParams(temperature=0, max_tokens=20)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(tiny_checkpoint, dtype="float32") as one:
        yield one


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that answers a conversation with ``TEXT``."""
    with LLM(str(make_chain(tmp_path_factory.mktemp("chain"))), dtype="float32") as one:
        yield one


def stats(llm: LLM) -> EngineStats:
    return llm._client.stats


def until_idle(llm: LLM) -> None:
    """Waits until the engine has nothing to do, and checks that it holds no block then."""
    deadline = time.monotonic() + 60
    while (stats(llm).running or stats(llm).waiting) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (stats(llm).running, stats(llm).waiting, stats(llm).blocks_used) == (0, 0, 0)


def test_checkpoint_and_gguf_answer_the_same(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=50)
    [answer] = llm.generate([PROMPT], params)
    assert answer.prompt == PROMPT
    assert answer.prompt_token_ids == llm.tokenizer.encode(PROMPT)
    [output] = answer.outputs
    assert 0 < len(output.token_ids) <= 50
    assert output.finish_reason == ("length" if len(output.token_ids) == 50 else "stop")
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert 0 < answer.first_token_s <= answer.elapsed_s
    with LLM(make_gguf(tmp_path / "tiny.gguf"), dtype="float32") as other:
        [same] = other.generate([PROMPT], params)
        assert same.prompt_token_ids == answer.prompt_token_ids
        assert same.outputs[0].token_ids == output.token_ids
        assert same.outputs[0].text == output.text
        assert other.chat(ASK, GREEDY).outputs[0].text == llm.chat(ASK, GREEDY).outputs[0].text


def test_as_the_article_writes_it(llm: LLM) -> None:
    [answer] = llm.generate(["介绍一下TensorRT-LLM"], SamplingParams(max_tokens=50))
    assert 0 < len(answer.outputs[0].token_ids) <= 50


def test_prompts_are_texts_or_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    answers = llm.generate([PROMPT, np.array(ids)], GREEDY)
    answers += llm.generate(PROMPT, GREEDY) + llm.generate(ids, GREEDY)
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert [answer.prompt for answer in answers] == [PROMPT, None, PROMPT, None]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    each = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1, max_tokens=9, seed=5, ignore_eos=True),
        SamplingParams(temperature=1, max_tokens=9, seed=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True),
    ]
    found = [answer.outputs[0] for answer in llm.generate([PROMPT] * 4, each)]
    assert [len(output.token_ids) for output in found] == [3, 9, 9, 4]
    assert found[1].token_ids == found[2].token_ids
    assert found[0].token_ids == found[3].token_ids[:3]
    assert found[0].logprobs is None
    assert found[3].logprobs is not None
    for token, entry in zip(found[3].token_ids, found[3].logprobs, strict=True):
        assert entry.token == entry.top[0][0] == token
        assert entry.logprob == entry.top[0][1] <= 0
        assert len(entry.top) == 2


def test_a_batch_answers_as_each_alone(llm: LLM) -> None:
    prompts = [PROMPT, "a", "Once upon a time", "def main():", "🙂"] * 3
    alone = {prompt: llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in set(prompts)}
    answers = llm.generate(prompts, GREEDY)
    assert [answer.prompt for answer in answers] == prompts
    assert [answer.outputs[0].token_ids for answer in answers] == [alone[prompt] for prompt in prompts]


def test_equal_prefixes_are_computed_once(llm: LLM) -> None:
    ids = [3 + (13 * i * i + 3 * i) % 380 for i in range(100)]
    first, second = (llm.generate(ids, GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_chat(chain: LLM) -> None:
    answer = chain.chat(ASK, GREEDY)
    assert TEXT.startswith(answer.outputs[0].text.rstrip("\ufffd"))
    answer = chain.chat(ASK, SamplingParams(temperature=0))
    assert answer.outputs[0].text == TEXT
    assert answer.outputs[0].finish_reason == "stop"
    stopped = chain.chat(ASK, SamplingParams(temperature=0, stop=["龍🙂"])).outputs[0]
    assert stopped.text == TEXT[: TEXT.index("龍")]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "龍🙂")


def test_stream(chain: LLM, llm: LLM) -> None:
    pieces = list(chain.stream(ASK, SamplingParams(temperature=0)))
    assert "".join(pieces) == TEXT
    assert len(pieces) >= 10 and not any("\ufffd" in piece for piece in pieces)
    assert "".join(llm.stream(PROMPT, GREEDY)) == llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    ids = llm.tokenizer.encode(PROMPT)
    assert "".join(llm.stream(ids, GREEDY)) == llm.generate(PROMPT, GREEDY)[0].outputs[0].text


def test_a_stream_that_is_left_early_frees_its_blocks(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    steps = stats(llm).steps
    stream = llm.stream(PROMPT, endless)
    for _ in stream:
        break
    stream.close()  # type: ignore[attr-defined]
    until_idle(llm)
    assert stats(llm).steps - steps < 900
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([PROMPT, ""], None, "a prompt is empty"),
        ([[5, 384]], None, r"prompt\[1\] is 384, expected a token id from 0 to 383"),
        ([PROMPT], SamplingParams(temperature=-1), "temperature is -1"),
        ([PROMPT], SamplingParams(max_tokens=0), "max_tokens is 0"),
        ([PROMPT], SamplingParams(top_p=float("nan")), "top_p is nan"),
        ([PROMPT, PROMPT], [SamplingParams()], "1 sampling parameters for 2 prompts"),
        ([PROMPT, PROMPT], [SamplingParams(), SamplingParams(seed=1 << 70)], "seed is "),
        ([PROMPT, [5] * 1024], None, "prompt has 1024 tokens"),
        ([PROMPT, [5, "x"]], None, r"prompt\[1\] is 'x', expected a token id"),
        ([PROMPT, 7], None, "a prompt is 7, expected a text or a list of token ids"),
        ([7.0, 8.0], None, "a prompt is 7.0, expected a text or a list of token ids"),
    ],
)
def test_errors_come_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    until_idle(llm)
    before = stats(llm).prompt_tokens
    with pytest.raises(TritiumError, match=message) as caught:
        llm.generate(prompts, params)
    assert caught.value.code is Code.INVALID_ARGUMENT
    llm.generate("a", GREEDY)
    assert stats(llm).prompt_tokens == before + len(llm.tokenizer.encode("a"))


def test_stream_refuses_before_it_begins(llm: LLM) -> None:
    with pytest.raises(TritiumError, match="temperature is -1"):
        next(iter(llm.stream(PROMPT, SamplingParams(temperature=-1))))


def test_wrong_models_and_settings(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match="'max_batch' is not a setting of the engine"):
        LLM(tiny_checkpoint, max_batch=3)
    with pytest.raises(TritiumError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(TritiumError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(TritiumError, match="max_rows is 0"):
        LLM(tiny_checkpoint, max_rows=0)


def test_a_script_that_forgets_to_close_ends(tiny_checkpoint: Path) -> None:
    script = (
        "import sys\nfrom tritium import LLM, SamplingParams\nllm = LLM(sys.argv[1], dtype='float32')\n"
        "print(len(llm.generate(['hello'], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_checkpoint)],
        capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "Traceback" not in done.stderr
