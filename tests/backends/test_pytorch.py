"""The backend ``pytorch``: TorchScript and exported programs made here, compared with numpy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.runtime_models import (
    arrays,
    ask,
    bf16,
    config,
    from_bf16,
    infer,
    io,
    load_error,
    parameter,
    serving,
    shown,
    write_script,
)
from tritium.backends.pytorch_call import Argument, positions
from tritium.errors import TritiumError
from tritium.types import SequenceRef

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A[::-1].copy()


class Pair(torch.nn.Module):
    def forward(
        self, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = a + b
        if scale is not None:
            total = total * scale
        return total, a - b


class Texts(torch.nn.Module):
    def forward(self, a: list[str]) -> list[str]:
        return [text + "!" for text in a]


class Named(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["p"] * 10 + tensors["q"]


class Twice(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a * 2


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + torch.where(start > 0, torch.zeros_like(state), state)
        return total, total


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12, dtype=torch.float32).reshape(3, 4))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.linear(x, self.weight) * scale, x.sum(-1)


def tensors(inputs: str, outputs: str, batch: int = 8, dims: str = "4", more: str = "") -> str:
    """A configuration with these FP32 tensors."""
    first = " ".join(f"input {io(name, 'FP32', dims)}" for name in inputs.split())
    last = " ".join(f"output {io(name, 'FP32', dims)}" for name in outputs.split())
    return f'backend: "pytorch" max_batch_size: {batch} {first} {last} {more}'


def write_program(path: Path, *, dynamic: bool = True) -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)} if dynamic else None
    path.parent.mkdir(parents=True, exist_ok=True)
    program = torch.export.export(
        Linear(),
        (torch.rand(2, 4),),
        {"scale": torch.rand(2, 1)},
        dynamic_shapes={"x": batch, "scale": batch} if dynamic else None,
    )
    torch.export.save(program, path)


async def test_names_by_index_by_argument_and_by_order(tmp_path: Path) -> None:
    for name, inputs, outputs in (
        ("index", "INPUT__1 INPUT__0", "OUTPUT__1 OUTPUT__0"),
        ("argument", "b a", "OUTPUT__1 OUTPUT__0"),
        ("order", "second_is_a b__", "sum difference"),
    ):
        write_script(tmp_path / name / "1" / "model.pt", Pair())
        config(tmp_path / name, tensors(inputs, outputs))
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        found = await infer(server, "index", INPUT__0=A, INPUT__1=B)
        assert np.array_equal(found["OUTPUT__0"], A + B) and np.array_equal(found["OUTPUT__1"], A - B)
        assert list(found) == ["OUTPUT__1", "OUTPUT__0"]
        found = await infer(server, "argument", ("OUTPUT__1",), a=A, b=B)
        assert list(found) == ["OUTPUT__1"] and np.array_equal(found["OUTPUT__1"], A - B)
        found = await infer(server, "order", second_is_a=A, b__=B)
        assert np.array_equal(found["sum"], A + B) and np.array_equal(found["difference"], A - B)
        made = shown(server, "index")
        assert (made["backend"], made["platform"]) == ("pytorch", "pytorch_libtorch")
        assert made["default_model_filename"] == "model.pt"


async def test_an_argument_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Pair())
    more = f"input {io('scale', 'FP32', '1', 'optional: true')}"
    config(tmp_path / "m", tensors("a b", "OUTPUT__0", more=more))
    async with serving(tmp_path) as server:
        assert np.array_equal((await infer(server, "m", a=A, b=B))["OUTPUT__0"], A + B)
        scale = np.array([[2], [3]], np.float32)
        assert np.array_equal((await infer(server, "m", a=A, b=B, scale=scale))["OUTPUT__0"], (A + B) * scale)


async def test_batches_types_and_texts(tmp_path: Path) -> None:
    kinds = {"BF16": bf16("a", [[1, -0.5]]), "FP16": np.array([[1, -0.5]], np.float16), "INT64": np.array([[1, -2]])}
    for kind in kinds:
        write_script(tmp_path / kind / "1" / "model.pt", Twice())
        text = f'backend: "pytorch" max_batch_size: 4 input {io("a", kind, "2")} output {io("OUTPUT__0", kind, "2")}'
        config(tmp_path / kind, text + "dynamic_batching { max_queue_delay_microseconds: 200000 }")
    write_script(tmp_path / "texts" / "1" / "model.pt", Texts())
    text = (
        f'backend: "pytorch" max_batch_size: 4 input {io("a", "STRING", "1")} output {io("OUTPUT__0", "STRING", "1")}'
    )
    config(tmp_path / "texts", text)
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        for kind, values in kinds.items():
            found = await asyncio.gather(*(infer(server, kind, a=values) for _ in range(4)))
            (stats,) = server.statistics(kind)
            assert (stats.inference_count, stats.execution_count) == (4, 1)
            plain = [from_bf16(one["OUTPUT__0"]) if kind == "BF16" else one["OUTPUT__0"] for one in found]
            wanted = [[2, -1]] if kind != "INT64" else [[2, -4]]
            assert all(one.tolist() == wanted for one in plain)
        found = await infer(server, "texts", a=np.array([["é".encode()], [b"x"]], np.object_))
        assert found["OUTPUT__0"].tolist() == [["é!".encode()], [b"x!"]]


async def test_a_dict_of_tensors(tmp_path: Path) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Named())
    config(tmp_path / "m", tensors("q p", "OUTPUT__0"))
    async with serving(tmp_path) as server:
        assert np.array_equal((await infer(server, "m", p=A, q=B))["OUTPUT__0"], A * 10 + B)


async def test_the_state_of_a_sequence_and_a_control(tmp_path: Path) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Sum())
    more = """sequence_batching { direct { }
      control_input { name: "START__2" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
      state { input_name: "STATE__1" output_name: "STATE__1" data_type: TYPE_FP32 dims: 1 } }"""
    config(tmp_path / "m", tensors("X__0", "Y__0", 4, "1", more))
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        seen: list[float] = []
        for step in range(6):
            x = np.array([[step + 1]], np.float32)
            sequence = SequenceRef(7, start=step in (0, 4), end=step == 5)
            found = arrays(await server.infer(ask("m", sequence=sequence, X__0=x)))
            seen.append(found["Y__0"].item())
        assert seen == [1, 3, 6, 10, 5, 11]


async def test_an_exported_program_needs_no_configuration(tmp_path: Path) -> None:
    write_program(tmp_path / "m" / "1" / "model.pt2")
    write_program(tmp_path / "fixed" / "1" / "model.pt2", dynamic=False)
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        made = shown(server, "m")
        assert made["max_batch_size"] == 4 and made["default_model_filename"] == "model.pt2"
        assert [(t["name"], t["data_type"], t["dims"]) for t in made["input"]] == [
            ("x", "TYPE_FP32", [4]),
            ("scale", "TYPE_FP32", [1]),
        ]
        assert [(t["name"], t["dims"]) for t in made["output"]] == [("OUTPUT__0", [3]), ("OUTPUT__1", [1])]
        scale = np.array([[2], [3]], np.float32)
        weight = np.arange(12, dtype=np.float32).reshape(3, 4)
        for model in ("m", "fixed"):
            found = await infer(server, model, x=A, scale=scale)
            assert np.allclose(found["OUTPUT__0"], A @ weight.T * scale)
            assert found["OUTPUT__1"].reshape(-1).tolist() == A.sum(1).tolist()
        assert shown(server, "fixed")["max_batch_size"] == 0
        (instance,) = server._catalog.serving("m")[0]._backend._instances  # type: ignore[union-attr]
        assert instance.pid not in (None, os.getpid())


async def test_switches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Pair())
    keys = {"INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true", "INTRA_OP_THREAD_COUNT": "1"}
    keys |= {"ENABLE_JIT_PROFILING": "0", "ENABLE_JIT_EXECUTOR": "0", "ENABLE_TENSOR_FUSER": "0", "DISABLE_CUDNN": "1"}
    keys |= {"INTER_OP_THREAD_COUNT": "1", "ENABLE_WEIGHT_SHARING": "1", "ENABLE_CACHE_CLEANING": "1"}
    more = "optimization { graph { level: 1 } eager_batching: true }"
    more += "".join(parameter(key, value) for key, value in keys.items())
    config(tmp_path / "m", tensors("a b", "OUTPUT__0 OUTPUT__1", more=more))
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        for _ in range(3):
            assert np.array_equal((await infer(server, "m", a=A, b=B))["OUTPUT__0"], A + B)
    (line,) = [r.getMessage() for r in caplog.records if "without meaning" in r.getMessage()]
    named = ("DISABLE_CUDNN", "ENABLE_CACHE_CLEANING", "ENABLE_WEIGHT_SHARING")
    assert line.endswith("backend 'pytorch': " + ", ".join(f"parameters.{key}" for key in named))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('backend: "pytorch"', "declares no input and output, and its file does not say of what type and shape"),
        (tensors("a b", "OUTPUT__2"), "output 'OUTPUT__2' of model 'm' stands for number 2, the model has 2 outputs"),
        (tensors("a b c d", "OUTPUT__0"), "input 'd' of model 'm' stands for number 3, the model has 3 inputs (a, b, "),
        (tensors("a", "OUTPUT__0"), "configuration expects 1 inputs, model provides 3: it lacks 'b'"),
        (tensors("I__0 J__0", "OUTPUT__0"), "two inputs of model 'm' have the same index: I__0, J__0"),
        (
            tensors("b", "o", more=f"input {io('a', 'STRING', '1')}"),
            "expects datatype TYPE_STRING for input 'a', model has a tensor there",
        ),
        (tensors("a b", "o__0", more=parameter("INFERENCE_MODE", "maybe")), "is 'maybe', expected true or false"),
    ],
)
async def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Pair())
    config(tmp_path / "m", text)
    assert message in await load_error(tmp_path, "m")


async def test_bad_files(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    config(tmp_path / "m", tensors("a b", "OUTPUT__0"))
    assert "has no 'model.pt' or 'model.pt2'" in await load_error(tmp_path, "m")
    (folder / "model.pt").write_bytes(b"nothing of torch")
    error = await load_error(tmp_path, "m")
    assert "'model.pt' cannot be loaded by pytorch" in error and str(tmp_path) not in error
    write_program(folder / "model.pt2")
    assert "has model.pt and model.pt2, expected one of them" in await load_error(tmp_path, "m")


async def test_an_answer_that_is_not_as_declared(tmp_path: Path) -> None:
    write_script(tmp_path / "m" / "1" / "model.pt", Twice())
    config(
        tmp_path / "m",
        f'backend: "pytorch" max_batch_size: 4 input {io("a", "FP32", "-1")} output {io("OUTPUT__0", "INT32", "2")}',
    )
    async with serving(tmp_path) as server:
        expected = r"output 'OUTPUT__0' of model 'm' came as FP32 of shape \[2, 4\], expected INT32 of shape \[-1, 2\]"
        with pytest.raises(TritiumError, match=expected):
            await infer(server, "m", a=A)


def test_positions() -> None:
    there = [Argument("a"), Argument("b")]
    assert positions("m", "input", ["b"], there) == {"b": 1}
    assert positions("m", "output", ["x__3"], [], counted=False) == {"x__3": 3}
    assert positions("m", "output", ["x__y", "z__0"], there) == {"x__y": 0, "z__0": 1}
