"""``triton_python_backend_utils`` by itself: tensors, DLPack, configurations, errors."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from tritium.backends import pb_dlpack
from tritium.backends.pb_order import in_order
from tritium.backends.pb_tensor import Tensor
from tritium.types import DType
from tritium.types import Tensor as TypedTensor


@pytest.mark.parametrize("kind", ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"])
def test_numbers(kind: str) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(kind)
    tensor = pb_utils.Tensor("X", array)
    assert tensor.as_numpy() is array and tensor.shape() == [2, 3] and tensor.name() == "X" and tensor.is_cpu()
    assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) == array.dtype.type
    again = pb_utils.Tensor.from_dlpack("Y", tensor)
    assert again.name() == "Y" and np.array_equal(again.as_numpy(), array) and again.as_numpy().dtype == array.dtype
    assert np.array_equal(np.from_dlpack(tensor), array)
    assert tensor.typed().numpy().tolist() == array.tolist()


def test_strings() -> None:
    tensor = pb_utils.Tensor("S", np.array([b"a", "ü", 3], dtype=np.object_))
    assert tensor.typed().strings() == [b"a", "ü".encode(), b"3"]
    assert pb_utils.Tensor("S", np.array([b"xy"])).typed().strings() == [b"xy"]
    with pytest.raises(pb_utils.TritonModelException, match="string tensors"):
        tensor.to_dlpack()
    packed = pb_utils.serialize_byte_tensor(np.array([b"a", b""], dtype=np.object_))
    assert packed == b"\x01\0\0\0a\0\0\0\0"
    assert pb_utils.deserialize_bytes_tensor(packed).tolist() == [b"a", b""]


def test_types_without_a_counterpart() -> None:
    for array in (np.array(["text"]), np.zeros(2, np.complex64)):
        with pytest.raises(pb_utils.TritonModelException, match=r"np\.object_"):
            pb_utils.Tensor("X", array)
    swapped = pb_utils.Tensor("X", np.array([1, 2], ">f4"))
    assert swapped.typed().dtype is DType.FP32 and swapped.typed().numpy().tolist() == [1, 2]


def test_received_tensors_are_views() -> None:
    raw = bytearray(np.array([1, 2], np.int32).tobytes())
    tensor = Tensor.received(TypedTensor("IN", DType.INT32, (2,), memoryview(raw)))
    tensor.as_numpy()[0] = 7
    assert np.frombuffer(raw, np.int32)[0] == 7
    words = Tensor.received(TypedTensor("B", DType.BF16, (1,), memoryview(bytearray(b"\x80\x3f"))))
    with pytest.raises(pb_utils.TritonModelException, match="BF16"):
        words.as_numpy()
    assert pb_utils.Tensor.from_dlpack("C", words).typed().dtype is DType.BF16


def test_torch_tensors_without_a_copy() -> None:
    import torch
    from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensor = pb_utils.Tensor.from_dlpack("X", source)
    assert tensor.typed().dtype is DType.BF16 and tensor.shape() == [2, 3]
    back = from_dlpack(tensor.to_dlpack())
    back[0, 0] = 9
    assert source[0, 0] == 9
    assert pb_utils.Tensor.from_dlpack("T", source.float().T).as_numpy().tolist() == source.float().T.tolist()
    assert pb_utils.Tensor.from_dlpack("C", to_dlpack(torch.zeros(0, 2))).shape() == [0, 2]
    assert pb_utils.Tensor.from_dlpack("S", torch.tensor(4)).as_numpy() == 4


def test_capsules_give_their_memory_back() -> None:
    before = len(pb_dlpack._out)
    tensor = pb_utils.Tensor("X", np.arange(4))
    capsule = tensor.to_dlpack()
    unused = tensor.to_dlpack()
    taken = pb_utils.Tensor.from_dlpack("Y", capsule)
    with pytest.raises(pb_utils.TritonModelException, match="not used yet"):
        pb_utils.Tensor.from_dlpack("Z", capsule)
    assert len(pb_dlpack._out) == before + 2
    del unused, taken, capsule
    gc.collect()
    assert len(pb_dlpack._out) == before


def test_tensors_of_a_gpu_go_out_through_their_own_library() -> None:
    class OnGpu:
        dtype, shape = "torch.float32", (2,)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def cpu(self) -> Any:
            return np.array([1, 2], np.float32)

    tensor = pb_utils.Tensor.from_dlpack("G", OnGpu())
    assert not tensor.is_cpu() and tensor.shape() == [2] and tensor.__dlpack_device__() == (2, 0)
    with pytest.raises(pb_utils.TritonModelException, match="GPU"):
        tensor.as_numpy()
    assert tensor.typed().numpy().tolist() == [1, 2]


def test_model_config() -> None:
    given = {"name": "m", "max_batch_size": 0, "input": [{"name": "A", "data_type": "TYPE_INT8", "dims": [1]}]}
    config = pb_utils.ModelConfig(json.dumps(given))
    config.add_input({"name": "A", "data_type": "TYPE_INT8", "dims": [1]})
    config.add_input({"name": "B", "data_type": "TYPE_FP32", "dims": [2], "optional": True})
    config.add_output({"name": "C", "data_type": "TYPE_FP32", "dims": [2]})
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    found = config.as_dict()
    assert found["max_batch_size"] == 4 and found["dynamic_batching"] == {}
    assert pb_utils.get_input_config_by_name(found, "B") == found["input"][1]
    assert pb_utils.get_output_config_by_name(found, "none") is None
    assert pb_utils.using_decoupled_model_transaction_policy(found)
    wrongs: list[tuple[Any, Any]] = [
        (config.add_input, {"data_type": "TYPE_INT8", "dims": [1]}),
        (config.add_input, {"name": "A", "dims": [1]}),
        (config.add_input, {"name": "A", "data_type": "TYPE_INT8"}),
        (config.add_input, {"name": "A", "data_type": "TYPE_INT8", "dims": [1], "x": 1}),
        (config.add_input, {"name": "A", "data_type": "TYPE_FP32", "dims": [1]}),
        (config.add_input, {"name": "B", "data_type": "TYPE_FP32", "dims": [2], "optional": False}),
        (config.add_output, {"name": "C", "data_type": "TYPE_FP32", "dims": [3]}),
        (config.set_max_batch_size, 2),
        (config.set_model_transaction_policy, {"decoupled": False}),
        (config.set_model_transaction_policy, {"other": False}),
    ]
    for call, argument in wrongs:
        with pytest.raises(ValueError):
            call(argument)
    other = pb_utils.ModelConfig('{"name": "m", "sequence_batching": {}}')
    with pytest.raises(ValueError, match="sequence_batching"):
        other.set_dynamic_batching()


def test_errors_and_constants() -> None:
    error = pb_utils.TritonError("gone", pb_utils.TritonError.NOT_FOUND)
    assert error.code() == pb_utils.TritonError.NOT_FOUND and error.message() == str(error) == "gone"
    assert pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.TritonError("x", 99)
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13 and pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_to_numpy_type(14) is None


def test_outside_a_model() -> None:
    pb_utils.Logger.log_info("goes nowhere")
    with pytest.raises(pb_utils.TritonModelException, match="no server"):
        pb_utils.load_model("x")
    request = pb_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[])
    with pytest.raises(pb_utils.TritonModelException, match="no server"):
        request.exec()
    with pytest.raises(pb_utils.TritonModelException, match="sender"):
        request.get_response_sender()
    with pytest.raises(pb_utils.TritonModelException, match="release flags"):
        request.set_release_flags(2)
    with pytest.raises(pb_utils.TritonModelException, match="Correlation ID"):
        pb_utils.InferenceRequest(model_name="m", correlation_id=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_name"):
        pb_utils.InferenceRequest(inputs=[], requested_output_names=[])
    with pytest.raises(TypeError, match="output_tensors"):
        pb_utils.InferenceResponse([np.zeros(1)])  # type: ignore[list-item]


def test_inputs_come_in_the_recorded_order() -> None:
    """The order of conformance case types/all_at_once_http."""
    sent = [
        *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
        *("FP16", "FP32", "FP64", "BF16", "STRING"),
    ]
    seen = [
        *("BF16", "STRING", "UINT64", "INT64", "UINT8", "INT16", "UINT16", "UINT32", "INT32"),
        *("FP16", "BOOL", "FP32", "INT8", "FP64"),
    ]
    assert in_order(tuple(f"IN_{name}" for name in sent)) == tuple(f"IN_{name}" for name in seen)
    many = tuple(f"input-{i}" for i in range(100))
    assert sorted(in_order(many)) == sorted(many) and in_order(()) == ()
