"""A whole rank on tiny checkpoints: tokens against transformers, chunks, company, choices of device and type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import VOCAB, make_checkpoint
from tests.tiny_gguf import make_gguf
from tritium.errors import TritiumError
from tritium.llm.config import EngineConfig
from tritium.llm.kernels import ops
from tritium.llm.runner import ranks
from tritium.llm.runner.ranks import RankGroup, choose_device, choose_dtype, physical_cores
from tritium.llm.types import EngineInfo, NewRow, Resolved, RowStep, SamplingParams, ScheduledBatch, StepOutput

BLOCK = 4
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, length).tolist() for i, length in enumerate((1, 5, 16, 23, 40))]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("one") / "llama")


@pytest.fixture(autouse=True)
def usual_kernels() -> Iterator[None]:
    yield
    ops.choose("cpu", False)


def config(path: Path, **changes) -> EngineConfig:
    values = {"block_size": BLOCK, "max_rows": 8, "max_tokens_per_step": 64, "device": "cpu", "threads": 1}
    return EngineConfig(model=str(path), **(values | changes))


def loaded(path: Path, **changes) -> RankGroup:
    group = RankGroup(config(path, **changes))
    group.load()
    return group


class Driver:
    """Schedules by hand: every row computes up to ``chunk`` tokens of what it has left."""

    def __init__(self, group: RankGroup, chunk: int = 1000) -> None:
        self.group = group
        self.chunk = chunk
        self.step = 0
        self.next_block = 0
        self.sequences: dict[int, dict] = {}
        self.new: list[NewRow] = []
        self.freed: list[int] = []

    def add(self, row: int, tokens: list[int], params: SamplingParams, num_prompt: int | None = None) -> None:
        self.sequences[row] = {"tokens": list(tokens), "computed": 0, "blocks": 0}
        self.new.append(NewRow(row, list(tokens), num_prompt or len(tokens), [], params))

    def free(self, row: int) -> None:
        del self.sequences[row]
        self.freed.append(row)

    def run(self, order: list[int] | None = None) -> StepOutput:
        steps = []
        for row in order or list(self.sequences):
            seq = self.sequences[row]
            left = len(seq["tokens"]) - seq["computed"]
            count = min(left, self.chunk)
            needed = -(-(seq["computed"] + count) // BLOCK) - seq["blocks"]
            blocks = list(range(self.next_block, self.next_block + needed))
            self.next_block += needed
            seq["blocks"] += needed
            steps.append(RowStep(row, seq["computed"], count, blocks, count == left))
            seq["computed"] += count
        self.step += 1
        output = self.group.submit(ScheduledBatch(self.step, self.freed, self.new, steps, [])).result()
        self.new, self.freed = [], []
        for step, tokens in zip([s for s in steps if s.sample], output.tokens, strict=True):
            self.sequences[step.row]["tokens"] += tokens
        return output

    def generate(self, count: int) -> dict[int, list[int]]:
        """Until every row has ``count`` new tokens; rows that are ahead go on."""
        ends = {row: len(seq["tokens"]) + count for row, seq in self.sequences.items()}
        while any(len(self.sequences[row]["tokens"]) < end for row, end in ends.items()):
            self.run()
        return {row: self.sequences[row]["tokens"][end - count : end] for row, end in ends.items()}


GREEDY = SamplingParams(temperature=0.0)


def together(group: RankGroup, params: list[SamplingParams], count: int, chunk: int = 1000) -> list[list[int]]:
    driver = Driver(group, chunk)
    for row, (prompt, given) in enumerate(zip(PROMPTS, params, strict=True)):
        driver.add(row, prompt, given)
    return list(driver.generate(count).values())


def test_greedy_tokens_equal_transformers(checkpoint: Path) -> None:
    judge = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(int(judge(torch.tensor([tokens])).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    group = loaded(checkpoint, dtype="float32")
    assert together(group, [GREEDY] * len(PROMPTS), 12) == expected
    assert together(group, [GREEDY] * len(PROMPTS), 12, chunk=7) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode(checkpoint: Path, dtype: str) -> None:
    """Bit-equal draws alone, together, in chunks, and after a preemption."""
    group = loaded(checkpoint, dtype=dtype, deterministic=True)
    params = [SamplingParams(temperature=1.5, seed=i, logprobs=3, frequency_penalty=0.1 * i) for i in range(5)]
    whole = together(group, params, 8)
    for chunk in (1, 3, 16):
        assert together(group, params, 8, chunk=chunk) == whole
    for row, prompt in enumerate(PROMPTS):
        driver = Driver(group)
        driver.add(6, prompt, params[row])
        first = driver.generate(4)[6]
        driver.free(6)
        driver.add(3, prompt + first, params[row], num_prompt=len(prompt))
        assert first + driver.generate(4)[3] == whole[row]


def test_outputs_follow_the_batch(llama: Path) -> None:
    group = loaded(llama)
    driver = Driver(group)
    driver.add(2, PROMPTS[3], GREEDY)
    first = driver.run()
    driver.add(5, PROMPTS[2], replace_params(logprobs=2))
    driver.add(0, PROMPTS[1], GREEDY)
    output = driver.run(order=[5, 2, 0])  # a chunk before a row with one token
    alone = Driver(group)
    alone.add(1, PROMPTS[2], GREEDY)
    assert output.tokens[0] == alone.run().tokens[0]
    assert output.step == 2 and output.elapsed_ns > 0 and output.bad == []
    assert [entry is not None for entry in output.logprobs] == [True, False, False]
    entry = output.logprobs[0]
    assert entry is not None and entry[0].token == output.tokens[0][0] and len(entry[0].top) == 2
    assert first.logprobs == [None]


def replace_params(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | changes))


def test_a_step_without_a_draw(llama: Path) -> None:
    driver = Driver(loaded(llama), chunk=8)
    driver.add(0, PROMPTS[4], GREEDY)
    output = driver.run()
    assert output.tokens == [] and output.logprobs == [] and output.bad == []


def test_a_row_with_bad_logits(llama: Path) -> None:
    group = loaded(llama)
    runner = group._runner
    assert runner is not None
    driver = Driver(group)
    for row in range(3):
        driver.add(row, PROMPTS[row], GREEDY)
    logits = runner.model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        scores[1, 7] = float("nan")
        return scores

    runner.model.logits = poisoned
    output = driver.run(order=[0, 2, 1])
    assert output.bad == [2] and len(output.tokens) == 3


def test_info(llama: Path) -> None:
    group = RankGroup(config(llama, num_blocks=10))
    info = group.load()
    assert info.family == "llama" and info.device == "cpu" and info.vocab_size == VOCAB
    assert info.budget.num_blocks == 10 and info.max_length == 40
    assert any("lowered" in notice for notice in info.notices)
    assert info.startup.keys() == {"load_s", "warm_up_s"} and min(info.startup.values()) > 0
    assert info.kernels.startswith("cpu (") and group.model is not None and group.model.vocab == VOCAB
    group.close()
    with pytest.raises(TritiumError, match="not loaded"):
        group.submit(ScheduledBatch(1, [], [], [], []))


def test_an_error_waits_for_the_result(llama: Path) -> None:
    handle = loaded(llama).submit(ScheduledBatch(1, [], [], [RowStep(3, 0, 1, [], True)], []))
    with pytest.raises(RuntimeError, match="row 3"):
        handle.result()


def test_without_the_library(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = together(loaded(llama, dtype="float32"), [GREEDY] * 5, 6)
    monkeypatch.setattr(ops.cpu, "load", lambda: "no library today")
    group = RankGroup(config(llama, dtype="float32"))
    info = group.load()
    assert info.kernels == "torch" and "no library today" in info.notices
    assert together(group, [GREEDY] * 5, 6) == expected
    assert together(loaded(llama, dtype="float32", deterministic=True), [GREEDY] * 5, 6, chunk=5) == expected


def test_types() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    none: frozenset[str] = frozenset()
    assert choose_dtype("float16", "float32", cpu) == ("float16", "dtype is set to float16, the checkpoint is float32")
    assert choose_dtype("auto", "float32", cpu, none) == ("float32", "the checkpoint is float32")
    assert choose_dtype("auto", "bfloat16", cuda, none) == ("bfloat16", "the checkpoint is bfloat16")
    name, reason = choose_dtype("auto", "bfloat16", cpu, frozenset({"avx512_bf16"}))
    assert name == "bfloat16" and "has avx512_bf16" in reason
    name, reason = choose_dtype("auto", "bfloat16", cpu, none)
    assert name == "float32" and "lacks amx_bf16 or avx512_bf16" in reason
    fast = frozenset({"amx_bf16"})
    assert [
        choose_dtype("auto", "bfloat16", d, flags, quantized="Q4_1") for d, flags in ((cpu, fast), (cuda, none))
    ] == [
        ("bfloat16", "the checkpoint is Q4_1, dequantized to bfloat16: this CPU has amx_bf16"),
        ("bfloat16", "the checkpoint is Q4_1, dequantized to bfloat16"),
    ]
    name, reason = choose_dtype("auto", "bfloat16", cpu, none, quantized="Q4_1")
    assert name == "float32" and reason.startswith("the checkpoint is Q4_1, dequantized to float32, ")
    assert choose_dtype("float32", "bfloat16", cpu, quantized="Q4_1")[1].endswith("the checkpoint is Q4_1")


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_1"])
def test_what_a_file_is_said_to_be(tmp_path: Path, quant: str) -> None:
    info = loaded_info(make_gguf(tmp_path / "m.gguf", quant=quant))
    assert info.dtype_reason.startswith(f"the checkpoint is {'float32' if quant == 'F32' else quant}")


def loaded_info(path: Path, **changes) -> EngineInfo:
    return RankGroup(config(path, **changes)).load()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_plan_is_what_comes(tmp_path: Path, dtype: str, tied: bool, family: str) -> None:
    """The weights are counted before they are loaded; afterwards they are counted one by one."""
    folder = make_checkpoint(tmp_path / "m", family, tie_word_embeddings=tied, max_position_embeddings=300)
    group = RankGroup(config(folder, dtype=dtype, num_blocks=20))
    info = group.load()
    assert group._runner is not None
    assert info.budget.weights_bytes == group._runner.model.weights_bytes
    before = ranks.plan(config(folder, dtype=dtype, num_blocks=20)).info
    same = ("dtype", "dtype_reason", "device", "max_length", "max_rows", "vocab_size", "family", "resolved")
    assert [getattr(before, name) for name in same] == [getattr(info, name) for name in same]
    # What is free changes from moment to moment, and with it the margin alone.
    assert msgspec.structs.replace(before.budget, margin_bytes=0) == msgspec.structs.replace(
        info.budget, margin_bytes=0
    )


def test_what_was_left_open(llama: Path) -> None:
    info = ranks.plan(EngineConfig(model=str(llama))).info
    assert info.resolved["max_length"] == Resolved(info.max_length, "checkpoint")
    assert info.resolved["dtype"] == Resolved("float32", "checkpoint")
    assert info.resolved["num_blocks"] == Resolved(info.budget.num_blocks, "checkpoint, machine")
    given = config(llama, dtype="bfloat16", num_blocks=4, max_length=9)
    assert ranks.plan(given).info.resolved == {
        "kv_cache_bytes": Resolved(4 * BLOCK * info.budget.kv_bytes_per_token // 2, "from num_blocks")
    }
    shortened = ranks.plan(config(llama, num_blocks=2)).info
    assert shortened.resolved["max_length"] == Resolved(2 * BLOCK, "machine")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(TritiumError, match="device is cuda"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert physical_cores(tmp_path) == 4
    for cpu in range(4):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert physical_cores(tmp_path) == 2
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert physical_cores(tmp_path) == 1
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert physical_cores(tmp_path) == 2


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TritiumError):
        RankGroup(replace(config(tmp_path), model=str(tmp_path / "absent"))).load()
