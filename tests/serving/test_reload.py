"""Reloads: settings that a live model follows, loads beside it, and loads in its place."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.backends.python_models import HEAD
from tests.serving.fakes import ECHO, Echo, request, write_model
from tests.serving.support import ALL, FAIL, refused, serving, touch, until
from tritium.backends.base import Footprint
from tritium.backends.config import DynamicBatching, Oldest, SequenceBatching
from tritium.errors import Code
from tritium.serving import swap
from tritium.serving.dynamic import DEPTH
from tritium.serving.memory import Free
from tritium.serving.server import Server
from tritium.types import InferRequest, SequenceRef

CODE = """
import os


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if "sleep" in json.loads(request.parameters()):
                time.sleep(json.loads(request.parameters())["sleep"])
            out = [pb_utils.Tensor("OUT", value), pb_utils.Tensor("PID", np.full((1, 1), os.getpid(), np.int32))]
            answers.append(pb_utils.InferenceResponse(out))
        return answers
"""
PYTHON = """
backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
"""
WITHOUT_PID = 'output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }\n'
SEQUENCE = 'sequence_batching { %s control_input { name: "S" control { kind: CONTROL_SEQUENCE_START %s } } }'


def write(repository: Path, more: str = "", name: str = "demo", versions: tuple[str, ...] = ("1",)) -> Path:
    folder = write_model(repository, name, PYTHON + more, versions)
    for version in versions:
        if not (folder / version / "model.py").exists():
            (folder / version / "model.py").write_text(HEAD + CODE)
    return folder


def ask(name: str = "demo", version: str = "", **parameters: object) -> InferRequest:
    made = request(name, version=version, **parameters)
    made.outputs = []
    return made


async def pid(server: Server, version: str = "") -> int:
    answer = await server.infer(ask(version=version))
    return int(next(tensor for tensor in answer.outputs if tensor.name == "PID").numpy().item())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of the log that say how a model was replaced."""
    lines: list[str] = []
    paths = ("settings applied, weights kept", "loaded beside", "drained, then loaded")

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(path for path in paths if record.getMessage().startswith(path))

    handler = Listener(logging.INFO)
    root = logging.getLogger("tritium")
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lines  # type: ignore[misc]
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


async def test_batching_and_queues_change_under_requests_that_wait(repository: Path, said: list[str]):
    write(repository)
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        before = await pid(server)
        running = asyncio.create_task(server.infer(ask(sleep=0.3)))
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(server.infer(ask(id=str(n)))) for n in range(DEPTH + 2)]
        await asyncio.sleep(0.05)
        write(repository, "dynamic_batching { default_queue_policy { max_queue_size: 2 } preserve_ordering: true }")
        await server.load("demo")
        # They were let in under the old rules; a new one finds the queue full.
        assert (await refused(server.infer(ask()))).message.endswith("Exceeds maximum queue size")
        answers = await asyncio.gather(running, *waiting)
        assert len(answers) == DEPTH + 3
        assert await pid(server) == before
        config = server.model_config("demo")
        assert isinstance(config.batching, DynamicBatching) and config.batching.preserve_order
        assert config.to_json()["dynamic_batching"]["preferred_batch_size"] == [4]
        # The first ran alone, and so did those that waited in front of the instance; the other three had not left the
        # queue and ran together. Two more asked for the pid.
        assert server.statistics("demo")[0].execution_count == DEPTH + 1 + 2
    assert said == ["settings applied, weights kept"]


@pytest.mark.parametrize(
    "more",
    [
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
        "instance_group { name: 'demo' rate_limiter { priority: 3 } }",
        "response_cache { enable: true }",
        "metric_tags { key: 'team' value: 'a' }",
        "version_policy { all { } }",
        "model_warmup { name: 'w' batch_size: 1 "
        "inputs { key: 'IN' value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }",
    ],
)
async def test_settings_that_a_live_model_follows(repository: Path, said: list[str], more: str):
    write(repository, "instance_group { name: 'demo' }")
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        before = await pid(server)
        write(repository, more if "instance_group" in more else "instance_group { name: 'demo' }" + more)
        await server.load("demo")
        assert await pid(server) == before
        await server.load("demo")
    assert said == ["settings applied, weights kept"]


async def test_labels_are_read_again(repository: Path, said: list[str]):
    folder = write_model(repository, "demo", PYTHON.replace("TYPE_INT32", 'TYPE_INT32 label_filename: "labels"'))
    (folder / "1" / "model.py").write_text(HEAD + CODE)
    (folder / "labels").write_text("a\nb\n")
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        (folder / "labels").write_text("one\ntwo\n")
        await server.load("demo")
        assert server.model_config("demo").outputs[-1].labels == ("one", "two")
    assert said == ["settings applied, weights kept"]


@pytest.mark.parametrize(
    "more",
    [
        "parameters { key: 'a' value { string_value: 'b' } }",
        "instance_group { count: 2 }",
        "model_transaction_policy { decoupled: false }",
        "input { name: 'MORE' data_type: TYPE_INT32 dims: [ 1 ] optional: true }",
        SEQUENCE % ("", "int32_false_true: [ 0, 1 ]"),
    ],
)
async def test_what_reaches_the_model_takes_a_load(repository: Path, said: list[str], more: str):
    write(repository)
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        before = await pid(server)
        write(repository, more)
        await server.load("demo")
        if "sequence" not in more:
            assert await pid(server) != before
    assert said == ["loaded beside"]


async def test_files_take_a_load_but_only_of_their_version(repository: Path, said: list[str]):
    folder = write(repository, ALL, versions=("1", "2"))
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        first, second = await pid(server, "1"), await pid(server, "2")
        (folder / "2" / "model.py").write_text(HEAD + CODE + "\n# another\n")
        await server.load("demo")
        assert await pid(server, "1") == first
        assert await pid(server, "2") != second
        second = await pid(server, "2")
        write(repository, ALL, versions=("3",))
        await server.load("demo")
        assert await pid(server, "2") == second
        assert await pid(server) not in (first, second)
        write(repository, "version_policy { specific { versions: [ 1, 3 ] } }")
        await server.load("demo")
        assert await pid(server, "1") == first
        assert not server.model_ready("demo", "2")
    assert said == ["loaded beside", "settings applied, weights kept"]


async def test_sequences_go_on_when_their_waits_change(repository: Path, said: list[str]):
    def sequences(strategy: str) -> str:
        return SEQUENCE % (strategy, "int32_false_true: [ 0, 1 ]")

    def step(start: bool, end: bool) -> InferRequest:
        made = ask()
        made.inputs = {"IN": made.inputs["IN"]}
        made.sequence = SequenceRef(7, start, end)
        return made

    write(repository, sequences("oldest { max_candidate_sequences: 4 }"))
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        await server.infer(step(True, False))
        write(repository, sequences("oldest { max_candidate_sequences: 4 preserve_ordering: true }"))
        await server.load("demo")
        await server.infer(step(False, True))
        batching = server.model_config("demo").batching
        assert isinstance(batching, SequenceBatching) and isinstance(batching.strategy, Oldest)
        assert batching.strategy.preserve_order
        write(repository, sequences("oldest { max_candidate_sequences: 2 }"))
        await server.load("demo")
    assert said == ["settings applied, weights kept", "loaded beside"]


async def test_settings_that_are_wrong_change_nothing(repository: Path):
    group = "instance_group { name: 'demo' rate_limiter { resources { name: 'R' count: %d } } }"
    write(repository, group % 1)
    limits = {"rate_limiter": swap_limiter()}
    async with serving(repository, control="explicit", load_models=["demo"], **limits) as server:
        before = await pid(server)
        write(repository, group % 9)
        error = await refused(server.load("demo"))
        assert error.code is Code.INVALID_ARGUMENT
        assert "version 1 is at UNAVAILABLE state" in error.message and "limited to 2" in error.message
        assert await pid(server) == before
        write(repository, group % 2)
        await server.load("demo")
        assert await pid(server) == before


def swap_limiter() -> object:
    from tritium.serving.limiter import RateLimiter

    return RateLimiter(True, {("R", -1): 2})


async def test_a_configuration_in_a_request_is_followed_too(repository: Path, said: list[str]):
    write(repository)
    async with serving(repository, control="explicit", load_models=["demo"]) as server:
        before = await pid(server)
        override = server.model_config("demo").to_json()
        await server.load("demo", json.dumps({**override, "dynamic_batching": {"max_queue_delay_microseconds": 5}}))
        assert await pid(server) == before
        await server.load("demo")
        assert isinstance(server.model_config("demo").batching, DynamicBatching)
    assert said == ["settings applied, weights kept"]


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a second copy of anything does not fit."""

    async def footprint(self: Echo, context: object) -> Footprint:
        return Footprint(2 << 30)

    async def nearly_nothing(gpus: object) -> Free:
        return Free(1 << 30)

    monkeypatch.setattr(Echo, "footprint", footprint)
    monkeypatch.setattr(swap, "free", nearly_nothing)


@pytest.mark.usefixtures("_short")
async def test_without_memory_for_both_the_old_one_leaves_first(repository: Path, said: list[str]):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        running = asyncio.create_task(server.infer(request(hang=True)))
        await until(lambda: bool(Echo.made[0].seen))
        Echo.load_gate = asyncio.Event()
        touch(repository)
        load = asyncio.create_task(server.load("echo"))
        await until(lambda: not server.model_ready("echo"))
        error = await refused(server.infer(request()))
        assert (error.code, error.retry_after_s) == (Code.UNAVAILABLE, 1.0)
        assert error.message == "Request for unknown model: 'echo' is being loaded again"
        assert not server.ready()
        assert not Echo.made[0].unloads  # a request runs
        Echo.made[0].gate.set()
        assert (await running).error is None
        await until(lambda: len(Echo.made) == 2 and Echo.made[1].loads == 1)
        assert Echo.made[0].unloads
        Echo.load_gate.set()
        await load
        assert (await server.infer(request())).error is None
        assert server.ready()
    assert said == ["drained, then loaded"]


@pytest.mark.usefixtures("_short")
async def test_what_has_left_comes_back_when_the_new_one_fails(repository: Path, said: list[str]):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        write_model(repository, "echo", FAIL % "all")
        error = await refused(server.load("echo"))
        assert "load refuses on purpose" in error.message
        assert [echo.loads for echo in Echo.made] == [1, 1, 1]
        assert (await server.infer(request())).error is None
        assert server.model_config("echo").parameters == {}
        assert "echo" in server.failures()
        write_model(repository, "echo", ECHO)
        await server.load("echo")
        assert server.failures() == {}
    assert said == []  # nothing is left to change


@pytest.mark.usefixtures("_short")
async def test_an_unload_while_it_is_away_wins(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        Echo.load_gate = asyncio.Event()
        touch(repository)
        load = asyncio.create_task(server.load("echo"))
        await until(lambda: len(Echo.made) == 2)
        await server.unload("echo")
        Echo.load_gate.set()
        await load
        assert not server.model_ready("echo")
        assert "no available versions" in (await refused(server.infer(request()))).message


async def test_a_fresh_version_beside_others_drains_nobody(repository: Path, monkeypatch: pytest.MonkeyPatch):
    async def nothing(gpus: object) -> Free:
        return Free(0)

    monkeypatch.setattr(swap, "free", nothing)
    write_model(repository, "echo", ECHO + ALL)
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        write_model(repository, "echo", ECHO + ALL, ("2",))
        (repository / "echo" / "2" / "x").touch()
        await server.load("echo")
        assert server.model_ready("echo", "1") and server.model_ready("echo", "2")
