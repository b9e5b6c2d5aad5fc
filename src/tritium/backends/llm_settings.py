"""Settings of an LLM in a model repository: whatever its files say becomes an EngineConfig or is refused by name."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from tritium.backends.base import LoadContext
from tritium.backends.config import DynamicBatching, InstanceGroup, ModelConfig
from tritium.errors import TritiumError, invalid
from tritium.llm.config import EngineConfig
from tritium.llm.names import installed, named
from tritium.llm.params import is_sampling_field, make_params

Alias = Literal["tritium", "tensorrtllm", "vllm"]
MAX_JSON_BYTES = 1 << 20

# Keys of TensorRT-LLM's backend that mean something here, as (setting, turns the text into its value).
_TRTLLM_KEYS: dict[str, str] = {
    "kv_cache_free_gpu_mem_fraction": "memory_fraction",
    "max_num_sequences": "max_rows",
    "enable_kv_cache_reuse": "prefix_cache",
    "max_tokens_in_paged_kv_cache": "num_blocks",
    "max_queue_size": "max_waiting",
}
_TRTLLM_IGNORED: dict[str, str] = {
    "gpt_model_type": "batching is always in flight",
    "batching_type": "batching is always in flight",
    "batch_scheduler_policy": "the scheduler has one policy",
    "enable_chunked_context": "prompts are always cut into chunks",
    "decoupled_mode": "streaming follows the request",
    "tokenizer_dir": "the tokenizer comes from the checkpoint",
    "tokenizer_type": "the tokenizer comes from the checkpoint",
    "executor_worker_path": "there is no such worker",
    "max_attention_window_size": "the window comes from the checkpoint",
    "kv_cache_host_memory_bytes": "there is no host cache",
    "gpu_device_ids": "instance_group says where engines run",
    "xgrammar_tokenizer_info_path": "the tokenizer comes from the checkpoint",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "requests hold token ids on the host",
}
_VLLM_KEYS: dict[str, str] = {
    "max_model_len": "max_length",
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "max_tokens_per_step",
    "gpu_memory_utilization": "memory_fraction",
    "enable_prefix_caching": "prefix_cache",
    "dtype": "dtype",
    "seed": "seed",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "device": "device",
}
_VLLM_IGNORED: dict[str, str] = {
    "enforce_eager": "nothing is captured",
    "disable_log_requests": "requests are never logged",
    "disable_log_stats": "statistics are metrics",
    "tokenizer": "the tokenizer comes from the checkpoint",
    "tokenizer_mode": "the tokenizer comes from the checkpoint",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "enable_chunked_prefill": "prompts are always cut into chunks",
    "swap_space": "preempted sequences are computed again",
    "max_seq_len_to_capture": "nothing is captured",
    "distributed_executor_backend": "one engine is one process",
    "disable_custom_all_reduce": "one engine is one process",
    "load_format": "the format is seen from the files",
    "served_model_name": "the folder names the model",
}
_MUST_BE_ONE = ("tensor_parallel_size", "pipeline_parallel_size", "max_beam_width", "data_parallel_size")
_PATH_KEYS = ("gpt_model_path", "engine_dir", "model")

_FOREIGN: dict[Alias, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "tritium": ({}, {}),
    "tensorrtllm": (_TRTLLM_KEYS, _TRTLLM_IGNORED),
    "vllm": (_VLLM_KEYS, _VLLM_IGNORED),
}


@dataclass(slots=True)
class LlmSettings:
    """What the files of one LLM say.

    Attributes:
        engine: settings of each engine; ``model`` is the checkpoint's path.
        sampling: the model's own sampling values (triton_config.json).
        exclude_input: whether answers leave the prompt out; None follows the alias.
        groups: where engines run.
        notices: sentences for the operator: what was ignored and why.
        sources: which file said so, by field of ``engine``; the server's own settings have none here.
    """

    alias: Alias
    engine: EngineConfig
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    exclude_input: bool | None = None
    groups: tuple[InstanceGroup, ...] = ()
    notices: list[str] = field(default_factory=list[str])
    sources: dict[str, str] = field(default_factory=dict[str, str])


def read_settings(context: LoadContext, find_checkpoint: typing.Callable[[Path], Path]) -> LlmSettings:
    """Reads parameters, model.json, triton_config.json and the batching of a model.

    Args:
        find_checkpoint: finds the only checkpoint of a folder.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the file, the key, its value and what was expected.
    """
    config = context.config
    alias: Alias = "tritium"
    if config.backend in ("tensorrtllm", "vllm"):
        alias = typing.cast(Alias, config.backend)
    elif not config.backend and config.platform == "tensorrt_llm":
        alias = "tensorrtllm"
    found = LlmSettings(alias, EngineConfig(model=""), groups=config.instances)
    found.engine = replace(found.engine, **{**context.settings, **_batching(config)})
    if context.version_folder is not None:
        found.sources = {name: f"config.pbtxt: {_BATCHING[name]}" for name in _batching(config)}
    path = context.checkpoint
    if alias == "vllm" and context.version_folder is not None:
        path = _model_json(found, context.version_folder) or path
    path = _parameters(found, config.parameters, context.version_folder) or path
    _triton_config(found, context.triton_config)
    if path is None and context.version_folder is not None:
        path = find_checkpoint(context.version_folder)
    if path is None:
        raise invalid(f"model '{context.name}' names no checkpoint")
    found.engine = replace(found.engine, model=str(path))
    if found.engine.max_rows > found.engine.max_tokens_per_step:
        found.engine = replace(found.engine, max_tokens_per_step=found.engine.max_rows)
        found.sources["max_tokens_per_step"] = "raised to max_rows"
        found.notices.append(
            f"max_tokens_per_step is raised to {found.engine.max_rows}, one token per running sequence"
        )
    found.engine.checked()
    return found


# What a setting is called in config.pbtxt.
_BATCHING = {
    "max_rows": "max_batch_size",
    "queue_delay_us": "max_queue_delay_microseconds",
    "preferred_rows": "preferred_batch_size",
    "max_waiting": "max_queue_size",
    "queue_timeout_us": "default_timeout_microseconds",
}


def _batching(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if config.max_batch_size > 0:
        values["max_rows"] = config.max_batch_size
    if isinstance(config.batching, DynamicBatching):
        values["queue_delay_us"] = config.batching.delay_us
        values["preferred_rows"] = config.batching.preferred if config.batching.delay_us else ()
        values["max_waiting"] = config.batching.policy.max_size
        values["queue_timeout_us"] = config.batching.policy.timeout_us
    return values


def _parameters(found: LlmSettings, parameters: Mapping[str, str], folder: Path | None) -> Path | None:
    path = None
    keys, ignored = _FOREIGN[found.alias]
    for key, text in parameters.items():
        where = f"parameters['{key}']"
        if key in _PATH_KEYS:
            path = _resolve(where, text, folder)
        elif key == "exclude_input_in_output":
            found.exclude_input = typing.cast(bool, _parse(where, text, bool))
        elif not _take(found, where, key, text, keys, ignored):
            _set(found, where, key, text)
    return path


def _model_json(found: LlmSettings, folder: Path) -> Path | None:
    """The engine arguments of a vLLM model folder."""
    file = folder / "model.json"
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_JSON_BYTES:
        raise invalid(f"model.json has {file.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        entries = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise invalid(f"model.json is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise invalid("model.json is no JSON object")
    path = None
    for key, value in typing.cast(dict[str, Any], entries).items():
        where = f"model.json: {key}"
        if key == "model":
            path = _resolve(where, str(value), folder)
        elif not _take(found, where, key, value, _VLLM_KEYS, _VLLM_IGNORED):
            _set(found, where, key, value)
    return path


def _triton_config(found: LlmSettings, entries: Mapping[str, object]) -> None:
    """The model's own sampling values, and what articles write beside them."""
    for key, value in entries.items():
        if _take(found, f"triton_config.json: {key}", key, value, {}, _TRTLLM_IGNORED):
            continue
        if not is_sampling_field(key):
            raise invalid(f"triton_config.json: '{key}' is not known, expected a sampling parameter", param=key)
        found.sampling[key] = value
    try:
        make_params(found.sampling, vocab_size=1 << 31)
    except TritiumError as error:
        raise invalid(f"triton_config.json: {error.message}", param=error.param) from None


def _take(
    found: LlmSettings,
    where: str,
    key: str,
    value: Any,
    known: Mapping[str, str],
    ignored: Mapping[str, str],
) -> bool:
    """Handles a key of another server; whether it was one."""
    if key in _MUST_BE_ONE:
        if str(value) != "1":
            raise invalid(f"{where} is {value}, expected 1: this version has no other", param=key)
        return True
    if key in ignored:
        found.notices.append(f"{where} is ignored: {ignored[key]}")
        return True
    if key not in known:
        return False
    if value in ("", "auto", None, "${" + key + "}"):
        return True
    if key == "max_tokens_in_paged_kv_cache":
        value = max(1, typing.cast(int, _parse(where, value, int)) // found.engine.block_size)
    if key == "dtype":
        value = {"half": "float16", "float": "float32"}.get(value, value)
    _set(found, where, known[key], value)
    return True


def _set(found: LlmSettings, where: str, name: str, value: Any) -> None:
    hints = typing.get_type_hints(EngineConfig)
    names = sorted(f.name for f in fields(EngineConfig) if f.name != "model")
    if name not in names:
        raise invalid(f"{where} is not known, expected one of {', '.join(names)}", param=name)
    found.engine = replace(found.engine, **{name: _parse(where, value, hints[name])})
    found.sources[name] = where if where.startswith("model.json") else f"config.pbtxt: {where}"


def _parse(where: str, value: Any, kind: Any) -> Any:
    """A value of that type from a text of config.pbtxt or from JSON."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
        origin = typing.get_origin(kind)
    text = str(value).strip()
    if origin is Literal:
        if text not in typing.get_args(kind):
            raise invalid(f"{where} is '{text}', expected one of {', '.join(typing.get_args(kind))}")
        return text
    try:
        if origin is tuple:
            return tuple(int(part) for part in text.strip("[]()").split(",") if part.strip())
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        number = kind(text)
        if kind is float and not math.isfinite(number):
            raise ValueError
        return number
    except (ValueError, KeyError, OverflowError):
        name = "a list of integers" if origin is tuple else {"bool": "true or false"}.get(kind.__name__, kind.__name__)
        raise invalid(f"{where} is '{text[:60]}', expected {name}") from None


def _resolve(where: str, text: str, folder: Path | None) -> Path:
    """A path, relative to the version folder, or the name of a model that comes with a package."""
    path = Path(text)
    if not path.is_absolute() and folder is not None:
        path = folder / path
    if path.exists():
        return path
    model = named(text)
    if model is None:
        raise invalid(f"{where} is '{text}', which does not exist")
    return installed(model)
