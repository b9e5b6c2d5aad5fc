from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.executors import config_of
from tritium.backends.config import (
    Control,
    Direct,
    DynamicBatching,
    Ensemble,
    InitialState,
    Oldest,
    QueuePolicy,
    Resource,
    SequenceBatching,
    Step,
    WarmupInput,
)
from tritium.errors import TritiumError
from tritium.types import DType

CONFORMANCE = Path(__file__).parents[1] / "conformance"
IO = """
backend: "python" max_batch_size: 4
input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "B" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def test_dynamic_batching():
    batching = config_of(
        IO
        + """dynamic_batching { priority_levels: 3 default_priority_level: 2 max_queue_delay_microseconds: 7
        default_queue_policy { max_queue_size: 8 timeout_action: DELAY default_timeout_microseconds: 5 }
        priority_queue_policy { key: 3 value { max_queue_size: 1 } } }"""
    ).batching
    policies = {3: QueuePolicy(max_size=1)}
    default = QueuePolicy(timeout_us=5, max_size=8, delay=True)
    assert batching == DynamicBatching((4,), 7, 3, 2, default, policies)
    assert isinstance(batching, DynamicBatching)
    assert [batching.level_of(p) for p in (0, 1, 3, 4)] == [2, 1, 3, 2]
    assert [batching.policy_of(level) for level in (1, 3)] == [default, policies[3]]


def test_sequence_batching():
    config = config_of(
        IO
        + """sequence_batching { oldest { max_candidate_sequences: 3 } iterative_sequence: true
        control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 2 ] } }
        control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
        state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [ -1 ]
                initial_state { name: "z" data_type: TYPE_FP32 dims: [ 2 ] data_file: "f" } } }"""
    )
    batching = config.batching
    assert isinstance(batching, SequenceBatching)
    assert batching.strategy == Oldest(3, (4,))
    assert batching.idle_us == 1_000_000
    assert batching.iterative
    assert batching.controls == (Control("start", "S", DType.FP32, (0, 2)), Control("corrid", "C", DType.BYTES))
    assert batching.states[0].initial == (InitialState("z", DType.FP32, (2,), "f"),)
    shown = config.to_json()["sequence_batching"]
    assert (shown["max_sequence_idle_microseconds"], shown["oldest"]["preferred_batch_size"]) == (1_000_000, [4])
    assert config_of(IO + "sequence_batching { }").batching == SequenceBatching(Direct())


def test_ensemble_warmup_and_resources():
    config = config_of(
        """platform: "ensemble" input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "B" data_type: TYPE_INT32 dims: [ 1 ] }
        ensemble_scheduling { max_inflight_requests: 3 step { model_name: "m"
          input_map { key: "x" value: "A" } output_map { key: "y" value: "B" } } }"""
    )
    assert config.batching == Ensemble((Step("m", -1, {"x": "A"}, {"y": "B"}),), 3)
    assert config.instances == ()
    assert config.to_json()["ensemble_scheduling"]["max_inflight_requests"] == 3
    config = config_of(
        IO
        + """model_warmup { name: "w" batch_size: 2 inputs { key: "A" value {
               data_type: TYPE_INT32 dims: [ 1 ] random_data: true } } }
             instance_group { rate_limiter { priority: 2 resources { name: "r" count: 3 global: true } } }"""
    )
    assert (config.warmup[0].count, config.warmup[0].inputs) == (1, (WarmupInput("A", DType.INT32, (1,), "random"),))
    assert (config.instances[0].resources, config.instances[0].priority) == ((Resource("r", 3, True),), 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }", "one level"),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy "
            "{ timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "timeout_action DELAY, expected REJECT",
        ),
        ("dynamic_batching { priority_queue_policy { key: 2 value { } } }", "has level 2, expected levels from 1"),
        ("sequence_batching { direct { minimum_slot_utilization: 2 } }", "minimum_slot_utilization is 2"),
        ("sequence_batching { oldest { preferred_batch_size: 9 } }", "preferred_batch_size has 9"),
        ("sequence_batching { oldest { max_candidate_sequences: -1 } }", "max_candidate_sequences is -1"),
        (
            'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } } }',
            "expected one of int32_false_true, fp32_false_true and bool_false_true",
        ),
        (
            "sequence_batching { "
            + 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } } ' * 2
            + "}",
            "has 2 controls of kind CONTROL_SEQUENCE_END",
        ),
        (
            'sequence_batching { state { input_name: "i" data_type: TYPE_FP32 dims: [ 0 ] } }',
            "state 'i' has dims [0]",
        ),
        (
            'sequence_batching { state { input_name: "i" data_type: TYPE_FP32 dims: [ 1 ] '
            "initial_state { data_type: TYPE_INT32 dims: [ 1 ] } } }",
            "initial_state of another data_type, expected FP32",
        ),
        ('ensemble_scheduling { step { model_name: "x" } }', "platform is '' with ensemble_scheduling"),
        ('platform: "ensemble"', "platform is 'ensemble' without ensemble_scheduling"),
        ('platform: "ensemble" ensemble_scheduling { }', "must specify 'step' for ensemble 'm'"),
        ('platform: "ensemble" ensemble_scheduling { step { } }', "must specify 'model_name' in step 0"),
        ("response_cache { enable: true } model_transaction_policy { decoupled: true }", "expected false with"),
        ('batch_input { target_name: "x" source_input: "Q" data_type: TYPE_INT32 }', "source_input 'Q'"),
        ('batch_input { target_name: "x" source_input: "A" data_type: TYPE_INT8 }', "expected INT32 or FP32"),
        ('batch_input { source_input: "A" data_type: TYPE_INT32 }', "has 0 values in target_name"),
        ('batch_output { target_name: "Q" source_input: "A" }', "target_name 'Q'"),
        ('model_warmup { name: "w" batch_size: 5 }', "has batch_size 5, expected at most max_batch_size"),
        (
            'model_warmup { name: "w" inputs { key: "A" value { data_type: TYPE_INT32 dims: [ 1 ] } } }',
            "expected one of zero_data, random_data, input_data_file",
        ),
        (
            'model_warmup { name: "w" inputs { key: "A" '
            "value { data_type: TYPE_INT32 dims: [ -1 ] zero_data: true } } }",
            "has dims [-1], expected positive",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, words: str):
    with pytest.raises(TritiumError) as caught:
        config_of(IO + text)
    assert words in caught.value.message


def test_ensembles_are_shown_as_recorded():
    golden = json.loads((CONFORMANCE / "golden" / "config.json").read_text())
    for model in ("ens_fan", "ens_pair"):
        text = (CONFORMANCE / "model_repository" / model / "config.pbtxt").read_text()
        assert config_of(text, model).to_json() == golden[f"config/http/{model}"]["json"]
