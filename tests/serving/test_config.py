from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium.backends.config import All, InstanceGroup, Latest, QueuePolicy, Specific, TensorSpec
from tritium.errors import Code, TritiumError
from tritium.serving.config import (
    MAX_CONFIG_BYTES,
    empty,
    make_config,
    parse_json,
    parse_text,
    read_limited,
    render,
)
from tritium.serving.config_checks import check_config, without_effect
from tritium.types import DType

CONFORMANCE = Path(__file__).parent.parent / "conformance"
# Models of the recorded server whose every field this version can honour.
RECORDED = (
    *("add_sub_flat", "add_sub_fp32", "batch_report", "echo_bytes", "optional_in", "priority_queue", "request_info"),
    *("reshape_io", "stream_repeat", "two_workers", "ver_all", "ver_latest"),
)

LLAMA = """
name: "llama-7b-trtllm"
platform: "tensorrt_llm"
max_batch_size: 8
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_GPU } ]
"""
LLAMA_BATCHING = LLAMA + "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 5000 }"
QWEN = """
name: "qwen-tensorrt"
backend: "tensorrtllm"
max_batch_size: 64
instance_group [
  {
    count: 1
    kind: KIND_GPU
  }
]
dynamic_batching {
  max_queue_delay_microseconds: 100
}
"""


def made(text: str, name: str = "m"):
    return make_config(parse_text(text.encode(), "m/config.pbtxt"), name, "m/config.pbtxt")


def refused(text: str, name: str = "m") -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        made(text, name)
    return caught.value


def test_the_first_configuration_of_the_issue():
    config = made(LLAMA, "llama-7b-trtllm")
    assert (config.platform, config.backend, config.max_batch_size) == ("tensorrt_llm", "", 8)
    assert config.inputs == (TensorSpec("input_ids", DType.INT32, (-1,)),)
    assert config.outputs == (TensorSpec("output_ids", DType.INT32, (-1,)),)
    assert config.instances == (InstanceGroup("llama-7b-trtllm_0", 1, "gpu"),)
    assert config.batching is None
    assert config.versions == Latest(1)


def test_the_first_configuration_with_batching():
    config = made(LLAMA_BATCHING, "llama-7b-trtllm")
    assert config.batching is not None
    assert (config.batching.preferred, config.batching.delay_us) == ((4, 8), 5000)


def test_the_second_configuration_of_the_issue():
    config = made(QWEN, "qwen-tensorrt")
    assert (config.backend, config.max_batch_size, config.inputs, config.outputs) == ("tensorrtllm", 64, (), ())
    assert config.batching is not None
    assert (config.batching.preferred, config.batching.delay_us) == ((64,), 100)


@pytest.mark.parametrize("name", RECORDED)
def test_json_is_what_the_recorded_server_answers(name: str):
    golden = json.loads((CONFORMANCE / "golden" / "config.json").read_text())[f"config/http/{name}"]["json"]
    text = (CONFORMANCE / "model_repository" / name / "config.pbtxt").read_bytes()
    config = make_config(parse_text(text, name), name)
    # What the Python backend adds, and what a server without a GPU makes of KIND_AUTO.
    config.source.default_model_filename = "model.py"
    groups = tuple(dataclasses.replace(group, device="cpu") for group in config.instances)
    assert render(dataclasses.replace(config, instances=groups)).to_json() == golden


def test_json_leaves_the_initial_state_of_sequences_as_texts():
    config = made("max_batch_size: 1")
    state = config.source.sequence_batching.state.add()
    state.dims.append(7)
    state.initial_state.add().dims.append(8)
    config.source.model_warmup.add().inputs["IN"].dims.append(9)
    found = config.to_json()
    assert found["sequence_batching"]["state"][0]["dims"] == [7]
    assert found["sequence_batching"]["state"][0]["initial_state"][0]["dims"] == ["8"]
    assert found["model_warmup"][0]["inputs"]["IN"]["dims"] == [9]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('name: "m"\n  no_such_field: 3', "2:3", "no field named"),
        ("name: 3", "1:7", "Expected string"),
        ('input [ { name: "x" ', "1:", "Expected"),
        ("max_batch_size: 99999999999999", "1:17", "out of range"),
        ("dynamic_batching { } sequence_batching { }", "1:22", "oneof"),
        ('name: "m" name: "m"', "1:17", "multiple"),
        ("version_policy { latest { } all { } }", "1:", "oneof"),
    ],
)
def test_errors_of_the_text_say_where(text: str, place: str, words: str):
    error = refused(text)
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message.startswith(f"m/config.pbtxt:{place}")
    assert words in error.message
    assert len(error.message) < 400


def test_a_byte_that_is_no_text_has_a_place():
    with pytest.raises(TritiumError, match="c:2:3: byte 0xff is not UTF-8"):
        parse_text(b"#\n  \xff", "c")


@pytest.mark.parametrize("text", ["[a.b/c.d] {" * 100_000, "input { " * 90_000, "x: [" * 90_000])
def test_nesting_without_end_is_an_error(text: str):
    with pytest.raises(TritiumError, match=r"c(:1:\d+: | is nested too deeply)"):
        parse_text(text.encode(), "c")


def test_files_are_limited(tmp_path: Path):
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(TritiumError, match="more than 1048576 bytes"):
        read_limited(path, "c")
    path.write_bytes(b"#" * MAX_CONFIG_BYTES)
    assert len(read_limited(path, "c")) == MAX_CONFIG_BYTES
    with pytest.raises(TritiumError, match="c is not a regular file"):
        read_limited(tmp_path, "c")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.pbtxt"
    path.touch()

    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TritiumError, match="c cannot be read: Permission denied"):
        read_limited(path, "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name: "other"', "name is 'other', expected 'm'"),
        ("max_batch_size: -1", "max_batch_size is -1, expected a non-negative"),
        ("input { data_type: TYPE_INT32 dims: 1 }", "input[0] has no name"),
        ('input { name: "a" dims: 1 }', "input 'a' has no data_type"),
        ('input { name: "a" data_type: TYPE_INT32 }', "input 'a' has no dims"),
        ('output { name: "a" data_type: TYPE_INT32 dims: 0 }', "output 'a' has dims [0]"),
        ('output { name: "a" data_type: TYPE_INT32 dims: -2 }', "output 'a' has dims [-2]"),
        ('input { name: "a" data_type: TYPE_INT32 dims: 4 reshape { shape: [2, 3] } }', "reshape [2, 3]"),
        ('input { name: "a" data_type: TYPE_INT32 dims: 4 reshape { shape: [-3] } }', "reshape [-3]"),
        ('input { name: "a" data_type: TYPE_INT32 dims: 4 reshape { shape: [-1] } }', "reshape [-1]"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }", "preferred_batch_size has 5"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }", "preferred_batch_size has 0"),
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level is 0, expected a value from 1"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "default_priority_level is 3"),
        ("instance_group { count: -1 }", "instance_group 'm_0' has count -1"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "gpus [0], expected none with KIND_CPU"),
        ("instance_group { kind: KIND_GPU gpus: -1 }", "gpus [-1], expected indices"),
        ("version_policy { specific { versions: [0, 1] } }", "version_policy.specific has 0"),
    ],
)
def test_values_that_are_refused(text: str, words: str):
    error = refused(text)
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message.startswith("m/config.pbtxt: ")
    assert words in error.message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('model_operations { op_library_filename: "x.so" }', "model_operations"),
        ('model_repository_agents { agents { name: "a" } }', "model_repository_agents"),
        ("model_metrics { }", "model_metrics"),
        ("instance_group { passive: true }", "instance_group.passive"),
        ("instance_group { secondary_devices { } }", "instance_group.secondary_devices"),
        ("input { is_shape_tensor: true }", "input.is_shape_tensor"),
        ("output { is_shape_tensor: true }", "output.is_shape_tensor"),
        ("input { is_non_linear_format_io: true }", "input.is_non_linear_format_io"),
        ("output { is_non_linear_format_io: true }", "output.is_non_linear_format_io"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(text: str, field: str):
    error = refused(text)
    assert error.code is Code.UNIMPLEMENTED
    assert error.message == f"m/config.pbtxt: {field}: not supported yet"
    assert error.param == field


def test_fields_that_say_nothing_are_fine():
    made("response_cache { } model_transaction_policy { } dynamic_batching { default_queue_policy { } }")


def test_fields_without_effect_are_named():
    source = parse_text(
        b'optimization { eager_batching: true graph { level: 1 } } runtime: "x" default_model_filename: "y"'
        b'cc_model_filenames { key: "a" value: "b" }'
        b'instance_group { profile: "p" host_policy: "h" } input { format: FORMAT_NHWC }',
        "c",
    )
    assert without_effect(source) == [
        *("optimization.graph", "optimization.eager_batching", "input.format", "runtime", "default_model_filename"),
        *("cc_model_filenames", "instance_group.profile", "instance_group.host_policy"),
    ]
    assert "optimization.graph" not in without_effect(source, {"optimization.graph"})
    assert without_effect(empty()) == []
    assert without_effect(made("").source) == []


def test_versions_and_instances():
    assert made("version_policy { all { } }").versions == All()
    assert made("version_policy { specific { versions: [3, 1, 3] } }").versions == Specific((1, 3))
    assert made("version_policy { latest { num_versions: 2 } }").versions == Latest(2)
    assert made("version_policy { latest { } }").versions == Latest(1)
    config = made('instance_group [ { name: "own" kind: KIND_MODEL }, { count: 2 kind: KIND_GPU gpus: [1, 0] } ]')
    assert config.instances == (InstanceGroup("own", 1, "model"), InstanceGroup("m_1", 2, "gpu", (1, 0)))
    assert made("").instances == (InstanceGroup("m"),)


def test_what_a_backend_completes_is_rendered():
    config = made('input { name: "a" data_type: TYPE_INT32 dims: [2] format: FORMAT_NHWC } max_batch_size: 2')
    completed = dataclasses.replace(
        config,
        inputs=(TensorSpec("new", DType.BYTES, (1,), optional=True, reshape=(), ragged=True), config.inputs[0]),
        outputs=(TensorSpec("out", DType.BF16, (-1,)),),
        decoupled=True,
    )
    found = render(completed).to_json()
    assert [tensor["name"] for tensor in found["input"]] == ["new", "a"]
    assert found["input"][0]["optional"] and found["input"][0]["allow_ragged_batch"]
    assert found["input"][0]["reshape"] == {"shape": []}
    assert found["input"][1]["format"] == "FORMAT_NHWC"
    assert found["output"][0]["data_type"] == "TYPE_BF16"
    assert found["model_transaction_policy"] == {"decoupled": True}
    assert config.source.input[0].name == "a"
    assert completed.input("new") is completed.inputs[0] and completed.input("out") is None
    assert completed.output("out") is completed.outputs[0] and completed.output("new") is None


def test_pinned_memory_that_was_turned_off_stays_off():
    found = made("optimization { input_pinned_memory { enable: false } }").to_json()["optimization"]
    assert (found["input_pinned_memory"], found["output_pinned_memory"]) == ({"enable": False}, {"enable": True})


def test_configurations_in_json():
    source = parse_json('{"backend": "x", "parameters": {"a": {"string_value": "b"}}}', "config")
    assert make_config(source, "m").parameters == {"a": "b"}
    for text, words in (
        ("{", "config: "),
        ('{"no_such_field": 1}', "no_such_field"),
        ("[" * 100_000, "config"),
        ("x" * (MAX_CONFIG_BYTES + 1), "at most 1048576"),
    ):
        with pytest.raises(TritiumError, match=words):
            parse_json(text, "config")


def test_parsers_that_give_up(monkeypatch: pytest.MonkeyPatch):
    def deep(*_args: object) -> None:
        raise RecursionError

    monkeypatch.setattr(json_format, "Parse", deep)
    monkeypatch.setattr(text_format, "Parse", deep)
    with pytest.raises(TritiumError, match="config is nested too deeply"):
        parse_json("{}", "config")
    with pytest.raises(TritiumError, match="config is nested too deeply"):
        parse_text(b"", "config")


def test_a_request_can_only_shorten_the_wait():
    assert QueuePolicy(100, allow_override=True).wait_us(50) == 50
    assert QueuePolicy(100, allow_override=True).wait_us(500) == 100
    assert QueuePolicy(100, allow_override=True).wait_us(0) == 100
    assert QueuePolicy(100).wait_us(50) == 100
    assert QueuePolicy(0, allow_override=True).wait_us(50) == 50
    assert QueuePolicy().wait_us(50) == 0


_FRAGMENTS = """name input dims { } [ ] : "m" -1 8 , max_batch_size dynamic_batching instance_group TYPE_INT32 # \x00
data_type reshape shape version_policy latest"""
_words = st.sampled_from(_FRAGMENTS.split())


@given(st.one_of(st.binary(max_size=200), st.lists(_words, max_size=40).map(lambda words: " ".join(words).encode())))
@settings(max_examples=150, deadline=None)
def test_no_text_does_harm(content: bytes):
    try:
        config = make_config(parse_text(content, "c"), "m")
    except TritiumError as error:
        assert error.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)
    else:
        again = make_config(config.source, "m")
        assert again == config
        assert again.source == config.source
        json.dumps(config.to_json())


def test_a_batch_size_that_is_still_to_come_limits_nothing():
    text = "dynamic_batching { preferred_batch_size: 4 }"
    open_yet = made(text)
    with pytest.raises(TritiumError, match="preferred_batch_size has 4"):
        check_config(open_yet, complete=True)
    tensors = "".join(f'{kind} {{ name: "T" data_type: TYPE_FP32 dims: 1 }} ' for kind in ("input", "output"))
    with pytest.raises(TritiumError, match="preferred_batch_size has 4"):
        made(text + tensors)
