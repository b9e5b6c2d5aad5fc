"""What the tensor runtimes share: completing and checking configurations, options, missing packages, threads."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.python_models import NOTHING
from tests.backends.runtime_models import (
    config,
    infer,
    io,
    load_error,
    parameter,
    serving,
    shown,
    write_linear,
    write_onnx,
    write_script,
)
from tests.backends.test_pytorch import Twice
from tests.serving.executors import config_of
from tritium.backends import detect, find
from tritium.backends.base import InstanceBackend, LoadContext, Send
from tritium.backends.options import Options
from tritium.backends.signature import ModelTensor, Signature, check, complete
from tritium.errors import Code, TritiumError
from tritium.serving.instance import Instance
from tritium.types import DType, InferRequest, InferResponse, Tensor

X = np.arange(8, dtype=np.float32).reshape(2, 4)
OPEN = Signature((ModelTensor("X", DType.FP32, (-1, 4)),), (ModelTensor("Y", DType.FP32, (-1, 3)),))


def completed(text: str, signature: Signature = OPEN, batch: int = 4) -> dict[str, Any]:
    made = config_of('backend: "onnxruntime" ' + text).to_json()
    complete(made, signature, batch)
    return made


def test_what_is_completed() -> None:
    made = completed("")
    assert made["max_batch_size"] == 4 and made["dynamic_batching"] == {}
    assert made["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": [4]}]
    assert completed("max_batch_size: 1").get("dynamic_batching") is None
    assert completed("", batch=0)["input"][0]["dims"] == [-1, 4]
    assert completed("sequence_batching { }").get("dynamic_batching") is None
    # Triton leaves a configuration with inputs and outputs alone, and so a first dimension may stay one like others.
    whole = f"input {io('X', 'FP32', '-1, 4')} output {io('Y', 'FP32', '-1, 3')}"
    assert completed(whole)["max_batch_size"] == 0
    limited = Signature(OPEN.inputs, OPEN.outputs, max_batch=3)
    assert completed("", limited)["max_batch_size"] == 3
    fixed = Signature((ModelTensor("X", DType.FP32, (1, 4)),), OPEN.outputs)
    assert completed("", fixed)["input"][0]["dims"] == [1, 4]
    with pytest.raises(TritiumError, match="model does not support batching"):
        completed("max_batch_size: 8", fixed)
    odd = Signature((ModelTensor("X", None, (-1,), kind="seq(map)"),), ())
    with pytest.raises(TritiumError, match=r"input 'X' of model 'm' is of type seq\(map\), expected a tensor"):
        completed("", odd)


def test_states_and_controls_are_not_completed_as_inputs() -> None:
    tensors = tuple(ModelTensor(name, DType.INT32, (-1, 1)) for name in ("X", "S", "START"))
    made = completed(
        """sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START
        int32_false_true: [ 0, 1 ] } } state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: 1 } }""",
        Signature(tensors, tuple(ModelTensor(name, DType.INT32, (-1, 1)) for name in ("Y", "T"))),
    )
    assert [t["name"] for t in made["input"]] == ["X"] and [t["name"] for t in made["output"]] == ["Y"]
    with pytest.raises(TritiumError, match="has sequence control 'START', the model has the inputs 'X', 'S'"):
        check(made, Signature(tensors[:2], OPEN.outputs))


def test_the_batch_that_a_model_takes_limits_that_of_its_configuration() -> None:
    made = completed("max_batch_size: 8", Signature(OPEN.inputs, OPEN.outputs, max_batch=16))
    with pytest.raises(TritiumError, match="has max_batch_size 8, the model takes at most 4"):
        check(made, Signature(OPEN.inputs, OPEN.outputs, max_batch=4))
    with pytest.raises(TritiumError, match=r"'X' has shape \[2, 4\] in the model: for a max_batch_size above 0"):
        check(made, Signature((ModelTensor("X", DType.FP32, (2, 4)),), OPEN.outputs))


def test_options() -> None:
    text = "".join(parameter(k, v) for k, v in (("a", "On"), ("b", "7"), ("c", "x"), ("placement", "thread")))
    text += "optimization { cuda { graphs: true busy_wait_events: true } } instance_group { kind: KIND_CPU }"
    options = Options(config_of('backend: "onnxruntime" ' + text).to_json(), {"k": "3", "placement": "thread"})
    assert options.flag("a") is True and options.number("b") == 7 and options.number("none", 5) == 5
    assert options.cuda_graphs() and options.graph_level() == 0 and options.accelerators("gpu") == []
    assert options.ignored() == ["parameters.c", "--backend-config k", "optimization.cuda.busy_wait_events"]
    assert options.setting("k", 1) == 3
    with pytest.raises(TritiumError, match="parameter 'c' of model 'm' is 'x', expected one of P, Q"):
        options.choice("c", ("P", "Q"))
    with pytest.raises(TritiumError, match="parameter 'b' of model 'm' is '7', expected a whole number from 8"):
        options.number("b", low=8)
    with pytest.raises(TritiumError, match="--backend-config k is '3', expected a whole number from 4"):
        options.setting("k", 1, low=4)


def test_files_and_platforms_name_the_backend(tmp_path: Path) -> None:
    for index, (file, backend) in enumerate(
        (
            ("model.onnx", "onnxruntime"),
            ("model.xml", "openvino"),
            ("model.pt", "pytorch"),
            ("model.pt2", "pytorch"),
            ("model.plan", "tensorrt"),
            ("model.savedmodel", "tensorflow"),
        )
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / file).touch()
        assert detect(folder) == backend
    for platform, backend in (
        ("onnxruntime_onnx", "onnxruntime"),
        ("pytorch_libtorch", "pytorch"),
        ("tensorflow_savedmodel", "tensorflow"),
        ("tensorrt_plan", "tensorrt"),
    ):
        assert find("", platform, "m") is find(backend, platform, "m") is find(backend, "", "m")
    with pytest.raises(TritiumError, match=r"torch\.export\.save"):
        find("", "torch_aoti", "m")


@pytest.mark.parametrize(
    ("backend", "file", "package", "modules"),
    [
        ("tensorrt", "model.plan", "tensorrt", ["tensorrt"]),
        ("openvino", "model.xml", "openvino", ["openvino"]),
        ("onnxruntime", "model.onnx", "onnxruntime", ["onnxruntime"]),
    ],
)
async def test_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, file: str, package: str, modules: list[str]
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / file).touch()
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    error = await load_error(tmp_path, "m")
    assert f"backend '{backend}' needs {package}, which is not installed: install {package}: " in error
    assert f"{sys.executable} -m pip install {package}" in error


async def test_an_ensemble_of_two_runtimes(tmp_path: Path) -> None:
    write_linear(tmp_path / "linear" / "1" / "model.onnx")
    write_script(tmp_path / "twice" / "1" / "model.pt", Twice())
    batch = "max_batch_size: 4"
    config(
        tmp_path / "twice",
        f'backend: "pytorch" {batch} input {io("a", "FP32", "3")} output {io("OUTPUT__0", "FP32", "3")}',
    )
    config(
        tmp_path / "both",
        f"""platform: "ensemble" {batch} input {io("IN", "FP32", "4")} output {io("OUT", "FP32", "3")}
        ensemble_scheduling {{
          step {{ model_name: "linear" input_map {{ key: "X" value: "IN" }} output_map {{ key: "Y" value: "mid" }} }}
          step {{ model_name: "twice" input_map {{ key: "a" value: "mid" }}
            output_map {{ key: "OUTPUT__0" value: "OUT" }} }} }}""",
    )
    (tmp_path / "both" / "1").mkdir()
    from tests.backends.runtime_models import linear

    async with serving(tmp_path) as server:
        assert server.failures() == {}
        found = await asyncio.gather(*(infer(server, "both", IN=X * i) for i in range(10)))
        assert all(np.allclose(one["OUT"], 2 * linear(X * i)) for i, one in enumerate(found))


async def test_ragged_requests(tmp_path: Path) -> None:
    """Requests of different lengths lie one behind the other; each gets back as much as it gave."""
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [("Neg", ["X"], ["Y"]), ("Identity", ["SIZES"], ["Z"])],
        {"X": ("FLOAT", ["N"]), "SIZES": ("FLOAT", ["B"])},
        {"Y": ("FLOAT", ["N"]), "Z": ("FLOAT", ["B"])},
    )
    config(
        tmp_path / "m",
        f"""backend: "onnxruntime" max_batch_size: 8 input {io("X", "FP32", "-1", "allow_ragged_batch: true")}
        output {io("Y", "FP32", "-1")} output {io("Z", "FP32", "1", "reshape: { shape: [ ] }")}
        batch_input {{ kind: BATCH_ELEMENT_COUNT target_name: "SIZES" data_type: TYPE_FP32 source_input: "X" }}
        batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }}
        dynamic_batching {{ preferred_batch_size: 4 max_queue_delay_microseconds: 300000 }}""",
    )
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        inputs = [np.arange(n, dtype=np.float32).reshape(1, n) for n in (1, 4, 2, 3)]
        found = await asyncio.gather(*(infer(server, "m", X=x) for x in inputs))
        for x, one in zip(inputs, found, strict=True):
            assert np.array_equal(one["Y"], -x) and one["Z"].tolist() == [[x.size]]
        assert server.statistics("m")[0].execution_count == 1


async def test_warm_up_and_the_settings_of_the_backend(tmp_path: Path) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    config(
        tmp_path / "m",
        """platform: "onnxruntime_onnx" model_warmup { name: "w" batch_size: 2 count: 3
        inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 random_data: true } } }""",
    )
    settings = {"onnxruntime": {"default-max-batch-size": "9", "placement": "thread"}}
    async with serving(tmp_path, backend_settings=settings) as server:
        assert server.failures() == {}
        assert shown(server, "m")["max_batch_size"] == 9
        assert server.statistics("m")[0].execution_count == 3


class Odd(InstanceBackend):
    """Does in a thread what its input says."""

    placements = ("thread",)

    def load(self, config: dict[str, Any]) -> None:
        if config["parameters"]:
            raise OSError("a secret")

    def execute(self, requests: Sequence[InferRequest], send: Send) -> Sequence[InferResponse | None] | None:
        what = [request.inputs["IN"].strings()[0] for request in requests]
        if what == [b"raise"]:
            raise ValueError("a secret")
        if what == [b"slow"]:
            time.sleep(0.3)
        if what == [b"send"]:
            send(0, InferResponse("", "", "", final=False))
            send(0, InferResponse("", "", ""))
            return None
        return [InferResponse("", "", "", list(request.inputs.values())) for request in requests]

    def unload(self) -> None:
        gone.append(self.context.instance)


gone: list[str] = []


def odd(text: str = "") -> Instance:
    made = config_of('backend: "python" ' + text)
    context = LoadContext("m", "1", made, Path(), Path())
    return Instance(context, "m_0", NOTHING, backend=f"{__name__}:Odd", placement="thread")


def say(text: str) -> InferRequest:
    return InferRequest("m", "", "", {"IN": Tensor.from_strings("IN", [text.encode()])}, [], time.monotonic_ns())


async def test_a_thread_is_an_instance_like_a_process() -> None:
    gone.clear()
    instance = odd()
    await instance.start()
    assert instance.ready and instance.pid is None and await instance.healthy() and instance.life == 1
    execution = instance.execute([say("a"), say("b")])
    with pytest.raises(TritiumError, match="busy"):
        instance.execute([say("c")])
    replies = [reply async for reply in execution]
    assert [r.response.outputs[0].strings() for r in replies if r.response] == [[b"a"], [b"b"]]
    assert execution.times is not None and execution.times.infer_ns > 0
    replies = [reply async for reply in instance.execute([say("raise")])]
    (response,) = [reply.response for reply in replies]
    assert response is not None and response.error is not None and response.error.code is Code.INTERNAL
    assert "ValueError" in response.error.message and "secret" not in response.error.message
    replies = [reply async for reply in instance.execute([say("send")])]
    assert [reply.response.final for reply in replies if reply.response] == [False, True]
    slow = instance.execute([say("slow")])
    await instance.stop()
    assert [reply.index for reply in await slow.some()] == [0], "a batch that runs is finished first"
    assert gone == ["m_0"] and not instance.ready
    with pytest.raises(TritiumError, match="stopped"):
        await instance.free()


async def test_a_load_that_fails_in_a_thread_says_so_and_is_undone() -> None:
    gone.clear()
    instance = odd(parameter("any", "x"))
    with pytest.raises(TritiumError, match="failed to load: OSError") as caught:
        await instance.start()
    assert "secret" not in caught.value.message
    assert gone == ["m_0"] and not instance.ready
    await instance.stop()
