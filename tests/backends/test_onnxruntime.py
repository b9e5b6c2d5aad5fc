"""The backend ``onnxruntime``: models made here, compared with numpy."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.backends.runtime_models import (
    arrays,
    ask,
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
from tritium.errors import Code, TritiumError
from tritium.types import SequenceRef

X = np.arange(8, dtype=np.float32).reshape(2, 4)
PLACEMENTS = ("thread", "process")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tritium-")]


async def all_gone() -> None:
    """No thread of an instance is left: each ends a moment after the last word of it."""
    async with asyncio.timeout(10):
        while threads():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_model_without_a_configuration(tmp_path: Path, placement: str) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    async with serving(tmp_path, backend_settings={"onnxruntime": {"placement": placement}}) as server:
        assert server.failures() == {}
        assert bool(threads()) == (placement == "thread")
        found = await infer(server, "m", X=X)
        assert np.allclose(found["Y"], linear(X)) and np.allclose(found["S"], X.sum(1, keepdims=True))
        only = await infer(server, "m", ("S",), X=X)
        assert list(only) == ["S"]
        made = shown(server, "m")
        assert (made["backend"], made["platform"]) == ("onnxruntime", "onnxruntime_onnx")
        assert made["max_batch_size"] == 4 and made["dynamic_batching"]["preferred_batch_size"] == [4]
        assert made["default_model_filename"] == "model.onnx"
        assert [(t["name"], t["data_type"], t["dims"]) for t in made["input"]] == [("X", "TYPE_FP32", [4])]
        assert [(t["name"], t["dims"]) for t in made["output"]] == [("Y", [3]), ("S", [1])]
        assert made["instance_group"][0]["kind"] == "KIND_CPU"
        assert server.model_metadata("m").platform == "onnxruntime_onnx"
    await all_gone()


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_requests_share_an_execution_and_each_gets_its_own_rows(tmp_path: Path, placement: str) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    text = 'platform: "onnxruntime_onnx" max_batch_size: 16\n' + parameter("placement", placement)
    config(tmp_path / "m", text + "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: 12 }")
    async with serving(tmp_path) as server:
        asked = [(("Y",), 1), ((), 2), (("S",), 3), (("S", "Y"), 6)]
        inputs = [np.random.default_rng(i).random((rows, 4), np.float32) for i, (_, rows) in enumerate(asked)]
        found = await asyncio.gather(
            *(infer(server, "m", names, X=x) for (names, _), x in zip(asked, inputs, strict=True))
        )
        for (names, rows), x, answer in zip(asked, inputs, found, strict=True):
            assert set(answer) == set(names or ("Y", "S"))
            if "Y" in answer:
                assert np.allclose(answer["Y"], linear(x), atol=1e-5)
            if "S" in answer:
                assert answer["S"].shape == (rows, 1) and np.allclose(answer["S"], x.sum(1, keepdims=True))
        (stats,) = server.statistics("m")
        assert (stats.inference_count, stats.execution_count) == (12, 1)


async def test_the_event_loop_runs_on_while_a_thread_computes(tmp_path: Path) -> None:
    """A product of large matrices takes long; meanwhile the loop must go round."""
    nodes = [("MatMul", ["X", "X"], ["A"]), *(("MatMul", [a, "X"], [b]) for a, b in ("AB", "BC", "CD", "DE"))]
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [*nodes, ("ReduceMax", ["E"], ["Y"])],
        {"X": ("FLOAT", [2000, 2000])},
        {"Y": ("FLOAT", [1, 1])},
    )
    async with serving(tmp_path) as server:
        assert server.failures() == {} and threads()
        rounds = 0
        task = asyncio.create_task(infer(server, "m", X=np.zeros((2000, 2000), np.float32)))
        while not task.done():
            await asyncio.sleep(0.001)
            rounds += 1
        assert (await task)["Y"] == 0
        assert rounds > 20


async def test_instances_compute_side_by_side(tmp_path: Path) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    config(tmp_path / "m", "max_batch_size: 0" + " instance_group { count: 3 kind: KIND_CPU }")
    async with serving(tmp_path) as server:
        assert len(threads()) == 3
        found = await asyncio.gather(*(infer(server, "m", X=X * i) for i in range(30)))
        assert all(np.allclose(one["Y"], linear(X * i)) for i, one in enumerate(found))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("BOOL", np.array([[True, False]])),
        *((k, np.array([[1, 200]], k.lower())) for k in ("UINT8", "UINT16", "UINT32", "UINT64")),
        *((k, np.array([[-1, 100]], k.lower())) for k in ("INT8", "INT16", "INT32", "INT64")),
        ("FLOAT16", np.array([[1.5, -2]], np.float16)),
        ("DOUBLE", np.array([[1.5, -2]])),
        ("STRING", np.array([["é".encode(), b""]], np.object_)),
    ],
)
async def test_every_type(tmp_path: Path, kind: str, values: np.ndarray) -> None:
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [("Identity", ["X"], ["Y"])],
        {"X": (kind, ["N", 2])},
        {"Y": (kind, ["N", 2])},
    )
    async with serving(tmp_path) as server:
        found = (await infer(server, "m", X=values))["Y"]
        assert found.dtype == values.dtype and found.tolist() == values.tolist()


async def test_bf16_and_text_that_is_none(tmp_path: Path) -> None:
    for name, kind in (("b", "BFLOAT16"), ("s", "STRING")):
        write_onnx(
            tmp_path / name / "1" / "model.onnx",
            [("Identity", ["X"], ["Y"])],
            {"X": (kind, ["N", 2])},
            {"Y": (kind, ["N", 2])},
        )
    async with serving(tmp_path) as server:
        found = await asyncio.gather(*(infer(server, "b", X=bf16("X", [[i, -0.5]])) for i in range(4)))
        assert [from_bf16(one["Y"]).tolist() for one in found] == [[[i, -0.5]] for i in range(4)]
        with pytest.raises(TritiumError, match="element 1 of input 'X' is not UTF-8") as caught:
            await infer(server, "s", X=np.array([[b"a", b"\xff"]], np.object_))
        assert caught.value.code is Code.INVALID_ARGUMENT


async def test_scalars(tmp_path: Path) -> None:
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [("Neg", ["X"], ["Y"])],
        {"X": ("FLOAT", [])},
        {"Y": ("FLOAT", [])},
    )
    write_onnx(
        tmp_path / "rows" / "1" / "model.onnx",
        [("Neg", ["X"], ["Y"])],
        {"X": ("FLOAT", ["N"])},
        {"Y": ("FLOAT", ["N"])},
    )
    async with serving(tmp_path) as server:
        assert shown(server, "m")["input"][0]["dims"] == [1] and shown(server, "m")["max_batch_size"] == 0
        assert (await infer(server, "m", X=np.array([2], np.float32)))["Y"].tolist() == [-2]
        assert shown(server, "rows")["input"][0]["reshape"] == {"shape": []}
        found = await infer(server, "rows", X=np.array([[2], [3]], np.float32))
        assert found["Y"].tolist() == [[-2], [-3]]


async def test_an_input_that_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [("Add", ["X", "B"], ["Y"])],
        {"X": ("FLOAT", [2]), "B": ("FLOAT", [2])},
        {"Y": ("FLOAT", [2])},
        {"B": np.array([10, 20], np.float32)},
    )
    async with serving(tmp_path) as server:
        x = np.array([1, 2], np.float32)
        assert [t["optional"] for t in shown(server, "m")["input"]] == [False, True]
        assert (await infer(server, "m", X=x))["Y"].tolist() == [11, 22]
        assert (await infer(server, "m", X=x, B=x))["Y"].tolist() == [2, 4]
        with pytest.raises(TritiumError, match="input 'X' of model 'm' is missing"):
            await infer(server, "m", B=x)


async def test_the_state_of_a_sequence(tmp_path: Path) -> None:
    """A running sum whose state the server keeps, several sequences in one batch."""
    write_onnx(
        tmp_path / "sum" / "1" / "model.onnx",
        [("Add", ["X", "S"], ["Y"]), ("Identity", ["Y"], ["T"])],
        {"X": ("INT32", ["N", 1]), "S": ("INT32", ["N", 1])},
        {"Y": ("INT32", ["N", 1]), "T": ("INT32", ["N", 1])},
    )
    config(
        tmp_path / "sum",
        f"""backend: "onnxruntime" max_batch_size: 4 input {io("X", "INT32", "1")} output {io("Y", "INT32", "1")}
        sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} state {{ input_name: "S" output_name: "T"
          data_type: TYPE_INT32 dims: 1
          initial_state {{ name: "i" data_type: TYPE_INT32 dims: 1 zero_data: true }} }} }}
        """,
    )
    async with serving(tmp_path) as server:
        assert server.failures() == {}

        async def run(id: int) -> list[int]:
            seen: list[int] = []
            for step in range(4):
                x = np.array([[id + step]], np.int32)
                sequence = SequenceRef(id, start=step == 0, end=step == 3)
                found = arrays(await server.infer(ask("sum", sequence=sequence, X=x)))
                assert list(found) == ["Y"]
                seen.append(int(found["Y"][0, 0]))
            return seen

        sums = await asyncio.gather(*(run(id) for id in range(1, 7)))
        assert sums == [np.cumsum([id + step for step in range(4)]).tolist() for id in range(1, 7)]


async def test_versions_reload_and_unload(tmp_path: Path) -> None:
    for version, factor in ((1, 2.0), (3, 3.0)):
        write_onnx(
            tmp_path / "m" / str(version) / "model.onnx",
            [("Mul", ["X", "F"], ["Y"])],
            {"X": ("FLOAT", ["N", 1])},
            {"Y": ("FLOAT", ["N", 1])},
            {"F": np.array(factor, np.float32)},
        )
    config(tmp_path / "m", "version_policy { all { } }")
    x = np.ones((1, 1), np.float32)
    async with serving(tmp_path, control="explicit") as server:
        for _ in range(2):
            await server.load("m")
            for version, factor in (("", 3), ("1", 2), ("3", 3)):
                request = ask("m", X=x)
                request.version = version
                assert arrays(await server.infer(request))["Y"] == factor
            assert len(threads()) == 2
            await server.unload("m")
            await all_gone()


async def test_files_that_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    config(tmp_path / "m", 'backend: "onnxruntime"')
    assert "version 1 of model 'm' has no 'model.onnx', expected the file of the model" in await load_error(
        tmp_path, "m"
    )
    for content in (b"", b"no protobuf at all" * 20):
        (folder / "model.onnx").write_bytes(content)
        error = await load_error(tmp_path, "m")
        assert "'model.onnx' cannot be loaded by onnxruntime" in error and str(tmp_path) not in error
    write_linear(folder / "model.onnx", batch=2)
    config(tmp_path / "m", 'backend: "onnxruntime" max_batch_size: 8')
    assert "model does not support batching while non-zero max_batch_size" in await load_error(tmp_path, "m")


async def test_what_goes_wrong_in_a_run_hits_only_its_batch(tmp_path: Path) -> None:
    write_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [("Reshape", ["X", "shape"], ["Y"])],
        {"X": ("FLOAT", ["A", "B"])},
        {"Y": ("FLOAT", ["C", 4])},
        {"shape": np.array([-1, 4], np.int64)},
    )
    config(tmp_path / "m", f"input {io('X', 'FP32', '-1, -1')} output {io('Y', 'FP32', '2, 4')}")
    async with serving(tmp_path) as server:
        with pytest.raises(TritiumError, match="onnxruntime cannot run model 'm'"):
            await infer(server, "m", X=np.zeros((1, 3), np.float32))
        expected = r"output 'Y' of model 'm' came as FP32 of shape \[1, 4\], expected FP32 of shape \[2, 4\]"
        with pytest.raises(TritiumError, match=expected):
            await infer(server, "m", X=np.zeros((2, 2), np.float32))
        assert (await infer(server, "m", X=np.zeros((2, 4), np.float32)))["Y"].shape == (2, 4)


async def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    write_linear(tmp_path / "m" / "1" / "model.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    error = await load_error(tmp_path, "m")
    assert f"install onnxruntime: {sys.executable} -m pip install onnxruntime" in error


async def test_the_load_of_a_thread_may_be_given_up(tmp_path: Path) -> None:
    write_linear(tmp_path / "m" / "1" / "model.onnx")
    async with serving(tmp_path, control="explicit") as server:
        task = asyncio.create_task(server.load("m"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await all_gone()
