"""A model repository as an operator fills it: aliases, whose value wins, and folders that cannot be served."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint
from tests.tiny_gguf import make_gguf

PROMPT = "Once upon a time"
IDS = [5, 17, 33, 60, 7]
# What the checkpoint's own generation_config.json says: the best token, but none twice.
GENERATION = {"top_k": 1, "repetition_penalty": 50.0, "temperature": 1.0}
TRTLLM = """
backend: "tensorrtllm"
max_batch_size: 4
model_transaction_policy { decoupled: true }
parameters { key: "gpt_model_type" value { string_value: "inflight_fused_batching" } }
parameters { key: "gpt_model_path" value { string_value: "%s" } }
parameters { key: "max_beam_width" value { string_value: "1" } }
parameters { key: "kv_cache_free_gpu_mem_fraction" value { string_value: "0.2" } }
"""
# Line 3 has no brace before its value.
SYNTAX = 'backend: "tritium"\nmax_batch_size: 4\n  dynamic_batching 7\n'
TYPO = 'backend: "tritium"\nparameters { key: "max_rowz" value { string_value: "4" } }\n'


def write(folder: Path, config: str, **files: Any) -> None:
    """A model's files; those of version 1 have names that begin with ``v1_``."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    for name, content in files.items():
        path = folder / "1" / name.removeprefix("v1_") if name.startswith("v1_") else folder / name
        path.with_suffix(".json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    checkpoint = make_checkpoint(root / "checkpoint")
    (checkpoint / "generation_config.json").write_text(json.dumps(GENERATION | {"eos_token_id": 2}))
    models = root / "models"
    make_checkpoint(models / "native" / "1")
    (models / "native" / "1" / "generation_config.json").write_text(json.dumps(GENERATION))
    write(
        models / "native",
        'backend: "tritium"\nmax_batch_size: 4\n',
        triton_config={"repetition_penalty": 1.0, "max_output_len": 9, "gpt_model_type": "llama"},
        v1_triton_config={"max_output_len": 5},
    )
    arguments = {"model": str(checkpoint), "max_model_len": 256, "disable_log_requests": True, "max_num_seqs": 4}
    write(models / "vllm-model", 'backend: "vllm"\n', v1_model=arguments)
    write(models / "trt", TRTLLM % checkpoint)
    write(models / "syntax", SYNTAX)
    write(models / "typo", TYPO)
    make_checkpoint(models / "typo" / "1")
    write(models / "two", 'backend: "tritium"\n')
    for name in ("first", "second"):
        make_gguf(models / "two" / "1" / f"{name}.gguf")
    write(models / "empty", 'backend: "tritium"\n')
    write(models / "value", 'backend: "tritium"\n', triton_config={"temperature": -3})
    return models


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    names = ("native", "vllm-model", "trt")
    arguments = [f"--model-repository={folder}", "--model-control-mode=explicit", "--dtype=float32"]
    with LiveServer([*arguments, *(f"--load-model={name}" for name in names)], folder.parent / "log") as live:
        yield live


@pytest.fixture(scope="module")
def grpc(server: LiveServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


def generate(server: LiveServer, model: str, **values: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v2/models/{model}/generate", json=values, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def states(client: httpclient.InferenceServerClient) -> dict[str, tuple[str, str]]:
    """State and reason of each model in the index."""
    return {m["name"]: (m.get("state", ""), m.get("reason", "")) for m in client.get_model_repository_index()}


# -- aliases --------------------------------------------------------------------------------------------------


def test_only_vllm_puts_the_prompt_before_the_text(server: LiveServer) -> None:
    plain = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "repetition_penalty": 1}
    bare = generate(server, "native", **plain)["text_output"]
    assert generate(server, "vllm-model", **plain)["text_output"] == PROMPT + bare
    assert generate(server, "trt", **plain)["text_output"] == bare
    # Each of them does what the request says.
    assert generate(server, "vllm-model", exclude_input_in_output=True, **plain)["text_output"] == bare
    assert generate(server, "native", exclude_input_in_output=False, **plain)["text_output"] == PROMPT + bare


def test_only_tensorrtllm_puts_the_prompt_before_the_ids(server: LiveServer) -> None:
    plain = {"input_ids": IDS, "request_output_len": 8, "temperature": 0, "repetition_penalty": 1}
    bare = generate(server, "native", **plain)
    assert bare["sequence_length"] == 8
    assert generate(server, "vllm-model", **plain)["output_ids"] == bare["output_ids"]
    whole = generate(server, "trt", **plain)
    assert whole["output_ids"] == IDS + bare["output_ids"]
    assert whole["sequence_length"] == len(IDS) + 8
    assert generate(server, "trt", exclude_input_in_output=True, **plain)["output_ids"] == bare["output_ids"]


def test_a_stream_never_repeats_the_prompt(server: LiveServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "repetition_penalty": 1, "stream": True}
    found = []
    for model in ("native", "vllm-model", "trt"):
        answer = httpx.post(f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=120).text
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
        found.append("".join(json.loads(line)["text_output"] for line in lines))
    assert len(set(found)) == 1 and not found[0].startswith(PROMPT)


def test_a_decoupled_model_answers_one_infer(grpc: grpcclient.InferenceServerClient) -> None:
    tensor = grpcclient.InferInput("input_ids", [1, len(IDS)], "INT32")
    result = grpc.infer("trt", [tensor.set_data_from_numpy(np.array([IDS], np.int32))], request_id="x")
    assert result.get_response().id == "x"
    assert result.as_numpy("output_ids")[0, 0, : len(IDS)].tolist() == IDS
    assert grpc.get_model_config("trt").config.model_transaction_policy.decoupled


def test_what_is_ignored_is_said(server: LiveServer) -> None:
    log = server.output()
    assert "parameters['gpt_model_type'] is ignored: batching is always in flight" in log
    assert "model.json: disable_log_requests is ignored: requests are never logged" in log
    assert "triton_config.json: gpt_model_type is ignored" in log


def test_settings_of_other_servers_arrive(server: LiveServer, http: httpclient.InferenceServerClient) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {m["id"]: m["max_model_len"] for m in listed} == {"native": 1024, "vllm-model": 256, "trt": 1024}
    assert http.get_model_config("native")["max_batch_size"] == 4
    assert http.get_model_config("vllm-model").get("max_batch_size", 0) == 0


def test_clients_of_vllms_backend_send_one_prompt_of_shape_1(grpc: grpcclient.InferenceServerClient) -> None:
    """As the sample client of that backend does, also with its sampling parameters as JSON."""
    text = grpcclient.InferInput("text_input", [1], "BYTES").set_data_from_numpy(np.array([PROMPT], np.object_))
    sampling = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps({"temperature": 0, "max_tokens": 4})], np.object_))
    answer = grpc.infer("vllm-model", [text, sampling]).as_numpy("text_output")
    assert answer.shape == (1,) and answer[0].decode().startswith(PROMPT)


# -- whose value wins -----------------------------------------------------------------------------------------


def test_request_before_triton_config_before_generation_config(server: LiveServer) -> None:
    ids = {"input_ids": IDS}
    # generation_config.json alone: nothing is said twice, and 16 tokens are the default of this protocol.
    varied = generate(server, "vllm-model", **ids)["output_ids"]
    assert len(set(varied)) == len(varied) == 16
    # triton_config.json takes the penalty back; the one in the version folder wins over the other.
    own = generate(server, "native", **ids)["output_ids"]
    assert len(own) == 5
    greedy = generate(server, "vllm-model", **ids, repetition_penalty=1, temperature=0, max_tokens=24)["output_ids"]
    assert len(set(greedy)) < len(greedy) == 24
    assert own == greedy[:5]
    # The request wins over both.
    assert generate(server, "native", **ids, max_tokens=24)["output_ids"] == greedy
    again = generate(server, "native", **ids, repetition_penalty=GENERATION["repetition_penalty"], max_tokens=16)
    assert again["output_ids"] == varied


def test_openai_has_the_same_defaults(server: LiveServer) -> None:
    def ask(model: str, **values: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": IDS, **values}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()

    assert ask("native")["usage"]["completion_tokens"] == 5
    assert ask("native", max_tokens=7)["usage"]["completion_tokens"] == 7
    assert ask("vllm-model")["usage"]["completion_tokens"] == 16
    text = generate(server, "vllm-model", input_ids=IDS, exclude_input_in_output=True, max_tokens=16)
    assert len(text["output_ids"]) == 16


# -- load and unload ------------------------------------------------------------------------------------------


def test_unload_and_load(
    server: LiveServer, http: httpclient.InferenceServerClient, grpc: grpcclient.InferenceServerClient
) -> None:
    before = generate(server, "trt", input_ids=IDS)
    http.unload_model("trt")
    deadline = time.monotonic() + 60
    while (state := states(http)["trt"]) != ("UNAVAILABLE", "unloaded") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state == ("UNAVAILABLE", "unloaded")
    assert not grpc.is_model_ready("trt")
    assert grpc.is_server_ready()
    with pytest.raises(InferenceServerException, match="unknown model: 'trt' has no available versions"):
        grpc.infer("trt", [grpcclient.InferInput("input_ids", [1, 1], "INT32")])
    assert server.metric("tritium_requests_running", model="trt") == 0
    assert 'tritium_requests_running{model="trt"' not in httpx.get(server.metrics).text
    grpc.load_model("trt")
    assert http.is_model_ready("trt")
    assert states(http)["trt"] == ("READY", "")
    assert generate(server, "trt", input_ids=IDS) == before


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("two", "more than one checkpoint in '1': 'first.gguf', 'second.gguf'; name the one to serve"),
        ("typo", "parameters['max_rowz'] is not known, expected one of allow_bin, "),
        ("empty", "no checkpoint in '1': expected config.json with safetensors files, or one GGUF file"),
        ("value", "triton_config.json: temperature is -3, expected a number from 0 to 100"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(
    model: str,
    reason: str,
    server: LiveServer,
    http: httpclient.InferenceServerClient,
    grpc: grpcclient.InferenceServerClient,
) -> None:
    for client in (http, grpc):
        with pytest.raises(InferenceServerException) as caught:
            client.load_model(model)
        assert f"load failed for model '{model}': version 1 is at UNAVAILABLE state: " in str(caught.value)
        assert reason in str(caught.value)
        assert str(server.log.parent) not in str(caught.value)
    state, why = states(http)[model]
    assert state == "UNAVAILABLE" and reason in why
    assert not http.is_model_ready(model)
    with pytest.raises(InferenceServerException, match="has no available versions"):
        grpc.get_model_metadata(model)
    assert generate(server, "native", input_ids=IDS)["output_ids"]


def test_a_syntax_error_has_line_and_column(
    server: LiveServer, http: httpclient.InferenceServerClient, grpc: grpcclient.InferenceServerClient
) -> None:
    for client in (http, grpc):
        with pytest.raises(
            InferenceServerException, match=r"syntax/config\.pbtxt:3:20: '  dynamic_batching 7': Expected"
        ):
            client.load_model("syntax")
    # Nothing could be read that has a version or a state: the index has the name alone, as Triton's.
    assert states(http)["syntax"] == ("", "")
    assert not grpc.is_model_ready("syntax")
    assert generate(server, "native", input_ids=IDS)["output_ids"]


def test_others_serve_from_the_start(folder: Path, tmp_path: Path) -> None:
    """The whole repository at start, with what is broken: the rest is served where that was asked for."""
    small = tmp_path / "models"
    small.mkdir()
    for name in ("vllm-model", "typo", "syntax"):
        (small / name).symlink_to(folder / name)
    arguments = [f"--model-repository={small}", "--no-exit-on-error", "--no-strict-readiness"]
    with LiveServer(arguments, tmp_path / "log") as live, httpclient.InferenceServerClient(live.http) as client:
        found = states(client)
        assert found["vllm-model"] == ("READY", "")
        assert found["typo"][0] == "UNAVAILABLE" and "max_rowz" in found["typo"][1]
        assert found["syntax"] == ("", "")
        assert generate(live, "vllm-model", input_ids=IDS, max_tokens=3)["sequence_length"] == 3
        # Each failure is logged once, and stands once in the banner.
        shown = live.output()
        for name, why in (("typo", "max_rowz"), ("syntax", "syntax/config.pbtxt:3:20: ")):
            assert len([line for line in shown.splitlines() if "ERROR" in line and f"model={name} " in line]) == 1
            (line,) = (line for line in shown.splitlines() if line.startswith(f"  not loaded: {name}: "))
            assert why in line and not line.endswith(";")
