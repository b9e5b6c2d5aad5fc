"""The engine on a CUDA device: its tokens are those of the CPU in float32, and the modes hold there too."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import VOCAB, make_checkpoint
from tritium.llm.config import DeviceName, EngineConfig
from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.runner.ranks import RankGroup
from tritium.llm.types import GenerateRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NEW_TOKENS = 24
PROMPTS = [np.random.default_rng(i).integers(3, VOCAB, length).tolist() for i, length in enumerate((1, 7, 16, 33, 90))]


@pytest.fixture(scope="module", params=["llama", "llama3", "mistral", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu") / request.param, request.param)


def answers(path: Path, device: DeviceName, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """Greedy continuations of all prompts, run together."""
    config = EngineConfig(model=str(path), device=device, kv_cache_bytes=1 << 24, **settings)  # type: ignore[arg-type]
    ranks = RankGroup(config)
    info = ranks.load()
    assert info.device == device
    scheduler = Scheduler(SchedulerConfig.of(config, info.max_length), info.budget.num_blocks)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        request = GenerateRequest(id=str(number), tokens=prompt, params=params, arrived_ns=time.monotonic_ns())
        assert scheduler.add(request, time.monotonic_ns()) is None
    found: list[list[int]] = [[] for _ in prompts]
    while (batch := scheduler.schedule(time.monotonic_ns())) is not None:
        for delta in scheduler.update(batch, ranks.submit(batch).result(), time.monotonic_ns()):
            found[int(delta.id)] += delta.tokens
    ranks.close()
    return found


def test_tokens_are_those_of_the_cpu(checkpoint: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert answers(checkpoint, "cuda", PROMPTS, dtype="float32") == answers(checkpoint, "cpu", PROMPTS, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_tokens_do_not_depend_on_company_or_chunks(checkpoint: Path, dtype: str) -> None:
    together = answers(checkpoint, "cuda", PROMPTS, dtype=dtype, deterministic=True)
    chunked = answers(checkpoint, "cuda", PROMPTS, dtype=dtype, deterministic=True, max_tokens_per_step=16, max_rows=8)
    alone = [answers(checkpoint, "cuda", [prompt], dtype=dtype, deterministic=True)[0] for prompt in PROMPTS]
    assert together == alone == chunked
