"""What a configuration may say: fields that are refused, fields without effect, and the rules for the rest."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

from tritium.backends.config import ANY, DynamicBatching, InstanceGroup, ModelConfig, Specific, TensorSpec
from tritium.errors import Code, TritiumError, invalid

Device = Literal["auto", "cpu", "gpu", "model"]
DEVICE_KINDS: dict[Device, str] = {
    "auto": "KIND_AUTO",
    "cpu": "KIND_CPU",
    "gpu": "KIND_GPU",
    "model": "KIND_MODEL",
}

# Fields that change what a model answers or when, and that this version cannot honour.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "ensemble_scheduling": lambda c: c.HasField("ensemble_scheduling"),
    "sequence_batching": lambda c: c.HasField("sequence_batching"),
    "response_cache": lambda c: c.response_cache.enable,
    "model_warmup": lambda c: bool(c.model_warmup),
    "model_operations": lambda c: bool(c.model_operations.op_library_filename),
    "model_repository_agents": lambda c: bool(c.model_repository_agents.agents),
    "batch_input": lambda c: bool(c.batch_input),
    "batch_output": lambda c: bool(c.batch_output),
    "metric_tags": lambda c: bool(c.metric_tags),
    "model_metrics": lambda c: c.HasField("model_metrics"),
    "instance_group.rate_limiter": lambda c: any(g.HasField("rate_limiter") for g in c.instance_group),
    "instance_group.passive": lambda c: any(g.passive for g in c.instance_group),
    "instance_group.secondary_devices": lambda c: any(g.secondary_devices for g in c.instance_group),
    "input.is_shape_tensor": lambda c: any(t.is_shape_tensor for t in c.input),
    "output.is_shape_tensor": lambda c: any(t.is_shape_tensor for t in c.output),
    "input.is_non_linear_format_io": lambda c: any(t.is_non_linear_format_io for t in c.input),
    "output.is_non_linear_format_io": lambda c: any(t.is_non_linear_format_io for t in c.output),
    "output.label_filename": lambda c: any(t.label_filename for t in c.output),
    "dynamic_batching.preserve_ordering": lambda c: c.dynamic_batching.preserve_ordering,
    "dynamic_batching.priority_queue_policy": lambda c: bool(c.dynamic_batching.priority_queue_policy),
    "dynamic_batching.default_queue_policy.timeout_action": lambda c: (
        # Set means DELAY: REJECT is the default.
        c.dynamic_batching.default_queue_policy.timeout_action != 0
    ),
}
# Fields that tune how a backend of Triton works and have no counterpart; they are kept, shown and have no effect.
_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    # The two that every rendered configuration has say nothing.
    "optimization": lambda c: any(not f.name.endswith("_pinned_memory") for f, _ in c.optimization.ListFields()),
    "input.format": lambda c: any(t.format for t in c.input),
    "runtime": lambda c: bool(c.runtime),
    "default_model_filename": lambda c: bool(c.default_model_filename),
    "cc_model_filenames": lambda c: bool(c.cc_model_filenames),
    "instance_group.profile": lambda c: any(g.profile for g in c.instance_group),
    "instance_group.host_policy": lambda c: any(g.host_policy for g in c.instance_group),
}


def refuse_unsupported(source: Any) -> None:
    """Refuses what the message sets and this version cannot honour.

    Raises:
        TritiumError: UNIMPLEMENTED naming the fields.
    """
    found = [name for name, is_set in _UNSUPPORTED.items() if is_set(source)]
    if found:
        raise TritiumError(Code.UNIMPLEMENTED, f"{', '.join(found)}: not supported yet", param=found[0])


def without_effect(source: Any) -> list[str]:
    """Names of the fields that the message sets and that have no effect here, for a notice."""
    return [name for name, is_set in _WITHOUT_EFFECT.items() if is_set(source)]


def check_config(config: ModelConfig) -> None:
    """Checks what the message's types leave open.

    Raises:
        TritiumError: INVALID_ARGUMENT naming field, value and what was expected.
    """
    if config.max_batch_size < 0:
        raise invalid(
            f"max_batch_size is {config.max_batch_size}, expected a non-negative value", param="max_batch_size"
        )
    for kind, specs in (("input", config.inputs), ("output", config.outputs)):
        for index, spec in enumerate(specs):
            _check_tensor(kind, index, spec)
    for group in config.instances:
        _check_instance(group)
    if config.batching is not None:
        _check_batching(config.batching, config.max_batch_size)
    if isinstance(config.versions, Specific) and any(v < 1 for v in config.versions.versions):
        raise invalid(
            f"version_policy.specific has {min(config.versions.versions)}, expected versions from 1",
            param="version_policy",
        )


def _check_batching(batching: DynamicBatching, max_batch_size: int) -> None:
    for size in batching.preferred:
        if not 0 < size <= max_batch_size:
            raise invalid(
                f"dynamic_batching.preferred_batch_size has {size}, expected values from 1 to "
                f"max_batch_size, which is {max_batch_size}",
                param="preferred_batch_size",
            )
    if batching.levels and not 1 <= batching.default_level <= batching.levels:
        raise invalid(
            f"dynamic_batching.default_priority_level is {batching.default_level}, expected a value from 1 to "
            f"priority_levels, which is {batching.levels}",
            param="default_priority_level",
        )


def _check_tensor(kind: str, index: int, spec: TensorSpec) -> None:
    if not spec.name:
        raise invalid(f"{kind}[{index}] has no name", param=kind)
    where = f"{kind} '{spec.name}'"
    if not spec.dims:
        raise invalid(f"{where} has no dims, expected at least one", param=spec.name)
    if any(size < 1 and size != ANY for size in spec.dims):
        raise invalid(f"{where} has dims {list(spec.dims)}, expected positive sizes or -1", param=spec.name)
    if spec.reshape is None:
        return
    if any(size < 1 and size != ANY for size in spec.reshape):
        raise invalid(f"{where} has reshape {list(spec.reshape)}, expected positive sizes or -1", param=spec.name)
    anys = [shape.count(ANY) for shape in (spec.dims, spec.reshape)]
    if anys[0] != anys[1] or (not anys[0] and prod(spec.dims) != prod(spec.reshape)):
        raise invalid(
            f"{where} has reshape {list(spec.reshape)}, expected as many elements as dims {list(spec.dims)}",
            param=spec.name,
        )


def _check_instance(group: InstanceGroup) -> None:
    if group.count < 1:
        raise invalid(f"instance_group '{group.name}' has count {group.count}, expected at least 1", param="count")
    if group.gpus and group.device in ("cpu", "model"):
        kind = DEVICE_KINDS[group.device]
        raise invalid(
            f"instance_group '{group.name}' has gpus {list(group.gpus)}, expected none with {kind}",
            param="gpus",
        )
    if any(gpu < 0 for gpu in group.gpus):
        raise invalid(
            f"instance_group '{group.name}' has gpus {list(group.gpus)}, expected indices from 0", param="gpus"
        )
