"""What a configuration may say: fields that are refused, fields without effect, and the rules for the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from typing import Any, Literal

from tritium.backends.config import (
    ANY,
    Direct,
    DynamicBatching,
    Ensemble,
    InstanceGroup,
    ModelConfig,
    SequenceBatching,
    Specific,
    TensorSpec,
)
from tritium.errors import Code, TritiumError, invalid

# Stands for a largest batch that is not known yet.
_UNKNOWN = 1 << 31

Device = Literal["auto", "cpu", "gpu", "model"]
DEVICE_KINDS: dict[Device, str] = {
    "auto": "KIND_AUTO",
    "cpu": "KIND_CPU",
    "gpu": "KIND_GPU",
    "model": "KIND_MODEL",
}

# Fields that change what a model answers or when, and that this version cannot honour.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "model_operations": lambda c: bool(c.model_operations.op_library_filename),
    "model_repository_agents": lambda c: bool(c.model_repository_agents.agents),
    "model_metrics": lambda c: c.HasField("model_metrics"),
    "instance_group.passive": lambda c: any(g.passive for g in c.instance_group),
    "instance_group.secondary_devices": lambda c: any(g.secondary_devices for g in c.instance_group),
    "input.is_shape_tensor": lambda c: any(t.is_shape_tensor for t in c.input),
    "output.is_shape_tensor": lambda c: any(t.is_shape_tensor for t in c.output),
    "input.is_non_linear_format_io": lambda c: any(t.is_non_linear_format_io for t in c.input),
    "output.is_non_linear_format_io": lambda c: any(t.is_non_linear_format_io for t in c.output),
}
# Fields that tune how a backend of Triton works and have no counterpart; they are kept, shown and have no effect.
_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    # The two for pinned memory, which every rendered configuration has, say nothing.
    "optimization.graph": lambda c: c.optimization.HasField("graph"),
    "optimization.priority": lambda c: c.optimization.priority != 0,
    "optimization.cuda": lambda c: c.optimization.HasField("cuda"),
    "optimization.execution_accelerators": lambda c: c.optimization.HasField("execution_accelerators"),
    "optimization.gather_kernel_buffer_threshold": lambda c: c.optimization.gather_kernel_buffer_threshold != 0,
    "optimization.eager_batching": lambda c: c.optimization.eager_batching,
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


def without_effect(source: Any, honoured: Collection[str] = ()) -> list[str]:
    """Names of the fields that the message sets and that have no effect here, for a notice.

    Args:
        honoured: those that the model's backend knows what to do with.
    """
    return [name for name, is_set in _WITHOUT_EFFECT.items() if name not in honoured and is_set(source)]


def check_config(config: ModelConfig, *, complete: bool = False) -> None:
    """Checks what the message's types leave open.

    Args:
        complete: the backend has added what it knows. Before that, a configuration without inputs or outputs may get a
            batch size with them, and sizes of batches are not held against the 0 that stands there.

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
    most = config.max_batch_size
    if most == 0 and not complete and not (config.inputs and config.outputs):
        most = _UNKNOWN
    _check_batching(config, most)
    _check_made_tensors(config, most)
    if config.response_cache and config.decoupled:
        raise invalid(
            f"response_cache.enable is true for '{config.name}', expected false with a decoupled transaction policy",
            param="response_cache",
        )
    if isinstance(config.versions, Specific) and any(v < 1 for v in config.versions.versions):
        raise invalid(
            f"version_policy.specific has {min(config.versions.versions)}, expected versions from 1",
            param="version_policy",
        )


def _check_batching(config: ModelConfig, most: int) -> None:
    ensemble = isinstance(config.batching, Ensemble)
    if ensemble != (config.platform == "ensemble"):
        raise invalid(
            f"platform is '{config.platform}' {'with' if ensemble else 'without'} ensemble_scheduling, expected "
            "'ensemble' exactly where that is set",
            param="platform",
        )
    match config.batching:
        case DynamicBatching() as dynamic:
            _check_preferred("dynamic_batching", dynamic.preferred, most)
            _check_levels(dynamic)
        case SequenceBatching() as sequence:
            _check_sequence(sequence, most)
        case Ensemble() as found:
            _check_steps(config.name, found)
        case None:
            pass


def _check_preferred(where: str, preferred: tuple[int, ...], max_batch_size: int) -> None:
    for size in preferred:
        if not 0 < size <= max_batch_size:
            raise invalid(
                f"{where}.preferred_batch_size has {size}, expected values from 1 to "
                f"max_batch_size, which is {max_batch_size}",
                param="preferred_batch_size",
            )


def _check_levels(batching: DynamicBatching) -> None:
    if batching.levels and not 1 <= batching.default_level <= batching.levels:
        raise invalid(
            f"dynamic_batching.default_priority_level is {batching.default_level}, expected a value from 1 to "
            f"priority_levels, which is {batching.levels}",
            param="default_priority_level",
        )
    for level in batching.level_policies:
        if not 1 <= level <= max(1, batching.levels):
            raise invalid(
                f"dynamic_batching.priority_queue_policy has level {level}, expected levels from 1 to "
                f"priority_levels, which is {batching.levels}",
                param="priority_queue_policy",
            )
    if not batching.preserve_order:
        return
    if batching.levels > 1:
        raise invalid(
            f"dynamic_batching.priority_levels is {batching.levels}, expected one level when preserve_ordering is true",
            param="preserve_ordering",
        )
    if any(p.delay and p.timeout_us for p in (batching.policy, *batching.level_policies.values())):
        raise invalid(
            "dynamic_batching has a queue policy with timeout_action DELAY, expected REJECT when preserve_ordering "
            "is true",
            param="preserve_ordering",
        )


def _check_sequence(batching: SequenceBatching, most: int) -> None:
    strategy = batching.strategy
    if isinstance(strategy, Direct):
        if not 0 <= strategy.min_utilization <= 1:
            raise invalid(
                f"sequence_batching.direct.minimum_slot_utilization is {strategy.min_utilization:g}, expected a value "
                "from 0 to 1",
                param="minimum_slot_utilization",
            )
    else:
        _check_preferred("sequence_batching.oldest", strategy.preferred, most)
        if strategy.candidates < 1:
            raise invalid(
                f"sequence_batching.oldest.max_candidate_sequences is {strategy.candidates}, expected at least 1",
                param="max_candidate_sequences",
            )
    kinds = [control.kind for control in batching.controls]
    for kind in set(kinds):
        if kinds.count(kind) > 1:
            raise invalid(
                f"sequence_batching.control_input has {kinds.count(kind)} controls of kind "
                f"CONTROL_SEQUENCE_{kind.upper()}, expected at most one",
                param="control_input",
            )
    for state in batching.states:
        for where, dims in [(state.input, state.dims), *((one.name, one.dims) for one in state.initial)]:
            if any(size < 1 and size != ANY for size in dims):
                raise invalid(f"state '{where}' has dims {list(dims)}, expected positive sizes or -1", param="state")
        if any(one.dtype is not state.dtype for one in state.initial):
            raise invalid(
                f"state '{state.input}' has an initial_state of another data_type, expected {state.dtype.value}",
                param="initial_state",
            )


def _check_steps(name: str, ensemble: Ensemble) -> None:
    if not ensemble.steps:
        raise invalid(f"must specify 'step' for ensemble '{name}'", param="step")
    for index, step in enumerate(ensemble.steps):
        for field, value in (
            ("model_name", step.model),
            ("input_map", step.inputs),
            ("output_map", step.outputs),
        ):
            if not value:
                raise invalid(f"must specify '{field}' in step {index} of ensemble '{name}'", param="step")


def _check_made_tensors(config: ModelConfig, most: int) -> None:
    """Inputs and outputs that the server makes, cuts or fills: each must go with declared ones."""
    for kind, target, source in (
        *(("batch_input", one.target, one.source) for one in config.batch_inputs),
        *(("batch_output", one.target, one.source) for one in config.batch_outputs),
    ):
        if config.input(source) is None:
            raise invalid(
                f"{kind} '{target}' has source_input '{source}', expected the name of a declared input", param=kind
            )
        if kind == "batch_output" and config.output(target) is None:
            raise invalid(f"{kind} has target_name '{target}', expected the name of a declared output", param=kind)
    for sample in config.warmup:
        if sample.batch_size > most:
            raise invalid(
                f"model_warmup '{sample.name}' has batch_size {sample.batch_size}, expected at most max_batch_size, "
                f"which is {config.max_batch_size}",
                param="model_warmup",
            )
        for one in sample.inputs:
            if any(size < 1 for size in one.dims):
                raise invalid(
                    f"model_warmup '{sample.name}' input '{one.name}' has dims {list(one.dims)}, expected positive "
                    "sizes",
                    param="model_warmup",
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
