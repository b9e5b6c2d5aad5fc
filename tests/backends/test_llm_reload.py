"""A language model whose settings change while it serves: its engine stays, with its weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.serving.support import refused, serving, until
from tests.tiny import make_checkpoint
from tritium.backends.llm import LlmBackend
from tritium.errors import Code
from tritium.llm.types import GenerateRequest, SamplingParams
from tritium.serving import swap
from tritium.serving.memory import Free
from tritium.serving.server import Server
from tritium.types import InferRequest, Tensor

CONFIG = 'backend: "tritium" max_batch_size: 2 parameters { key: "dtype" value { string_value: "float32" } }\n'
QUEUE = """dynamic_batching { max_queue_delay_microseconds: %d priority_levels: 3 default_priority_level: 2
  default_queue_policy { max_queue_size: %d default_timeout_microseconds: %d } }"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    make_checkpoint(folder / "m" / "1")
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    return folder


def backend(server: Server) -> LlmBackend:
    found = server._catalog.find("m", "").text_backend()
    assert isinstance(found, LlmBackend)
    return found


def sequence(count: int, id: str = "g") -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return GenerateRequest(id=id, tokens=[5, 6, 7], params=params, arrived_ns=time.monotonic_ns())


async def tokens(server: Server, request: GenerateRequest) -> list[int]:
    return [token async for delta in server.generate("m", "", request) for token in delta.tokens]


async def test_queue_and_sampling_values_reach_the_live_engine(repository: Path):
    async with serving(repository, control="explicit", load_models=["m"]) as server:
        pid = backend(server)._engines[0].pid
        expected = await tokens(server, sequence(5))
        running = [asyncio.create_task(tokens(server, sequence(60, str(n)))) for n in range(2)]
        await until(lambda: backend(server).engine_stats()[0].running == 2)
        (repository / "m" / "triton_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
        (repository / "m" / "config.pbtxt").write_text(CONFIG + QUEUE % (1000, 1, 0))
        await server.load("m")
        assert server.text_model("m").sampling_defaults == {"temperature": 0.25, "top_k": 7}
        more = [asyncio.create_task(tokens(server, sequence(60, f"w{n}"))) for n in range(6)]
        found = await asyncio.gather(*more, return_exceptions=True)
        # Two run, one or so waits, the others are refused.
        assert any("Exceeds maximum queue size" in str(one) for one in found)
        assert all(len(one) == 60 for one in await asyncio.gather(*running))
        assert await tokens(server, sequence(5)) == expected
        assert backend(server)._engines[0].pid == pid
        assert server.model_config("m").to_json()["dynamic_batching"]["priority_levels"] == 3
        # A successor of the engine is told too.
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: backend(server)._engines[0].pid not in (None, pid))
        assert await tokens(server, sequence(5)) == expected
        more = [asyncio.create_task(tokens(server, sequence(60, f"x{n}"))) for n in range(8)]
        found = await asyncio.gather(*more, return_exceptions=True)
        assert any("Exceeds maximum queue size" in str(one) for one in found)


async def test_an_idle_engine_waits_as_long_as_it_is_told_now(repository: Path):
    async with serving(repository, control="explicit", load_models=["m"]) as server:
        await tokens(server, sequence(1))
        (repository / "m" / "config.pbtxt").write_text(CONFIG + QUEUE % (700_000, 0, 0))
        await server.load("m")
        begun = time.monotonic()
        await tokens(server, sequence(1))
        assert time.monotonic() - begun > 0.6
        (repository / "m" / "config.pbtxt").write_text(CONFIG + QUEUE % (700_000, 0, 1000))
        await server.load("m")
        assert "Request timeout expired" in (await refused(tokens(server, sequence(1)))).message


async def test_what_the_engine_is_built_from_takes_a_load(repository: Path):
    async with serving(repository, control="explicit", load_models=["m"]) as server:
        pid = backend(server)._engines[0].pid
        (repository / "m" / "config.pbtxt").write_text(CONFIG.replace("max_batch_size: 2", "max_batch_size: 3"))
        await server.load("m")
        assert backend(server)._engines[0].pid not in (None, pid)
        assert backend(server).engine_info().max_rows == 3


async def test_wrong_sampling_values_leave_the_engine_as_it_is(repository: Path):
    async with serving(repository, control="explicit", load_models=["m"]) as server:
        (repository / "m" / "triton_config.json").write_text(json.dumps({"top_p": 7}))
        error = await refused(server.load("m"))
        assert error.code is Code.INVALID_ARGUMENT and "top_p" in error.message
        prompt = Tensor.from_strings("text_input", [b"a"], (1, 1))
        limit = Tensor.from_numpy("max_tokens", np.array([[2]], np.int32))
        request = InferRequest("m", "", "", {"text_input": prompt, "max_tokens": limit}, [], time.monotonic_ns())
        assert (await server.infer(request)).error is None


async def test_without_memory_for_two_engines_the_old_one_leaves_first(
    repository: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(repository, control="explicit", load_models=["m"]) as server:
        old = backend(server)
        need = (await old.footprint(old.context)).host
        budget = old.engine_info().budget
        assert need == budget.weights_bytes + budget.activations_bytes + budget.kv_bytes

        async def nearly_enough(gpus: object) -> Free:
            return Free(need)

        monkeypatch.setattr(swap, "free", nearly_enough)
        pid = old._engines[0].pid
        expected = await tokens(server, sequence(5))
        config = CONFIG + 'parameters { key: "num_blocks" value { string_value: "1000000000000" } }'
        (repository / "m" / "config.pbtxt").write_text(config)
        error = await refused(server.load("m"))
        assert "num_blocks" in error.message or "blocks" in error.message
        # The old configuration is back, in a new engine.
        assert backend(server)._engines[0].pid not in (None, pid)
        assert await tokens(server, sequence(5)) == expected
        config = CONFIG + 'parameters { key: "num_blocks" value { string_value: "64" } }'
        (repository / "m" / "config.pbtxt").write_text(config)
        await server.load("m")
        assert backend(server).engine_info().budget.num_blocks == 64
        assert await tokens(server, sequence(5)) == expected
