"""What a configuration asks of ONNX Runtime, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.backends.runtime_models import config, infer, io, linear, load_error, parameter, serving, write_linear
from tests.serving.executors import config_of
from tritium.backends.base import InstanceContext
from tritium.backends.onnxruntime import LEVELS, PACKAGES, OnnxRuntimeBackend
from tritium.backends.options import Options
from tritium.errors import TritiumError

X = np.arange(8, dtype=np.float32).reshape(2, 4)


async def test_options_reach_the_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    keys = {"intra_op_thread_count": "1", "inter_op_thread_count": "2", "execution_mode": "1", "enable_mem_arena": "1"}
    keys |= {"memory.enable_memory_arena_shrinkage": "cpu:0", "enable_mem_pattern": "false", "someone_elses": "x"}
    text = """optimization { graph { level: 1 } cuda { graphs: true } priority: PRIORITY_MAX
      execution_accelerators { gpu_execution_accelerator [ { name: "tensorrt" } ] } }"""
    config(tmp_path / "m", text + "".join(parameter(key, value) for key, value in keys.items()))
    async with serving(tmp_path) as server:
        assert np.allclose((await infer(server, "m", X=X))["Y"], linear(X))
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "without meaning for the backend 'onnxruntime'" in line]
    for name in ("someone_elses", "optimization.cuda.graphs", "gpu_execution_accelerator"):
        assert name in line
    assert "intra_op_thread_count" not in line and "optimization.graph" not in line
    keys["enable_mem_arena"] = "0"
    config(tmp_path / "m", text + "".join(parameter(key, value) for key, value in keys.items()))
    async with serving(tmp_path) as server:
        # Nothing to shrink: ONNX Runtime says so, which shows that both options have reached it.
        with pytest.raises(TritiumError, match="Did not find an arena based allocator"):
            await infer(server, "m", X=X)


async def test_the_graph_level_and_threads_are_those_of_the_session() -> None:
    backend = OnnxRuntimeBackend(InstanceContext("m", "1", Path(), Path(), "m_0"))
    for level, name in LEVELS.items():
        wishes = {"name": "m", "optimization": {"graph": {"level": level}}}
        backend.options = Options(wishes, {"intra_op_thread_count": "3"})
        options = backend._session_options(ort)
        assert options.graph_optimization_level == getattr(ort.GraphOptimizationLevel, name)
        assert options.intra_op_num_threads == 3 and options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL


def gpu_providers(monkeypatch: pytest.MonkeyPatch, accelerators: str, *parameters: tuple[str, str]) -> list[Any]:
    """What a session on GPU 1 would be asked for, as if the package had every provider."""
    backend = OnnxRuntimeBackend(InstanceContext("m", "1", Path(), Path(), "m_0", "gpu", 1))
    text = f"optimization {{ cuda {{ graphs: true }} execution_accelerators {{ {accelerators} }} }}"
    text += "".join(parameter(key, value) for key, value in parameters)
    backend.options = Options(config_of('backend: "onnxruntime"' + text).to_json(), {})
    backend._runtime = ort
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(PACKAGES))
    return backend._providers()


def test_accelerators_become_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ("CPUExecutionProvider", {})
    plain = gpu_providers(monkeypatch, "", ("gpu_mem_limit", "1000"), ("cudnn_conv_algo_search", "1"))
    wanted = {"device_id": "1", "gpu_mem_limit": "1000", "cudnn_conv_algo_search": "HEURISTIC"}
    assert plain == [("CUDAExecutionProvider", wanted), cpu]
    text = """gpu_execution_accelerator [ { name: "tensorrt"
      parameters { key: "precision_mode" value: "FP16" } parameters { key: "max_workspace_size_bytes" value: "9" }
      parameters { key: "trt_engine_cache_enable" value: "1" } },
      { name: "cuda" parameters { key: "use_tf32" value: "0" } } ] cpu_execution_accelerator [ { name: "openvino" } ]"""
    tensorrt = {"device_id": "1", "trt_cuda_graph_enable": "1", "trt_fp16_enable": "1", "trt_max_workspace_size": "9"}
    assert gpu_providers(monkeypatch, text) == [
        ("TensorrtExecutionProvider", {**tensorrt, "trt_engine_cache_enable": "1"}),
        ("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"}),
        ("OpenVINOExecutionProvider", {"device_type": "CPU"}),
        cpu,
    ]
    for wrong, message in (
        ('{ name: "warp" }', "unknown gpu_execution_accelerator 'warp'"),
        ('{ name: "tensorrt" parameters { key: "speed" value: "9" } }', "unknown parameter 'speed'"),
        (
            '{ name: "tensorrt" parameters { key: "precision_mode" value: "FP3" } }',
            "precision_mode of model 'm' is 'FP3'",
        ),
    ):
        with pytest.raises(TritiumError, match=message):
            gpu_providers(monkeypatch, f"gpu_execution_accelerator [ {wrong} ]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            parameter("intra_op_thread_count", "many"),
            "'intra_op_thread_count' of model 'm' is 'many', expected a whole",
        ),
        (parameter("execution_mode", "2"), "parameter 'execution_mode' of model 'm' is '2', expected one of 0, 1"),
        (parameter("enable_mem_arena", "perhaps"), "expected true or false"),
        (parameter("placement", "moon"), "placement of model 'm' is 'moon', expected thread or process"),
        ("optimization { graph { level: 7 } }", "optimization.graph.level of model 'm' is 7, expected one of"),
        (
            'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "warp" } ] } }',
            "unknown cpu_execution_accelerator 'warp' is requested for model 'm', expected openvino",
        ),
        (
            'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "openvino" } ] } }',
            "OpenVINOExecutionProvider, which the installed onnxruntime does not have: install onnxruntime-openvino",
        ),
        ("instance_group { kind: KIND_GPU }", "has kind KIND_GPU but no GPUs are available"),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled is true for model 'm'"),
        (
            f"input {io('Z', 'FP32', '4')} output {io('Y', 'FP32', '3')} max_batch_size: 4",
            "configuration has input 'Z', the model has the inputs 'X'",
        ),
        (
            f"input {io('X', 'INT32', '4')} output {io('Y', 'FP32', '3')} max_batch_size: 4",
            "expects datatype TYPE_INT32 for input 'X', model provides TYPE_FP32",
        ),
        (
            f"input {io('X', 'FP32', '5')} output {io('Y', 'FP32', '3')} max_batch_size: 4",
            r"has shape [-1, 5] for input 'X' (with its batch dimension), model provides [-1, 4]",
        ),
        (
            f"input {io('X', 'FP32', '-1, 4')} output {io('Y', 'FP32', '-1, 2')}",
            "has shape [-1, 2] for output 'Y', model provides [-1, 3]",
        ),
        (
            f"input {io('X', 'FP32', '4')} output {io('Y', 'FP16', '3')} max_batch_size: 4",
            "expects datatype TYPE_FP16 for output 'Y', model provides TYPE_FP32",
        ),
        ('default_model_filename: "other.onnx"', "has no 'other.onnx', which default_model_filename names"),
        ('default_model_filename: "../1/model.onnx"', "expected a path below the version's folder"),
        ('platform: "tensorflow_graphdef"', "save the model as a SavedModel"),
        (
            'platform: "pytorch_libtorch" backend: "onnxruntime"',
            "expected one of the two, or both for the same backend",
        ),
    ],
)
async def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    config(tmp_path / "m", text)
    assert message in await load_error(tmp_path, "m")
