"""Changes of a configuration: which of its fields a live model can follow, and what it is then.

Everything about queues, batches, priorities, the rate limiter, the response cache, warm-up, versions, labels and
tags of metrics belongs to the server around a model; the rest reaches the model when it is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from tritium.backends.base import Backend, LoadContext, TextBackend
from tritium.backends.config import ModelConfig
from tritium.serving.config import make_config
from tritium.serving.model_files import keep_labels

# Fields of ModelConfig that a live model follows as a whole.
_WHOLE = ("dynamic_batching", "response_cache", "model_warmup", "version_policy", "metric_tags")


def followed(completed: ModelConfig, before: ModelConfig, after: ModelConfig) -> ModelConfig | None:
    """The configuration of a live model that follows its file; None when that takes a load.

    Args:
        completed: what the model is served with, which a backend has completed from ``before``.
        before: what the file said at the load.
        after: what it says now; clients also send back what they were shown, ``completed``, with changes.

    Raises:
        TritiumError: INVALID_ARGUMENT when the whole contradicts itself.
    """
    wanted = essence(after.source)
    if wanted != essence(before.source):
        if wanted != essence(completed.source):
            return None
        before = completed
    source = type(completed.source)()
    source.CopyFrom(completed.source)
    for name in (*_WHOLE, "sequence_batching"):
        # What the file leaves alone stays as the model itself has completed it.
        if _part(before.source, name) != _part(after.source, name):
            _copy(source, after.source, name)
    for group, now in zip(source.instance_group, after.source.instance_group, strict=False):
        group.rate_limiter.CopyFrom(now.rate_limiter)
    now = {output.name: output.label_filename for output in after.source.output}
    for output in source.output:
        output.label_filename = now.get(output.name, output.label_filename)
    return keep_labels(make_config(source, completed.name), after)


def same_load(before: LoadContext, after: LoadContext) -> bool:
    """Whether two contexts stand for the same files, read with the same settings of the server."""
    return bool(before.files) and (
        (before.files, before.version_folder, before.settings, before.backend_config, before.auto_complete)
        == (after.files, after.version_folder, after.settings, after.backend_config, after.auto_complete)
        and (before.config.backend, before.config.platform) == (after.config.backend, after.config.platform)
    )


def seen_differently(before: ModelConfig, after: ModelConfig) -> bool:
    """Whether the series of a model in the metrics are others."""
    tags = [dict(config.source.metric_tags) for config in (before, after)]
    return tags[0] != tags[1] or before.response_cache != after.response_cache


def on_device(config: ModelConfig, backend: Backend) -> ModelConfig:
    """Groups that left the device open, with the device that an LLM is really on."""
    if not isinstance(backend, TextBackend):
        return config
    device = "cpu" if backend.engine_info().device.startswith("cpu") else "gpu"
    groups = tuple(replace(g, device=device) if g.device == "auto" else g for g in config.instances)
    return replace(config, instances=groups)


def essence(source: Any) -> bytes:
    """A configuration without what a live model follows."""
    kept = type(source)()
    kept.CopyFrom(source)
    for name in _WHOLE:
        kept.ClearField(name)
    for group in kept.instance_group:
        group.ClearField("rate_limiter")
    for output in kept.output:
        output.ClearField("label_filename")
    if kept.HasField("sequence_batching"):
        _strip_sequences(kept.sequence_batching)
    return kept.SerializeToString(deterministic=True)


def _strip_sequences(batching: Any) -> None:
    """Leaves what says where sequences have their places, and what their model is told."""
    batching.ClearField("max_sequence_idle_microseconds")
    if batching.HasField("oldest"):
        for name in ("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"):
            batching.oldest.ClearField(name)
    elif batching.HasField("direct"):
        batching.direct.Clear()
        batching.direct.SetInParent()


def _part(source: Any, name: str) -> bytes:
    part = type(source)()
    _copy(part, source, name)
    return part.SerializeToString(deterministic=True)


def _copy(target: Any, source: Any, name: str) -> None:
    """Makes one field of a message what it is in another one."""
    target.ClearField(name)
    value = getattr(source, name)
    if not isinstance(value, Message):  # repeated, or a map
        getattr(target, name).MergeFrom(value)
    elif source.HasField(name):
        getattr(target, name).CopyFrom(value)
