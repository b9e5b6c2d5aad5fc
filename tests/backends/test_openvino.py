"""The backend ``openvino``: models made here, compared with numpy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.backends.runtime_models import (
    bf16,
    config,
    from_bf16,
    infer,
    io,
    linear,
    load_error,
    parameter,
    serving,
    shown,
    write_linear,
    write_onnx,
)
from tritium.errors import TritiumError

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def write_ir(path: Path, batch: int | str = "N") -> None:
    """The linear model in OpenVINO's own format."""
    from tritium.backends.openvino import _import

    ov = _import()
    onnx = write_linear(path.with_name("source.onnx"), batch)
    ov.save_model(ov.Core().read_model(str(onnx)), str(path), compress_to_fp16=False)
    onnx.unlink()


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_its_own_format_and_onnx_without_a_configuration(tmp_path: Path, placement: str) -> None:
    (tmp_path / "ir" / "1").mkdir(parents=True)
    write_ir(tmp_path / "ir" / "1" / "model.xml")
    write_linear(tmp_path / "onnx" / "1" / "model.onnx")
    config(tmp_path / "onnx", 'backend: "openvino"')
    async with serving(tmp_path, backend_settings={"openvino": {"placement": placement}}) as server:
        assert server.failures() == {}
        for model, file in (("ir", "model.xml"), ("onnx", "model.onnx")):
            found = await infer(server, model, X=X)
            assert np.allclose(found["Y"], linear(X)) and np.allclose(found["S"], X.sum(1, keepdims=True))
            made = shown(server, model)
            assert (made["backend"], made["max_batch_size"], made["default_model_filename"]) == ("openvino", 4, file)
            assert made["dynamic_batching"]["preferred_batch_size"] == [4]
            assert [(t["name"], t["dims"]) for t in made["output"]] == [("Y", [3]), ("S", [1])]


async def test_batches_are_joined_and_answers_stay_what_they_are(tmp_path: Path) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    text = "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: 8 }"
    config(tmp_path / "m", 'backend: "openvino" max_batch_size: 8 ' + text)
    async with serving(tmp_path) as server:
        inputs = [np.full((2, 4), i, np.float32) for i in range(8)]
        found = await asyncio.gather(*(infer(server, "m", ("Y",), X=x) for x in inputs))
        assert all(np.allclose(one["Y"], linear(x)) for one, x in zip(found, inputs, strict=True))
        (stats,) = server.statistics("m")
        assert (stats.inference_count, stats.execution_count) == (16, 2)


async def test_a_fixed_batch(tmp_path: Path) -> None:
    """A model of batch 2 becomes one of any batch; told not to be, it is filled up with rows of zeros."""
    tensors = f" max_batch_size: 2 input {io('X', 'FP32', '4')} output {io('Y', 'FP32', '3')}"
    for name, more in (
        ("opened", ""),
        ("padded", parameter("ENABLE_BATCH_PADDING", "YES")),
        ("exact", parameter("SKIP_OV_DYNAMIC_BATCHSIZE", "YES")),
    ):
        write_linear(tmp_path / name / "1" / "model.onnx", batch=2)
        config(tmp_path / name, 'backend: "openvino"' + tensors + more)
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        for name in ("opened", "padded"):
            for rows in (1, 2):
                assert np.allclose((await infer(server, name, X=X[:rows]))["Y"], linear(X[:rows]))
        assert np.allclose((await infer(server, "exact", X=X))["Y"], linear(X))
        with pytest.raises(TritiumError, match="openvino cannot run model 'exact'"):
            await infer(server, "exact", X=X[:1])


async def test_other_types_and_shapes(tmp_path: Path) -> None:
    for kind in ("BFLOAT16", "FLOAT16", "INT64", "BOOL"):
        write_onnx(
            tmp_path / kind / "1" / "model.onnx",
            [("Identity", ["X"], ["Y"])],
            {"X": (kind, ["N", 2])},
            {"Y": (kind, ["N", 2])},
        )
        config(tmp_path / kind, 'backend: "openvino"')
    write_linear(tmp_path / "fixed" / "1" / "model.onnx", batch=7)
    reshape = parameter("RESHAPE_IO_LAYERS", "yes")
    config(
        tmp_path / "fixed",
        f'backend: "openvino" {reshape} input {io("X", "FP32", "-1, 4")} output {io("Y", "FP32", "-1, 3")}',
    )
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        found = await infer(server, "BFLOAT16", X=bf16("X", [[1, -0.5]]))
        assert from_bf16(found["Y"]).tolist() == [[1, -0.5]]
        for kind, values in (
            ("FLOAT16", np.array([[1.5, -2]], np.float16)),
            ("INT64", np.array([[1, -(1 << 30)]])),
            ("BOOL", np.array([[True, False]])),
        ):
            found = (await infer(server, kind, X=values))["Y"]
            assert found.dtype == values.dtype and found.tolist() == values.tolist()
        assert np.allclose((await infer(server, "fixed", X=X))["Y"], linear(X))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (parameter("NUM_STREAMS", "some"), "parameter 'NUM_STREAMS' of model 'm' is 'SOME', expected a whole number"),
        (parameter("CPU_THREADS_NUM", "-1"), "expected a whole number from 0"),
        (parameter("PERFORMANCE_HINT", "FAST"), "is 'FAST', expected one of LATENCY, THROUGHPUT"),
        (parameter("HINT_BF16", "7"), "expected YES or NO"),
        (
            f"max_batch_size: 4 input {io('X', 'FP32', '3')} output {io('Y', 'FP32', '3')}",
            "for input 'X' (with its batch dimension), model provides [-1, 4]",
        ),
    ],
)
async def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    config(tmp_path / "m", 'backend: "openvino" ' + text)
    assert message in await load_error(tmp_path, "m")


async def test_parameters_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    keys = {"INFERENCE_NUM_THREADS": "1", "CPU_THROUGHPUT_STREAMS": "auto", "PERFORMANCE_HINT": "latency"}
    keys |= {"CPU_BIND_THREAD": "NO", "COMPILATION_NUM_THREADS": "2", "UNKNOWN": "1"}
    text = "".join(parameter(key, value) for key, value in keys.items())
    config(tmp_path / "m", 'backend: "openvino" optimization { graph { level: 1 } }' + text)
    async with serving(tmp_path) as server:
        assert np.allclose((await infer(server, "m", X=X))["Y"], linear(X))
    (line,) = [r.getMessage() for r in caplog.records if "without meaning" in r.getMessage()]
    assert line.endswith(
        "backend 'openvino': parameters.COMPILATION_NUM_THREADS, parameters.UNKNOWN, optimization.graph"
    )


async def test_bad_files_and_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    config(tmp_path / "m", 'backend: "openvino"')
    assert "has no 'model.xml' or 'model.onnx'" in await load_error(tmp_path, "m")
    (folder / "model.xml").write_text("<net")
    assert "'model.xml' cannot be loaded by openvino" in await load_error(tmp_path, "m")
    write_linear(folder / "model.onnx")
    assert "has model.xml and model.onnx, expected one of them" in await load_error(tmp_path, "m")
    config(tmp_path / "m", 'backend: "openvino" default_model_filename: "model.onnx"')
    async with serving(tmp_path) as server:
        assert server.failures() == {}


def test_nothing_is_sent_home() -> None:
    """OpenVINO's telemetry package would report each import."""
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('a connection was tried')\n"
        "socket.socket.connect = refuse\n"
        "from tritium.backends.openvino import _import\n"
        "_import()\n"
        "assert sys.modules['openvino_telemetry'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
