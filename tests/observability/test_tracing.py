from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tritium.errors import Code, TritiumError
from tritium.observability.trace_config import TraceConfig, parse_trace_config
from tritium.observability.tracing import MAX_ELEMENTS, Traces
from tritium.types import Tensor

OFF = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}


def traces(tmp_path: Path, **more: object) -> Traces:
    return Traces(TraceConfig(str(tmp_path / "trace.json"), ("TIMESTAMPS",), **more))  # type: ignore[arg-type]


def read(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())


def test_off_by_default() -> None:
    off = Traces()
    assert off.settings() == off.settings("m") == OFF
    assert off.begin("m") is None
    off.close()


def test_the_file_is_whole_json_after_every_trace(tmp_path: Path) -> None:
    found = traces(tmp_path, rate=1)
    file = tmp_path / "trace.json"
    assert read(file) == []
    assert file.stat().st_mode & 0o77 == 0
    one = found.begin("m", "", "r")
    assert one is not None
    one.stamp("HTTP_SEND_END", 90)
    one.served("3", 10, 80, (20, 5, 7))
    one.hold("TENSOR_QUEUE_INPUT", [Tensor.from_strings("T", [b"x"])])  # not with TIMESTAMPS alone
    one.release()
    child = one.child("step", "1")
    child.served("1", 20, 30)  # releases it
    entries = read(file)
    assert entries[0] == {"id": 1, "model_name": "m", "request_id": "r", "model_version": 3}
    assert entries[1]["timestamps"] == [
        {"name": "REQUEST_START", "ns": 10},
        {"name": "QUEUE_START", "ns": 10},
        {"name": "COMPUTE_START", "ns": 30},
        {"name": "COMPUTE_INPUT_END", "ns": 35},
        {"name": "COMPUTE_OUTPUT_START", "ns": 73},
        {"name": "COMPUTE_END", "ns": 80},
        {"name": "REQUEST_END", "ns": 80},
        {"name": "HTTP_SEND_END", "ns": 90},
    ]
    assert entries[2] == {"id": 2, "model_name": "step", "model_version": 1, "parent_id": 1}
    names = [stamp["name"] for stamp in entries[3]["timestamps"]]  # type: ignore[index, attr-defined]
    assert names == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    found.close()
    found.write([])  # after the end nothing is written, and nothing fails


def test_rate_count_and_files(tmp_path: Path) -> None:
    found = traces(tmp_path, rate=3, count=4, log_frequency=2)
    taken = [found.begin("m") for _ in range(20)]
    assert [index for index, trace in enumerate(taken) if trace is not None] == [0, 3, 6, 9]
    assert found.settings()["trace_count"] == ["0"]
    for trace in taken:
        if trace is not None:
            trace.release()
    found.close()
    assert [len(read(tmp_path / f"trace.json.{index}")) for index in range(2)] == [2, 2]


def test_tensors(tmp_path: Path) -> None:
    found = Traces(TraceConfig(str(tmp_path / "t"), ("TENSORS",), rate=1))
    one = found.begin("m", "x")
    assert one is not None
    long = Tensor.from_numpy("L", np.zeros(MAX_ELEMENTS + 1, np.int8))
    one.hold("TENSOR_QUEUE_INPUT", [Tensor.from_numpy("N", np.array([[1, 2]], np.int32)), long])
    one.hold("TENSOR_BACKEND_OUTPUT", [Tensor.from_strings("T", ["grün".encode(), b"\xff"])])
    one.stamp("IGNORED")
    one.release()
    found.close()
    head, numbers, many, texts = read(tmp_path / "t")
    assert head == {"id": 1, "model_name": "m"}
    assert numbers["tensor"] == {"name": "N", "data": "1,2", "shape": "1,2", "dtype": "INT32"}
    assert str(many["tensor"]["data"]).endswith(",0,...")  # type: ignore[index]
    assert texts["tensor"]["data"] == "grün,\\xff"  # type: ignore[index]
    assert texts["activity"] == "TENSOR_BACKEND_OUTPUT"


def test_models_follow_the_server_until_they_have_their_own(tmp_path: Path) -> None:
    found = traces(tmp_path)
    found.update({"trace_rate": ["7"], "nothing": ["1"], "trace_mode": ["opentelemetry"]})
    assert found.settings("m")["trace_rate"] == ["7"]
    found.update({"trace_rate": ["3"], "trace_level": ["TIMESTAMPS", "TENSORS"]}, "m")
    found.update({"trace_count": ["5"]})
    assert found.settings("m") == {
        **OFF,
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": ["3"],
        "trace_count": ["5"],
        "trace_file": [str(tmp_path / "trace.json")],
    }
    assert found.settings()["trace_level"] == ["TIMESTAMPS"]
    found.update({"trace_rate": None, "trace_level": None}, "m")
    found.update({"trace_rate": None, "trace_count": []})
    assert (
        found.settings("m")
        == found.settings()
        == {**OFF, **{k: found.settings()[k] for k in ("trace_level", "trace_file")}}
    )
    found.close()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"trace_rate": ["x"]}, Code.INVALID_ARGUMENT, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": ["-3"]}, Code.INVALID_ARGUMENT, "out of range [ 1, 2147483647 ], got: -3"),
        ({"trace_count": ["9" * 20]}, Code.INVALID_ARGUMENT, "out of range [ -1, 2147483647 ]"),
        ({"trace_rate": ["1", "2"]}, Code.INVALID_ARGUMENT, "expect only 1 value for 'trace_rate'"),
        ({"trace_file": ["x"]}, Code.UNIMPLEMENTED, "trace file location can not be updated"),
    ],
)
def test_changes_that_are_refused(change: dict[str, list[str]], code: Code, words: str) -> None:
    off = Traces()
    with pytest.raises(TritiumError) as caught:
        off.update(change)
    assert caught.value.code is code and words in caught.value.message
    assert off.settings() == OFF


def test_a_level_that_is_unknown_is_off() -> None:
    off = Traces()
    off.update({"trace_level": ["LOUD"]})
    assert off.settings() == OFF
    off.update({"trace_level": ["MAX"]})  # there is no file, so nothing is taken
    assert off.settings()["trace_level"] == ["TIMESTAMPS"]
    assert off.begin("m") is None


def test_command_line() -> None:
    texts = [
        "triton,file=/x",
        "level=MAX",
        "level=TENSORS",
        "rate=5",
        "count=2",
        "triton,log-frequency=9",
        "mode=triton",
    ]
    assert parse_trace_config(texts) == TraceConfig("/x", ("TIMESTAMPS", "TENSORS"), 5, 2, 9)
    assert parse_trace_config(["file=/x"]).levels == ("TIMESTAMPS",)
    assert parse_trace_config(["triton,file=/x", "level=OFF"]).levels == ()
    assert parse_trace_config([]) == TraceConfig()
    for text in ("level=LOUD", "rate=0", "speed=1", "nothing", "mode=zipkin", "zipkin,url=x", "level=MAX"):
        with pytest.raises(TritiumError, match="trace"):
            parse_trace_config([text])


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match="cannot be written: No such file"):
        traces(tmp_path / "nowhere")
    folder = tmp_path / "gone"
    folder.mkdir()
    found = traces(folder, rate=1, log_frequency=1)
    for _ in range(3):
        trace = found.begin("m")
        assert trace is not None
        trace.release()  # the second one wants a new file, which cannot be had; nobody is troubled
        shutil.rmtree(folder, ignore_errors=True)
    found.close()
