from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.serving.executors import config_of, stats
from tests.serving.fakes import ECHO, Echo, write_model
from tests.serving.support import refused, serving
from tritium.backends.base import LoadContext
from tritium.errors import Code, TritiumError
from tritium.serving import instances, warmup
from tritium.serving.instances import Surroundings, make_backend

IO = """
backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
SAMPLE = """
model_warmup { name: "w" batch_size: %d count: 2
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 3 ] %s } } }
"""


def places(groups: str) -> list[tuple[str, str, int]]:
    return [(p.name, p.kind, p.device) for p in instances._places(config_of(IO + groups))]


def test_where_copies_run_and_what_they_are_called(monkeypatch: pytest.MonkeyPatch):
    assert places("") == [("m_0", "cpu", 0)]
    assert places("instance_group { count: 2 kind: KIND_CPU } instance_group { kind: KIND_MODEL }") == [
        ("m_0_0", "cpu", 0),
        ("m_0_1", "cpu", 0),
        ("m_1_0", "model", 0),
    ]
    monkeypatch.setattr(instances, "gpu_count", lambda: 0)
    with pytest.raises(TritiumError, match="instance group m_0 of model m has kind KIND_GPU but no GPUs are available"):
        places("instance_group { kind: KIND_GPU }")
    monkeypatch.setattr(instances, "gpu_count", lambda: 2)
    assert places("instance_group { kind: KIND_GPU count: 1 }") == [("m_0_0", "gpu", 0), ("m_0_1", "gpu", 1)]
    with pytest.raises(TritiumError, match="invalid or unsupported gpu id 2"):
        places("instance_group { kind: KIND_GPU gpus: [ 2 ] }")


async def test_what_needs_a_server_says_so():
    for text in (IO, 'platform: "ensemble" ensemble_scheduling { step { model_name: "a" '
                 'input_map { key: "a" value: "a" } output_map { key: "a" value: "a" } } }'):  # fmt: skip
        context = LoadContext("m", "1", config_of(text))
        with pytest.raises(TritiumError, match="needs a server around it"):
            await make_backend(context, Surroundings(), stats()).complete(context.config)


def test_sequences_want_a_backend_that_the_server_schedules():
    context = LoadContext("m", "1", config_of(IO.replace("python", "echo") + "sequence_batching { }"))
    with pytest.raises(TritiumError, match="schedules requests by itself"):
        make_backend(context, Surroundings(), stats())


def requests(text: str, folder: Path | None = None):
    config = config_of(IO + text)
    return warmup.requests_of(config, config.warmup[0], "1", folder)


def test_warm_up_samples(tmp_path: Path):
    zero = requests(SAMPLE % (2, "zero_data: true"))
    assert [r.inputs["IN"].numpy().tolist() for r in zero] == [[[0, 0, 0]]] * 2
    (one,) = requests(SAMPLE % (0, "random_data: true"))
    assert one.inputs["IN"].shape == (3,)
    assert ((one.inputs["IN"].numpy() >= 0) & (one.inputs["IN"].numpy() < 1)).all()
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(np.array([1, 2, 3], np.float32).tobytes())
    (one,) = requests(SAMPLE % (1, 'input_data_file: "f"'), tmp_path)
    assert one.inputs["IN"].numpy().tolist() == [[1, 2, 3]]
    with pytest.raises(TritiumError, match="file 'warmup/none' for 'IN' is not in the folder"):
        requests(SAMPLE % (1, 'input_data_file: "none"'), tmp_path)


@pytest.mark.parametrize("kind", ["INT8", "UINT64", "BOOL", "BF16", "FP16", "STRING"])
def test_random_data_of_all_kinds(kind: str):
    text = SAMPLE.replace("FP32", kind) % (1, "random_data: true")
    (one,) = requests(text)
    assert one.inputs["IN"].numpy().shape == (1, 3)


def test_a_warm_up_request_of_a_sequence_is_told_of_it():
    control = """sequence_batching { control_input { name: "%s" control { kind: CONTROL_SEQUENCE_%s } }
    state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] } }"""
    for name, kind in (("ID", "CORRID data_type: TYPE_STRING"), ("START", "START int32_false_true: [ 0, 1 ]")):
        (one,) = requests(control % (name, kind) + SAMPLE % (1, "zero_data: true"))
        assert set(one.inputs) == {name, "S", "IN"}


async def test_a_backend_that_schedules_itself_is_warmed_up_too(repository: Path):
    write_model(repository, "echo", ECHO + SAMPLE % (2, "zero_data: true"))
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        assert server.model_ready("echo")
        assert len(Echo.made[0].seen) == 4
        # As recorded from Triton, warm-up runs count.
        assert server.statistics("echo")[0].inference_count == 4
    write_model(repository, "echo", ECHO + SAMPLE % (1, 'input_data_file: "none"'))
    async with serving(repository, control="explicit") as server:
        error = await refused(server.load("echo"))
        assert error.code is Code.INVALID_ARGUMENT
        assert "failed to run warmup sample 'w': file 'warmup/none'" in error.message
