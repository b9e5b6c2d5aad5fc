"""Swap: what is served of a name follows a plan.

Settings are applied to what serves. What has to be loaded is loaded beside what it replaces or, where memory is too
short for both, after that has finished its requests and left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tritium.backends.base import LoadContext
from tritium.backends.config import Ensemble
from tritium.errors import TritiumError, invalid
from tritium.observability import logs
from tritium.serving.memory import free, lack, total
from tritium.serving.model import Model
from tritium.serving.repository import Plan

_log = logs.get(__name__)


@dataclass(slots=True)
class Swap:
    """What a plan makes of the models in service.

    Attributes:
        models: all of the plan, by version.
        fresh: those of them that have to be loaded.
        gone: those in service that they replace, or that the plan does not name.
        changes: what makes the others follow it.
    """

    name: str
    models: dict[int, Model] = field(default_factory=dict[int, Model])
    fresh: list[Model] = field(default_factory=list[Model])
    gone: list[Model] = field(default_factory=list[Model])
    changes: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    async def shortage(self) -> str:
        """Why what has to be loaded does not fit beside what leaves, in words; "" when it does."""
        if not self.gone or not self.fresh:
            return ""
        by_version = {model.version: model for model in self.gone}
        try:
            needs = [await by_version.get(m.version, self.gone[-1]).footprint(m.context) for m in self.fresh]
        except TritiumError:
            return ""  # the load will say what is wrong, with the old ones in service meanwhile
        need = total(needs)
        return lack(need, await free(need.gpus))

    def finish(self) -> None:
        """Puts the fresh ones into service and applies the settings, at once."""
        for model in self.fresh:
            model.open()
        for change in self.changes:
            change()
        if self.changes:
            _log.info("settings applied, weights kept", model=self.name)


async def draft(plan: Plan, serving: Sequence[Model], make: Callable[[LoadContext], Model]) -> Swap:
    """Finds out which models in service can follow the plan, and makes the others, which are not loaded yet.

    Raises:
        TritiumError: INVALID_ARGUMENT when a model refuses its new settings.
    """
    swap = Swap(plan.name)
    live = {model.version: model for model in serving}
    for context in plan.contexts:
        model = live.pop(context.version, None)
        kept = False
        # An ensemble has nothing of its own, but is made for its steps as they are now.
        if model is not None and not isinstance(context.config.batching, Ensemble):
            kept = _same(model.context, context)
            change = None if kept else await _change(model, context)
            if change is not None:
                kept = True
                swap.changes.append(change)
        if model is None or not kept:
            if model is not None:
                swap.gone.append(model)
            model = make(context)
            swap.fresh.append(model)
        swap.models[int(context.version)] = model
    swap.gone += live.values()
    return swap


def _same(before: LoadContext, after: LoadContext) -> bool:
    """Whether nothing at all has changed."""
    sources = [c.config.source.SerializeToString(deterministic=True) for c in (before, after)]
    return bool(before.files) and before == after and sources[0] == sources[1]


async def _change(model: Model, context: LoadContext) -> Callable[[], None] | None:
    try:
        return await model.reconfigure(context)
    except TritiumError as error:
        raise failed(model.name, [(model.version, str(error.code.value), error.message)]) from error


def failed(name: str, reasons: Sequence[tuple[str, str, str]]) -> TritiumError:
    """Why a load failed, in Triton's words.

    Args:
        reasons: version, code and message of each version that did.
    """
    said = "".join(
        f"version {version} is at UNAVAILABLE state: {code.replace('_', ' ').capitalize()}: {message};\n"
        for version, code, message in reasons
    )
    return invalid(f"load failed for model '{name}': {said}")


async def load_all(name: str, models: Sequence[Model]) -> None:
    """Loads all of them or none.

    Raises:
        TritiumError: INVALID_ARGUMENT in Triton's words, naming each version that failed and why.
    """
    started = time.monotonic()
    try:
        results = await asyncio.gather(*(model.load() for model in models), return_exceptions=True)
        bad = [model for model, result in zip(models, results, strict=True) if result is not None]
    except asyncio.CancelledError:
        await asyncio.gather(*(model.unload() for model in models))
        raise
    if bad:
        await asyncio.gather(*(model.unload() for model in models))
        reasons = "".join(f"version {m.version} is at UNAVAILABLE state: {m.reason};\n" for m in bad)
        raise invalid(f"load failed for model '{name}': {reasons}")
    for model in models:
        seconds = round(time.monotonic() - started, 3)
        _log.info("model is loaded", model=name, version=model.version, seconds=seconds)


async def drain(models: Sequence[Model]) -> None:
    """Lets the requests of some models end, then unloads them; they take no new ones meanwhile."""
    for model in models:
        model.retire()
    await asyncio.gather(*(model.wait_idle() for model in models))
    await asyncio.gather(*(model.unload() for model in models))
