from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from tests.serving.fakes import ECHO, Echo, Text, request, sequence, write_model
from tests.serving.support import ALL, refused, serving
from tritium.errors import Code, TritiumError
from tritium.observability.metrics import Metrics
from tritium.serving.server import IndexEntry, Server, TensorMetadata


async def test_every_model_is_loaded_and_changes_are_refused(repository: Path):
    write_model(repository, "echo", ECHO + ALL, versions=("1", "3"))
    write_model(repository, "other")
    async with serving(repository) as server:
        assert server.live() and server.ready() and server.failures() == {}
        assert server.index() == [
            IndexEntry("echo", "1", "READY", ""),
            IndexEntry("echo", "3", "READY", ""),
            IndexEntry("other", "1", "READY", ""),
        ]
        assert (await server.infer(request())).version == "3"
        assert (await server.infer(request(version="1"))).version == "1"
        for call in (server.load("echo"), server.unload("echo")):
            error = await refused(call)
            assert error.code is Code.UNAVAILABLE and "is not allowed" in error.message
    assert [(e.state, e.reason) for e in server.index()] == [("UNAVAILABLE", "unloaded")] * 3
    assert all(backend.unloads == 1 for backend in Echo.made)


async def test_metadata(repository: Path):
    write_model(repository, "echo", ECHO + ALL, versions=("1", "2", "10"))
    write_model(
        repository, "flat", 'backend: "echo" platform: "p" input { name: "I" data_type: TYPE_STRING dims: [2, 3] }'
    )
    async with serving(repository, name="conformance") as server:
        about = server.server_metadata()
        assert about.name == "conformance" and about.version and "model_repository" in about.extensions
        found = server.model_metadata("echo")
        assert (found.name, found.versions, found.platform) == ("echo", ("1", "2", "10"), "echo")
        assert found.inputs == (TensorMetadata("IN", "FP32", (-1, -1)),)
        assert server.model_metadata("echo", "2").versions == ("2",)
        flat = server.model_metadata("flat")
        assert (flat.platform, flat.inputs) == ("p", (TensorMetadata("I", "BYTES", (2, 3)),))
        assert server.model_config("echo", "1").max_batch_size == 4
        assert server.model_ready("echo") and server.model_ready("echo", "10")
        assert not server.model_ready("echo", "3") and not server.model_ready("echo", "x")
        assert not server.model_ready("nope")


@pytest.mark.parametrize(
    ("name", "version", "code", "message"),
    [
        ("nope", "", Code.NOT_FOUND, "Request for unknown model: 'nope' is not found"),
        ("", "", Code.NOT_FOUND, "Request for unknown model: '' is not found"),
        ("../echo", "", Code.NOT_FOUND, "Request for unknown model: '../echo' is not found"),
        ("echo", "9", Code.NOT_FOUND, "Request for unknown model: 'echo' version 9 is not found"),
        ("echo", "0", Code.NOT_FOUND, "Request for unknown model: 'echo' version 0 is not found"),
        *(
            (
                "echo",
                text,
                Code.INVALID_ARGUMENT,
                f"failed to get model version from specified version string '{text}' (details: stol), "
                "version should be an integral value > 0",
            )
            for text in ("x", "1.0", "99999999999999999999", "٣", " 1", "9223372036854775808")
        ),
        (
            "echo",
            "-1",
            Code.INVALID_ARGUMENT,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
    ],
)
async def test_unknown_models_and_versions(repository: Path, name: str, version: str, code: Code, message: str):
    write_model(repository, "echo")
    async with serving(repository) as server:
        for call in (
            lambda: server.infer(request(name, version=version)),
            lambda: anext(server.infer_stream(request(name, version=version))),
            lambda: anext(server.generate(name, version, sequence())),
        ):
            error = await refused(call())
            assert (error.code, error.message) == (code, message)
        for look in (server.model_metadata, server.model_config, server.text_model):
            error = await refused(lambda look=look: look(name, version))
            assert (error.code, error.message) == (code, message)


async def test_one_checkpoint_without_a_repository(tmp_path: Path):
    metrics = Metrics()
    server = Server.for_model(
        "smol", tmp_path, backend="text", max_batch_size=8, settings={"threads": 2}, server_name="s", metrics=metrics
    )
    await server.start()
    context = Text.made[0].context
    assert (context.checkpoint, context.version, context.settings) == (tmp_path, "1", {"threads": 2})
    assert context.config.max_batch_size == 8 and context.version_folder is None
    assert server.ready() and server.index() == [IndexEntry("smol", "1", "READY", "")]
    assert server.server_metadata().name == "s"
    model = server.text_model("smol")
    assert (model.name, model.version, model.max_length, model.vocab_size) == ("smol", "1", 64, 100)
    assert model.sampling_defaults == {"temperature": 0.5} and model.created_s > 0
    assert server.llm_names() == ["smol"]
    (engine,) = server.engines()
    assert (engine.name, engine.info.family, engine.stats[0].running) == ("smol", "llama", 1)
    async with aclosing(server.generate("smol", "", sequence(2))) as deltas:
        assert [token async for delta in deltas for token in delta.tokens] == [3, 4]
    asked = request("smol")
    asked.inputs, asked.outputs = {}, []
    async with aclosing(server.infer_stream(asked)) as answers:
        assert [answer.final async for answer in answers] == [True]
    assert (await refused(server.load("smol"))).code is Code.UNAVAILABLE
    await server.drain(1)
    assert server.llm_names() == [] and server.engines() == []


async def test_one_checkpoint_under_several_names(tmp_path: Path):
    server = Server.for_model("smol", tmp_path, backend="text", other_names=("org/Smol", "s"))
    await server.start()
    assert server.llm_names() == ["smol", "org/Smol", "s"]
    assert [server.text_model(name).name for name in server.llm_names()] == ["smol"] * 3
    assert server.model_ready("org/Smol") and server.model_metadata("s").name == "smol"
    assert [entry.name for entry in server.index()] == ["smol"] and len(server.engines()) == 1
    asked = request("org/Smol")
    asked.inputs, asked.outputs = {}, []
    async with aclosing(server.infer_stream(asked)) as answers:
        assert [answer.model async for answer in answers] == ["smol"]
    with pytest.raises(TritiumError, match="unknown model: 'org/smol'"):
        server.text_model("org/smol")
    await server.drain(1)


async def test_one_checkpoint_that_cannot_be_loaded(tmp_path: Path):
    server = Server.for_model("m", tmp_path, backend="nope")
    await server.start()
    assert not server.ready() and "unable to find backend library" in server.failures()["m"]
    await server.drain(0)
    with pytest.raises(TritiumError, match="max_batch_size is -1"):
        Server.for_model("m", tmp_path, max_batch_size=-1)


async def test_what_is_no_language_model(repository: Path):
    write_model(repository, "echo")
    async with serving(repository) as server:
        assert server.llm_names() == [] and server.engines() == []
        assert (await refused(lambda: server.text_model("echo"))).code is Code.INVALID_ARGUMENT


async def test_statistics(repository: Path):
    write_model(repository, "echo", ECHO + ALL, versions=("1", "2"))
    write_model(repository, "other")
    async with serving(repository) as server:
        await server.infer(request(rows=2))
        assert [(s.model, s.version) for s in server.statistics()] == [("echo", "1"), ("echo", "2"), ("other", "1")]
        assert [s.inference_count for s in server.statistics("echo")] == [0, 2]
        assert [s.version for s in server.statistics("echo", "2")] == ["2"]
        assert (await refused(lambda: server.statistics("nope"))).message == "requested model 'nope' is not available"
        assert (await refused(lambda: server.statistics("echo", "9"))).message == (
            "requested model version is not available for model 'echo'"
        )


async def test_the_two_configurations_of_the_issue_reach_their_backend(
    repository: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.serving.test_config import LLAMA_BATCHING, QWEN
    from tritium.backends import BACKENDS

    monkeypatch.setitem(BACKENDS, "tensorrtllm", "tests.serving.fakes:Text")
    folder = write_model(repository, "llama-7b-trtllm", LLAMA_BATCHING)
    (folder / "triton_config.json").write_text('{"gpt_model_type":"llama","max_beam_width":1,"max_output_len":512}')
    write_model(repository, "qwen-tensorrt", QWEN)
    async with serving(repository) as server:
        assert server.ready() and server.llm_names() == ["llama-7b-trtllm", "qwen-tensorrt"]
        llama = next(b for b in Text.made if b.context.name == "llama-7b-trtllm")
        assert llama.context.triton_config["max_output_len"] == 512
        assert server.model_metadata("llama-7b-trtllm").platform == "tensorrt_llm"
        assert server.model_config("qwen-tensorrt").to_json()["instance_group"][0]["kind"] == "KIND_GPU"
