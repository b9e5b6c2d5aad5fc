"""Ensembles in a repository: how their steps come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.serving.fakes import ECHO, Echo, request, write_model
from tests.serving.support import refused, serving, until
from tritium.errors import Code

PAIR = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "m" } }
  step { model_name: "b" model_version: 1 input_map { key: "IN" value: "m" } output_map { key: "OUT" value: "OUT" } }
}
"""


def write_pair(repository: Path) -> None:
    write_model(repository, "a", ECHO.replace("echo", "echo"))
    write_model(repository, "b", ECHO)
    write_model(repository, "pair", PAIR)


async def test_loading_an_ensemble_loads_its_steps(repository: Path):
    write_pair(repository)
    async with serving(repository, control="explicit", load_models=["pair"]) as server:
        assert all(server.model_ready(name) for name in ("a", "b", "pair"))
        answer = await server.infer(request("pair"))
        assert answer.outputs[0].numpy().tolist() == [[0, 1]]
        assert server.model_config("pair").to_json()["ensemble_scheduling"]["step"][0]["model_name"] == "a"


async def test_an_ensemble_goes_with_its_step_and_comes_back_with_it(repository: Path):
    write_pair(repository)
    async with serving(repository, control="explicit", load_models=["pair"]) as server:
        await server.unload("a")
        await until(lambda: [e.reason for e in server.index() if e.name == "pair"] == ["unloaded"])
        assert (await refused(server.infer(request("pair")))).code is Code.NOT_FOUND
        assert server.model_ready("b")
        await server.load("a")
        assert server.model_ready("pair")
        await server.infer(request("pair"))


async def test_unload_dependents_spares_what_was_loaded_by_name(repository: Path):
    write_pair(repository)
    async with serving(repository, control="explicit", load_models=["pair", "b"]) as server:
        await server.unload("pair", unload_dependents=True)
        assert [server.model_ready(name) for name in ("pair", "a", "b")] == [False, False, True]
        await server.load("a")
        assert not server.model_ready("pair")


async def test_a_step_that_cannot_be_had(repository: Path):
    write_pair(repository)
    write_model(repository, "a", ECHO + 'parameters { key: "fail" value { string_value: "all" } }')
    async with serving(repository, control="explicit") as server:
        error = await refused(server.load("pair"))
        assert error.message == (
            "load failed for model 'pair': ensemble pair contains models that are not available or ambiguous: a\n"
        )
        assert [(e.version, e.state) for e in server.index() if e.name == "pair"] == [("", "")]


async def test_a_step_with_other_tensors_takes_its_ensemble_out_of_service(repository: Path):
    write_pair(repository)
    async with serving(repository, control="explicit", load_models=["pair"]) as server:
        write_model(repository, "a", ECHO.replace("FP32", "INT32"))
        await server.load("a")
        assert not server.model_ready("pair")
        assert "inconsistent data type" in server.failures()["pair"]


async def test_ensembles_of_each_other(repository: Path):
    write_pair(repository)
    write_model(repository, "a", PAIR.replace('"a"', '"pair"'))
    async with serving(repository, control="explicit") as server:
        assert (await refused(server.load("pair"))).code is Code.INVALID_ARGUMENT
        assert "circular dependency between ensembles: pair -> a -> pair" in server.failures()["a"]


async def test_draining_lets_an_ensemble_take_its_remaining_steps(repository: Path):
    write_pair(repository)
    async with serving(repository, control="explicit", load_models=["pair"]) as server:
        running = asyncio.create_task(server.infer(request("pair", hang=1)))
        await until(lambda: any(made.seen for made in Echo.made))
        drain = asyncio.create_task(server.drain(5))
        await until(lambda: server.draining)
        assert (await refused(server.infer(request("b")))).code is Code.UNAVAILABLE
        for made in Echo.made:
            made.gate.set()
        assert (await running).outputs[0].numpy().tolist() == [[0, 1]]
        await drain
