from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.serving.fakes import ECHO, Echo, request, sequence, write_model
from tests.serving.support import ALL, FAIL, refused, serving, touch, until
from tritium.errors import Code
from tritium.observability.metrics import Metrics
from tritium.serving.server import IndexEntry, Server
from tritium.serving.views import in_words


async def test_explicit_mode(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "late")
    async with serving(repository, control="explicit", load_models=["echo", "echo"]) as server:
        assert server.index() == [IndexEntry("echo", "1", "READY", ""), IndexEntry("late", "", "", "")]
        assert server.index(ready_only=True) == [IndexEntry("echo", "1", "READY", "")]
        assert not server.model_ready("late")
        await server.load("late")
        assert server.model_ready("late") and server.ready()
        await server.infer(request("late"))
        await server.unload("late")
        await server.unload("late")
        await server.unload("nope", unload_dependents=True)
        assert not server.model_ready("late")
        assert (await refused(server.infer(request("late")))).message == (
            "Request for unknown model: 'late' has no available versions"
        )
        await until(lambda: server.index()[1].state == "UNAVAILABLE")
        assert server.index()[1] == IndexEntry("late", "1", "UNAVAILABLE", "unloaded")
        assert server.ready()
        assert (await refused(server.infer(request("late", version="1")))).code is Code.UNAVAILABLE
        await server.load("late")
        assert server.model_ready("late") and len(Echo.made) == 3


async def test_all_models_in_explicit_mode(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "late")
    async with serving(repository, control="explicit", load_models=["*"]) as server:
        assert server.model_ready("echo") and server.model_ready("late")


async def test_namespaces_are_refused_where_they_would_matter(repository: Path, tmp_path: Path):
    """Two models of one name are an error in any case; where namespaces are asked for, it is one of the start."""
    other = tmp_path / "other"
    write_model(repository, "echo")
    write_model(other, "late")
    async with serving(repository, other, namespacing=True) as server:
        assert server.model_ready("echo") and server.model_ready("late")
    write_model(other, "echo")
    error = await refused(Server([repository, other], namespacing=True).start())
    assert error.code is Code.UNIMPLEMENTED and error.message.startswith("--model-namespacing: echo lie in more than")
    async with serving(repository, other, strict_readiness=False) as server:
        assert server.model_ready("late") and not server.model_ready("echo")
        assert "2 repositories have a folder of that name" in server.failures()["echo"]


async def test_a_load_without_changes_does_nothing_and_one_with_changes_swaps(repository: Path):
    write_model(repository, "echo")
    metrics = Metrics()
    async with serving(repository, control="explicit", load_models=["echo"], metrics=metrics) as server:
        await server.infer(request())
        await server.load("echo")
        assert len(Echo.made) == 1
        running = asyncio.create_task(server.infer(request(hang=1)))
        await until(lambda: len(Echo.made[0].seen) == 2)
        touch(repository)
        await server.load("echo")
        old, new = Echo.made
        assert old.up and new.up and server.ready()
        await server.infer(request())
        assert (len(old.seen), len(new.seen)) == (2, 1)
        assert server.statistics("echo")[0].success.count == 1
        old.gate.set()
        await running
        await until(lambda: old.unloads == 1)
        assert new.up and server.model_ready("echo")
        assert 'nv_inference_request_success{model="echo",version="1"} 1.0' in metrics.render().decode()


async def test_versions_follow_the_folders(repository: Path):
    write_model(repository, "echo", ECHO + ALL, versions=("1", "2"))
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        (repository / "echo" / "1").rmdir()
        (repository / "echo" / "3").mkdir()
        (repository / "echo" / "3" / "weights").touch()
        await server.load("echo")
        assert server.model_metadata("echo").versions == ("2", "3")


async def test_a_configuration_in_the_request_is_kept_by_a_plain_load(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        override = (
            '{"backend": "echo", "max_batch_size": 5, "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}]}'
        )
        await server.load("echo", override)
        assert server.model_config("echo").max_batch_size == 5
        await server.load("echo")
        assert server.model_config("echo").max_batch_size == 5
        await server.unload("echo")
        await server.load("echo")
        assert server.model_config("echo").max_batch_size == 4
        error = await refused(server.load("echo", "{", {}))
        assert error.code is Code.INTERNAL and "failed to poll" in error.message
        error = await refused(server.load("echo", None, {"1/model.py": b""}))
        assert error.code is Code.INTERNAL and "failed to poll" in error.message
        assert server.model_ready("echo")


async def test_a_failed_load_leaves_the_others(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "bad", FAIL % "all")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        error = await refused(server.load("bad"))
        assert error.code is Code.INVALID_ARGUMENT
        assert error.message == (
            "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: load refuses on purpose;\n"
        )
        line = IndexEntry("bad", "1", "UNAVAILABLE", "Internal: load refuses on purpose")
        assert server.index()[0] == line
        assert server.failures() == {"bad": "version 1: Internal: load refuses on purpose"}
        assert not server.ready() and server.model_ready("echo")
        await server.infer(request())
        # As recorded: an unload does not mend it, a load that succeeds does.
        await server.unload("bad")
        assert server.index()[0] == line and not server.ready()
        write_model(repository, "bad", ECHO)
        await server.load("bad")
        assert server.ready() and server.failures() == {}


def said_of_failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(r, "fields") for r in caplog.records if r.levelname == "ERROR"]  # noqa: B009


async def test_a_load_that_fails_is_logged_once(repository: Path, caplog: pytest.LogCaptureFixture):
    write_model(repository, "bad", FAIL % "all", versions=("1",))
    line = {"model": "bad", "reason": "version 1: Internal: load refuses on purpose"}
    async with serving(repository, control="explicit") as server:
        await refused(server.load("bad"))
        assert said_of_failures(caplog) == [line]
        # Also when nobody waits for it any more.
        caplog.clear()
        call = asyncio.create_task(server.load("bad"))
        await asyncio.sleep(0)
        call.cancel()
        await until(lambda: said_of_failures(caplog) == [line])
        caplog.clear()
        await refused(server.load("none\nof these"))
        (found,) = said_of_failures(caplog)
        assert found["model"] == "none\nof these" and "failed to poll" in str(found["reason"])
    caplog.clear()
    async with serving(repository):
        assert said_of_failures(caplog) == [line]


def test_reasons_in_words():
    told = "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: a;\n" + (
        "version 2 is at UNAVAILABLE state: Internal: b\nc;\n"
    )
    assert in_words("m", told) == "version 1: Internal: a; version 2: Internal: b c"
    assert in_words("m", "failed to load 'm'") == "failed to load 'm'"


async def test_all_versions_or_none(repository: Path):
    write_model(repository, "echo", FAIL % "2" + ALL, versions=("1", "2"))
    async with serving(repository) as server:
        assert not server.ready()
        assert server.index() == [
            IndexEntry("echo", "1", "UNAVAILABLE", "unloaded"),
            IndexEntry("echo", "2", "UNAVAILABLE", "Internal: load refuses on purpose"),
        ]
        assert server.failures()["echo"] == "version 2: Internal: load refuses on purpose"
        assert not any(backend.up for backend in Echo.made)


async def test_a_failed_reload_leaves_the_old_one_serving(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        for text in (FAIL % "all", "no_such_field: 3"):
            write_model(repository, "echo", text)
            await refused(server.load("echo"))
            assert server.model_ready("echo") and server.ready()
            assert "echo" in server.failures()
            await server.infer(request())
        assert Echo.made[0].up
        write_model(repository, "echo", ECHO + " ")
        await server.load("echo")
        assert server.failures() == {}


async def test_configurations_that_cannot_be_read(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "bad", "no_such_field: 3")
    write_model(repository, "none", versions=())
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        error = await refused(server.load("bad"))
        assert error.code is Code.INTERNAL
        assert error.message.startswith(
            "failed to load 'bad', failed to poll from model repository: bad/config.pbtxt:1:1"
        )
        error = await refused(server.load("none"))
        assert error.code is Code.INVALID_ARGUMENT
        # As recorded: the first has a line without state, the second none at all.
        assert server.index() == [IndexEntry("bad", "", "", ""), IndexEntry("echo", "1", "READY", "")]
        for name in ("nope", "", "../models/echo"):
            error = await refused(server.load(name))
            assert error.message.startswith(f"failed to load '{name}', failed to poll from model repository")
        assert sorted(server.failures()) == ["bad", "none"]


async def test_failures_at_the_start_make_it_not_ready(repository: Path, tmp_path: Path):
    write_model(repository, "echo")
    write_model(repository, "twice")
    write_model(tmp_path / "more", "twice")
    async with serving(repository, tmp_path / "more") as server:
        assert server.model_ready("echo") and not server.ready()
        assert "2 repositories" in server.failures()["twice"]
    async with serving(repository, control="explicit", load_models=["nope"], strict_readiness=False) as server:
        assert server.ready() and "nope" in server.failures()


async def test_a_repository_that_is_not_there(tmp_path: Path):
    error = await refused(Server([tmp_path / "gone"]).start())
    assert error.code is Code.NOT_FOUND


async def test_ready_only_after_the_start_and_with_progress(repository: Path):
    write_model(repository, "echo")
    server = Server([repository])
    assert not server.ready()
    await server.start()
    assert server.ready()
    Echo.made[0].up = False
    assert not server.ready() and not server.model_ready("echo")
    await server.drain(0)


async def test_a_model_that_is_loading(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "slow")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        Echo.load_gate = asyncio.Event()
        first = asyncio.create_task(server.load("slow"))
        await until(lambda: server.index()[1].state == "LOADING")
        second = asyncio.create_task(server.load("slow"))
        assert not server.ready() and not server.model_ready("slow")
        await server.infer(request())
        await asyncio.sleep(0.02)
        Echo.load_gate.set()
        await asyncio.gather(first, second)
        assert len(Echo.made) == 2 and server.ready()


async def test_the_client_of_a_load_may_leave(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "bad", FAIL % "all")
    async with serving(repository, control="explicit") as server:
        for name in ("echo", "bad"):
            Echo.load_gate = asyncio.Event()
            task = asyncio.create_task(server.load(name))
            await until(lambda name=name: any(e.name == name and e.state == "LOADING" for e in server.index()))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            Echo.load_gate.set()
            await until(lambda name=name: server.model_ready(name) or name in server.failures())
        assert server.model_ready("echo")


async def test_an_unload_during_a_load_wins(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit") as server:
        Echo.load_gate = asyncio.Event()
        task = asyncio.create_task(server.load("echo"))
        await until(lambda: bool(Echo.made))
        await server.unload("echo")
        Echo.load_gate.set()
        await task
        assert not server.model_ready("echo")
        await until(lambda: Echo.made[0].unloads == 1)
        assert server.index()[0].reason == "unloaded" and server.ready()


async def test_loads_are_limited(repository: Path):
    for index in range(5):
        write_model(repository, f"m{index}")
    Echo.load_gate = asyncio.Event()
    server = Server([repository], load_limit=2)
    task = asyncio.create_task(server.start())
    await until(lambda: len(Echo.made) == 2)
    await asyncio.sleep(0.05)
    assert len(Echo.made) == 2
    Echo.load_gate.set()
    await task
    assert len(Echo.made) == 5 and server.ready()
    await server.drain(0)


async def test_draining_finishes_what_runs(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        running = asyncio.create_task(server.infer(request(hang=1, id="r")))
        await until(lambda: bool(Echo.made[0].seen))
        drain = asyncio.create_task(server.drain(5))
        await until(lambda: server.draining)
        assert server.live() and not server.ready() and not server.model_ready("echo")
        for call in (
            server.infer(request()),
            anext(server.infer_stream(request())),
            anext(server.generate("echo", "", sequence())),
            server.load("echo"),
            server.unload("echo"),
        ):
            error = await refused(call)
            assert (error.code, error.message) == (Code.UNAVAILABLE, "server is draining")
        assert not drain.done()
        Echo.made[0].gate.set()
        assert (await running).id == "r"
        await drain
        assert Echo.made[0].unloads == 1


async def test_draining_cuts_off_what_runs_too_long(repository: Path):
    write_model(repository, "echo")
    async with serving(repository) as server:
        running = asyncio.create_task(server.infer(request(hang=1)))
        await until(lambda: bool(Echo.made[0].seen))
        await server.drain(0.02)
        assert (await refused(running)).code is Code.UNAVAILABLE


async def test_draining_gives_up_loads(repository: Path):
    write_model(repository, "echo")
    write_model(repository, "slow")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        Echo.load_gate = asyncio.Event()
        touch(repository)
        tasks = [asyncio.create_task(server.load(name)) for name in ("slow", "echo")]
        await until(lambda: len(Echo.made) == 3)
        await server.drain(1)
        for task in tasks:
            assert (await refused(task)).code is Code.UNAVAILABLE
        assert not any(backend.up for backend in Echo.made)


async def test_draining_while_a_version_leaves(repository: Path):
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        running = asyncio.create_task(server.infer(request(hang=1)))
        await until(lambda: bool(Echo.made[0].seen))
        await server.unload("echo")
        await server.load("echo")
        await server.drain(0.02)
        assert (await refused(running)).code is Code.UNAVAILABLE
        assert [backend.unloads for backend in Echo.made] == [1, 1]
