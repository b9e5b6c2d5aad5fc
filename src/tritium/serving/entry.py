"""Entry: one name in the catalogue, with its versions and what is wanted of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tritium.backends.config import Ensemble
from tritium.errors import Code, TritiumError
from tritium.serving.model import Model, State
from tritium.serving.model_files import Scratch
from tritium.serving.repository import Plan

# What a client is told to wait for a model that is being loaded again.
AWAY_RETRY_S = 1.0


@dataclass(slots=True)
class Entry:
    """One name: its versions, and what is wanted of it.

    Attributes:
        models: the current versions, by number; also those that failed or were unloaded.
        fingerprint: of the files that ``models`` were loaded from; "" when a load must not be skipped.
        scratch: the folder of ``models``, where their files came with a request.
        polled: its configuration could be read at least once.
        wanted: a load was asked for later than any unload.
        named: it was loaded by its name, rather than because an ensemble needs it.
        plan: that ``models`` were loaded from.
        suspended: an ensemble that is out of service until its steps are back.
        away: what was served has made room for what is being loaded.
        lock: held while the name is being loaded.
    """

    models: dict[int, Model] = field(default_factory=dict[int, Model])
    fingerprint: str = ""
    scratch: Scratch | None = None
    polled: bool = False
    wanted: bool = True
    named: bool = False
    plan: Plan | None = None
    suspended: bool = False
    away: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def serving(self) -> list[Model]:
        """The ready versions, ascending."""
        return [self.models[v] for v in sorted(self.models) if self.models[v].state is State.READY]

    def only(self) -> Model | None:
        """The one version, if it is one and ready; ``serving`` without a list, since every request asks."""
        if len(self.models) == 1:
            (model,) = self.models.values()
            return model if model.state is State.READY else None
        return None

    def steps(self) -> set[str]:
        """Names of the models that its ensemble needs; none for other models."""
        return set() if self.plan is None else steps_of(self.plan)


def steps_of(plan: Plan) -> set[str]:
    """Names of the models that the ensemble of a plan needs; none for other models."""
    batching = plan.config.batching
    return {step.model for step in batching.steps} if isinstance(batching, Ensemble) else set()


def pick(entry: Entry | None, name: str, number: int | None) -> Model:
    """The version that was asked for, or the highest ready one for None.

    Args:
        entry: of that name; None for an unknown one.

    Raises:
        TritiumError: NOT_FOUND or UNAVAILABLE in Triton's words.
    """
    unknown = f"Request for unknown model: '{name}'"
    if entry is None or not entry.models:
        raise _not_found(f"{unknown} is not found")
    if number is None:
        serving = entry.serving()
        if serving:
            return serving[-1]
        if entry.away:
            text = f"{unknown} is being loaded again"
            raise TritiumError(Code.UNAVAILABLE, text, param="model", retry_after_s=AWAY_RETRY_S)
        raise _not_found(f"{unknown} has no available versions")
    model = entry.models.get(number)
    if model is None:
        raise _not_found(f"{unknown} version {number} is not found")
    if model.state is not State.READY:
        raise TritiumError(Code.UNAVAILABLE, f"{unknown} version {number} is not at ready state", param="model")
    return model


def _not_found(text: str) -> TritiumError:
    return TritiumError(Code.NOT_FOUND, text, param="model", reason="model_not_found")
