"""Python models: what they are told, what they may answer, and what becomes of their mistakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.backends.python_models import (
    DECOUPLED,
    ECHO,
    FLOATS,
    answer,
    answers,
    floats,
    replies,
    running,
    tensor,
    text,
    value,
)
from tests.backends.python_models import request as ask
from tritium.errors import Code
from tritium.types import DType, SequenceRef, Tensor

MODES = """
class TritonPythonModel:
    def execute(self, requests):
        mode = requests[0].inputs()[0].as_numpy()[0].decode()
        out = pb_utils.Tensor("OUT", np.array([1], np.float32))
        if mode == "raise":
            raise ValueError("on purpose")
        if mode == "exit":
            raise SystemExit(4)
        if mode == "exception":
            raise pb_utils.TritonModelException("on purpose")
        if mode == "none":
            return None
        if mode == "none_item":
            return [None] * len(requests)
        if mode == "number":
            return 7
        if mode == "few":
            return []
        if mode == "wrong":
            return ["text"]
        if mode == "other":
            return [pb_utils.InferenceResponse([out, pb_utils.Tensor("OTHER", np.array([1], np.int32))])]
        if mode == "missing":
            return [pb_utils.InferenceResponse([])]
        if mode == "kind":
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1, 2], np.int64))])]
        if mode == "forgotten":
            requests[0].get_response_sender()
            return None
        if mode == "sender":
            requests[0].get_response_sender().send(pb_utils.InferenceResponse([out]), flags=1)
            return [None]
        if mode == "parameters":
            return [pb_utils.InferenceResponse([out], parameters={"a": 1, "b": True, "c": "x", "d": 0.5})]
        if mode == "bad_parameters":
            return [pb_utils.InferenceResponse([out], parameters={"a": [1]})]
        return [pb_utils.InferenceResponse([out])]
"""
WORDS = """
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raise", "message: ValueError: on purpose\n\nAt:\n  {file}(12): execute\n"),
        ("exit", "message: SystemExit: 4\n\nAt:\n  {file}(14): execute\n"),
        ("exception", "message: TritonModelException: on purpose\n\nAt:\n  {file}(16): execute\n"),
        ("none", "message: the request was not answered: execute returned None"),
        ("none_item", "message: the request was not answered: execute returned None"),
        ("forgotten", "message: the request was not answered: its response sender is gone"),
        ("number", "message: Expected a list in the execute return, found type '<class 'int'>'."),
        ("few", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"),
        ("wrong", "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 's"),
        ("bad_parameters", "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
    ],
)
async def test_mistakes_of_execute(tmp_path: Path, mode: str, message: str) -> None:
    async with running(tmp_path, MODES, WORDS) as instance:
        async with asyncio.timeout(10):
            (reply,) = await replies(instance, ask(text(mode)))
        assert reply.response is not None and reply.response.error is not None and reply.failed
        found = reply.response.error
        assert found.code is Code.INTERNAL
        assert found.message.startswith("Failed to process the request(s) for model 'demo_0', message: ")
        assert message.format(file=tmp_path / "demo" / "1" / "model.py") in found.message
        assert value(await answer(instance, ask(text("fine")))) == [1]


async def test_outputs_go_out_as_they_are(tmp_path: Path) -> None:
    async with running(tmp_path, MODES, WORDS) as instance:
        assert [t.name for t in (await answer(instance, ask(text("other")))).outputs] == ["OUT"]
        assert (await answer(instance, ask(text("missing")))).outputs == []
        kind = await answer(instance, ask(text("kind")))
        assert kind.outputs[0].dtype is DType.INT64 and value(kind) == [1, 2]
        assert value(await answer(instance, ask(text("sender")))) == [1]
        given = await answer(instance, ask(text("parameters")))
        assert given.parameters == {"a": 1, "b": True, "c": "x", "d": 0.5}
        assert (await answer(instance, ask(text("fine"), outputs=("ELSE",)))).outputs == []


INFO = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        found = []
        for r in requests:
            info = {
                "args": {**self.args, "model_config": json.loads(self.args["model_config"])["parameters"]},
                "id": r.request_id(), "correlation": r.correlation_id(), "flags": r.flags(), "timeout": r.timeout(),
                "outputs": r.requested_output_names(), "parameters": json.loads(r.parameters()),
                "cancelled": r.is_cancelled(), "trace": r.trace().get_context(),
            }
            out = pb_utils.Tensor("OUT", np.array([json.dumps(info)], dtype=np.object_))
            found.append(pb_utils.InferenceResponse([out]))
        return found
"""
INFO_CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ALSO" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "colour" value { string_value: "green" } }
"""


async def test_what_a_model_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, INFO, INFO_CONFIG) as instance:
        plain = json.loads(value(await answer(instance, ask(floats(1))))[0])
        assert plain == {
            "args": {
                "model_config": {"colour": {"string_value": "green"}},
                "model_instance_kind": "CPU",
                "model_instance_name": "demo_0",
                "model_instance_device_id": "0",
                "model_repository": str(tmp_path / "demo"),
                "model_version": "1",
                "model_name": "demo",
            },
            **{"id": "", "correlation": 0, "flags": 0, "timeout": 0, "outputs": ["OUT", "ALSO"]},
            **{"parameters": {}, "cancelled": False, "trace": None},
        }
        full = ask(
            floats(1),
            id="r1",
            outputs=("OUT",),
            sequence=SequenceRef("s-7", True, True),
            parameters={"a": 1, "b": "x", "c": 2.5, "d": True},
            timeout_us=9000000,
        )
        told = json.loads(value(await answer(instance, full))[0])
        assert (told["id"], told["correlation"], told["flags"], told["timeout"]) == ("r1", "s-7", 3, 9000000)
        assert told["outputs"] == ["OUT"] and told["parameters"] == {"a": 1, "b": "x", "c": 2.5, "d": True}


TYPES = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            outputs = []
            for t in request.inputs():
                assert t.is_cpu()
                if t.name() in ("BF16", "DLPACK"):
                    outputs.append(pb_utils.Tensor.from_dlpack(t.name(), t))
                else:
                    array = t.as_numpy()
                    if array.dtype.kind in "iuf":
                        array += 1
                    outputs.append(pb_utils.Tensor(t.name(), array))
            found.append(pb_utils.InferenceResponse(outputs))
        return found
"""


async def test_types_travel_both_ways(tmp_path: Path) -> None:
    kinds = {"FP16": "FP16", "STRING": "STRING", "BF16": "BF16", "DLPACK": "INT32", "BOOL": "BOOL", "UINT64": "UINT64"}
    config = "".join(
        f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: [ -1 ] }}\n'
        for name, kind in kinds.items()
        for side in ("input", "output")
    )
    async with running(tmp_path, TYPES, config) as instance:
        sent = [
            Tensor.from_numpy("FP16", np.array([[0.5, 2]], np.float16)),
            Tensor.from_strings("STRING", [b"a\0b", b"", "ü".encode()], (3, 1)),
            Tensor.from_numpy("BF16", np.array([16256, 49184], np.uint16), DType.BF16),
            Tensor.from_numpy("DLPACK", np.arange(6, dtype=np.int32).reshape(2, 3)),
            Tensor.from_numpy("BOOL", np.array([True, False])),
            Tensor.from_numpy("UINT64", np.array([2**64 - 2], np.uint64)),
        ]
        found = {t.name: t for t in (await answer(instance, ask(*sent))).outputs}
        assert found["FP16"].dtype is DType.FP16 and found["FP16"].numpy().tolist() == [[1.5, 3]]
        assert found["STRING"].strings() == [b"a\0b", b"", "ü".encode()] and found["STRING"].shape == (3, 1)
        assert found["BF16"].dtype is DType.BF16 and found["BF16"].numpy().tolist() == [16256, 49184]
        assert found["DLPACK"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["BOOL"].numpy().tolist() == [True, False]
        assert found["UINT64"].numpy().tolist() == [2**64 - 1]


async def test_bad_bytes_are_an_error_of_the_request(tmp_path: Path) -> None:
    async with running(tmp_path, ECHO, WORDS) as instance:
        found = await answer(instance, ask(tensor("IN", DType.BYTES, b"\xff\xff\xff\xff", (1,))))
        assert found.error is not None and "malformed BYTES" in found.error.message


async def test_coroutines(tmp_path: Path) -> None:
    code = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        async def one(request):
            await asyncio.sleep(0.05)
            if request.inputs()[0].as_numpy()[0] < 0:
                raise ValueError("negative")
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
        return await asyncio.gather(*(one(r) for r in requests))
"""
    async with running(tmp_path, code) as instance:
        found = await answers(instance, ask(floats(1)), ask(floats(2)))
        assert [value(one) for one in found] == [[1], [2]]
        failed = await answer(instance, ask(floats(-1)))
        assert failed.error is not None and "ValueError: negative\n\nAt:\n" in failed.error.message


async def test_coroutines_of_decoupled_models_overlap(tmp_path: Path) -> None:
    code = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            delay = float(request.inputs()[0].as_numpy()[0])
            if delay < 0:
                raise ValueError("negative")
            await asyncio.sleep(delay)
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([delay], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    async with running(tmp_path, code, DECOUPLED) as instance:
        slow = instance.execute([ask(floats(1))])
        await instance.free()
        quick = [r async for r in instance.execute([ask(floats(0))])]
        assert not slow.over and [r.response.empty for r in quick if r.response] == [False, True]
        await instance.free()
        (failed,) = [r async for r in instance.execute([ask(floats(-1))])]
        assert failed.failed and failed.response and failed.response.error
        assert "ValueError: negative" in failed.response.error.message
        assert len([r async for r in slow]) == 2


async def test_iterative_requests_are_rescheduled(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            left = request.inputs()[0].as_numpy()
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", left)])
            if left[0] > 0:
                sender.send(answer)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    async with running(tmp_path, code, DECOUPLED) as instance:
        seen = await replies(instance, ask(floats(1)), ask(floats(0)))
        first = [(r.rescheduled, r.response is None) for r in seen if r.index == 0]
        assert first == [(False, False), (True, True)]
        assert [r.response.final for r in seen if r.index == 1 and r.response] == [True]


async def test_states_are_outputs_too(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        names = ("OUT", "CARRY", "OTHER")
        one = np.array([[1]], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor(n, one) for n in names]) for _ in requests]
"""
    config = """
max_batch_size: 2
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  state { input_name: "CARRY_IN" output_name: "CARRY" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""
    async with running(tmp_path, code, config) as instance:
        for outputs in ((), ("OUT",)):
            found = await answer(instance, ask(floats(1), outputs=outputs))
            assert [t.name for t in found.outputs] == ["OUT", "CARRY"]


async def test_the_senders_rules(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1], np.float32))])
        said = []
        for arguments in ((None, 0), (None, 1), (answer, 5), ("text", 0), (answer, 1), (answer, 1), (None, 1)):
            try:
                sender.send(*arguments)
            except Exception as error:
                said.append(str(error))
        self.said = said
        pb_utils.Logger.log_info("|".join(said))
        assert len(said) == 6, said
"""
    async with running(tmp_path, code, FLOATS) as instance:
        assert value(await answer(instance, ask(floats(1)))) == [1]
