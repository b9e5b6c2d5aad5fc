"""What the settings of one language model come to, and by whose word: flags, its files, its checkpoint, the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from tritium.backends.llm_settings import LlmSettings
from tritium.llm.checkpoint import Metadata
from tritium.llm.config import EngineConfig
from tritium.llm.params import is_sampling_field
from tritium.llm.types import EngineInfo
from tritium.settings import Effective

# Sampling values that generation_config.json may set.
GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def effective(
    settings: LlmSettings, engine: EngineConfig, info: EngineInfo, metadata: Metadata
) -> dict[str, Effective]:
    """The settings of a model that are not those of the server as they were given.

    Args:
        settings: what the model's files say.
        engine: of its first engine, with what ``instance_group`` makes of the settings.
        info: what that engine says, or would say (``llm.runner.ranks.plan``).

    Returns:
        By the field of ``EngineConfig``; sampling values follow as ``sampling.<field>``.
    """
    found: dict[str, Effective] = {}
    for field in fields(EngineConfig):
        value, name = getattr(engine, field.name), field.name
        if name in info.resolved:
            found[name] = Effective(info.resolved[name].value, info.resolved[name].source)
        elif value != getattr(settings.engine, name):
            found[name] = Effective(value, "config.pbtxt: instance_group")
        elif name in settings.sources:
            found[name] = Effective(value, settings.sources[name])
    return found | sampling(settings, metadata)


def sampling(settings: LlmSettings, metadata: Metadata) -> dict[str, Effective]:
    """The model's own sampling values: triton_config.json wins over generation_config.json."""
    generation = metadata.generation_config
    values = {n: Effective(generation[n], "generation_config.json") for n in GENERATION_FIELDS if n in generation}
    own: Mapping[str, object] = settings.sampling
    values |= {n: Effective(v, "triton_config.json") for n, v in own.items() if is_sampling_field(n)}
    return {f"sampling.{name}": e for name, e in values.items() if e.value is not None}
