"""Catalog: the models that are wanted and those that are there, and the loads and unloads between."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tritium.backends.base import LoadContext
from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError, invalid
from tritium.observability import logs
from tritium.observability.metrics import Metrics
from tritium.serving.entry import Entry, pick, steps_of
from tritium.serving.graph import unavailable
from tritium.serving.instances import Surroundings
from tritium.serving.model import Model, State
from tritium.serving.model_files import Scratch
from tritium.serving.repository import Plan, Repository
from tritium.serving.request_checks import parse_version
from tritium.serving.stats import ModelStats
from tritium.serving.swap import Swap, draft, drain, load_all
from tritium.serving.views import IndexEntry, in_words

_log = logs.get(__name__)


class Catalog:
    """The models of one server.

    Args:
        load_limit: models that load at the same time.
        surroundings: what all models share.

    Attributes:
        failures: why the last load of a name failed; gone when one succeeds.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics | None,
        load_limit: int,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._repository = repository
        self._metrics = metrics
        self._surroundings = replace(surroundings or Surroundings(), steps=self._step_config)
        self._slots = asyncio.Semaphore(load_limit)
        self._entries: dict[str, Entry] = {}
        self._missing: set[str] = set()
        self._leaving: set[Model] = set()
        self._loads: set[asyncio.Task[None]] = set()
        self._leaves: set[asyncio.Task[None]] = set()

    def models(self) -> list[Model]:
        """All current versions of all names, by name and number."""
        return [entry.models[v] for _, entry in sorted(self._entries.items()) for v in sorted(entry.models)]

    def names(self) -> list[str]:
        """The names that somebody has loaded, or tried to."""
        return list(self._entries)

    def fingerprint(self, name: str) -> str:
        """Of the files in the repository that a name was loaded from; "" when it is not loaded."""
        entry = self._entries.get(name)
        return entry.fingerprint if entry is not None else ""

    def serving(self, name: str) -> list[Model]:
        """The ready versions of a name, ascending; none for an unknown one."""
        entry = self._entries.get(name)
        return entry.serving() if entry is not None else []

    def statistics(self, name: str, version: str) -> list[ModelStats]:
        """Counters of the ready versions of all names for "", of one, or of one version.

        Raises:
            TritiumError: INVALID_ARGUMENT, as Triton answers, when there is none of that name or version.
        """
        if not name:
            return [model.stats for model in self.models() if model.state is State.READY]
        serving = self.serving(name)
        if not serving:
            raise invalid(f"requested model '{name}' is not available")
        found = [m.stats for m in serving if not version or m.version == version]
        if not found:
            raise invalid(f"requested model version is not available for model '{name}'")
        return found

    def find(self, name: str, version: str) -> Model:
        """The version that was asked for, or the highest ready one for "".

        Raises:
            TritiumError: NOT_FOUND, UNAVAILABLE or INVALID_ARGUMENT in Triton's words.
        """
        entry = self._entries.get(name)
        if not version and entry is not None and (only := entry.only()) is not None:
            return only
        return pick(entry, name, parse_version(version))

    def ready(self) -> bool:
        """Whether each model makes progress, apart from those that were unloaded.

        A model whose load failed counts, also after an unload, until a load succeeds: so does Triton.
        """
        away = any(entry.away for entry in self._entries.values())
        return not (self._missing or away) and all(model.ready() or model.unloaded for model in self.models())

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """A line for each version; a name that was never loaded has a line of its own."""
        found: list[IndexEntry] = []
        for name in sorted({*self._repository.names(), *self._entries}):
            entry = self._entries.get(name)
            if entry is None or not (entry.models or entry.polled):
                found.append(IndexEntry(name, "", "", ""))
                continue
            for number in sorted(entry.models):
                model = entry.models[number]
                reason = model.reason if model.state is State.UNAVAILABLE else ""
                found.append(IndexEntry(name, model.version, model.state.value, reason))
        return [line for line in found if line.state == State.READY.value] if ready_only else found

    async def start(self, names: Sequence[str]) -> None:
        """Loads the first models side by side; failures are kept in ``failures``."""
        await asyncio.gather(*(self._first_load(name, self._load(name, None)) for name in names))

    async def start_single(self, plan: Plan) -> None:
        """Loads the only model of a server without a repository."""
        await self._first_load(plan.name, self._replace(self._entry(plan.name), plan))

    async def load(self, name: str, override: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads a name in a task of its own, which goes on when the caller gives up; a failure is logged once.

        Args:
            override: a configuration in JSON in place of the file.
            files: model files in place of those of the repository.

        Raises:
            TritiumError: why it failed; UNAVAILABLE when the server drains meanwhile.
        """
        await self._in_task(name, self._load(name, override, files))

    def unload(self, name: str, dependents: bool = False) -> None:
        """Takes a name out of service; a load of it that is under way is undone when it ends.

        Ensembles that need it are out of service until it is loaded again.

        Args:
            dependents: also the steps of an ensemble that nobody has loaded by name and no other one needs.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        entry.wanted = entry.named = entry.suspended = False
        entry.fingerprint = ""
        self._retire(entry.serving(), entry.scratch)
        entry.scratch = None
        self._suspend(name)
        for step in sorted(entry.steps()) if dependents else ():
            found = self._entries.get(step)
            if found is not None and not found.named and not self._needing(step):
                self.unload(step, dependents=True)

    def _needing(self, name: str) -> list[tuple[str, Entry]]:
        """The ensembles that are wanted and have ``name`` as a step."""
        return [(n, entry) for n, entry in sorted(self._entries.items()) if entry.wanted and name in entry.steps()]

    def _suspend(self, name: str) -> None:
        """Takes the ensembles that need ``name`` out of service."""
        for dependent, entry in self._needing(name):
            if entry.serving():
                entry.suspended = True
                self._retire(entry.serving(), None)
                self._suspend(dependent)

    async def _revive(self, name: str) -> None:
        """Brings ensembles back that were out of service for want of ``name``; checks the others anew."""
        for dependent, entry in self._needing(name):
            # One that is being loaded sees the step as it is now.
            if entry.lock.locked() or not (entry.suspended or self._outdated(entry)):
                continue
            async with entry.lock:
                if entry.plan is None or not all(self.serving(step) for step in entry.steps()):
                    continue
                try:
                    await self._replace(entry, entry.plan)
                except TritiumError as error:
                    self.failures[dependent] = error.message
                    _log.error("ensemble does not go with its steps any more", model=dependent, error=error.message)
                    for model in entry.serving():
                        model.retire()
                        model.fail(error)
                    continue
            await self._revive(dependent)

    def _outdated(self, entry: Entry) -> bool:
        """Whether a step of a serving ensemble has other tensors now."""
        return any(not model.current() for model in entry.serving())

    async def _load_steps(self, plan: Plan, chain: tuple[str, ...]) -> None:
        """Loads the steps of an ensemble that are not there.

        Raises:
            TritiumError: INVALID_ARGUMENT naming those that cannot be had.
        """
        missing: list[str] = []
        for step in sorted(steps_of(plan)):
            if step in chain:
                circle = " -> ".join((*chain, step))
                raise invalid(f"load failed for model '{plan.name}': circular dependency between ensembles: {circle}\n")
            if self.serving(step):
                continue
            try:
                await self._load(step, None, chain=chain)
            except TritiumError as error:
                reason = in_words(step, error.message)
                _log.error("step of an ensemble cannot be loaded", model=plan.name, step=step, reason=reason)
                missing.append(step)
        if missing:
            raise invalid(f"load failed for model '{plan.name}': {unavailable(plan.name, missing)}\n")

    def _step_config(self, name: str, version: int) -> ModelConfig:
        return self.find(name, "" if version < 0 else str(version)).config

    async def close(self, timeout_s: float) -> None:
        """Gives up loads, waits for running requests for at most ``timeout_s``, unloads everything."""
        loads = list(self._loads)
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        models = {*self.models(), *self._leaving}
        # They stay known, and counted, until their last request has ended: the server itself refuses new ones.
        idle = await asyncio.gather(*(model.wait_idle(timeout_s) for model in models))
        for model in models:
            model.retire()
        if not all(idle):
            _log.warning("requests are cut off", running=sum(model.running for model in models))
        await asyncio.gather(*(model.unload() for model in models))
        await asyncio.gather(*self._leaves, return_exceptions=True)

    async def _first_load(self, name: str, load: Coroutine[Any, Any, None]) -> None:
        try:
            await self._in_task(name, load)
        except TritiumError as error:
            self._missing.add(name)
            self.failures[name] = error.message

    async def _in_task(self, name: str, load: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        # Here, since whoever waits may have given up by then.
        task.add_done_callback(lambda t: None if t.cancelled() else _log_failure(name, t.exception()))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise TritiumError(Code.UNAVAILABLE, "server is draining") from None
            raise

    def _entry(self, name: str) -> Entry:
        return self._entries.setdefault(name, Entry())

    async def _load(
        self,
        name: str,
        override: str | None,
        files: Mapping[str, bytes] | None = None,
        chain: tuple[str, ...] = (),
    ) -> None:
        """Reads the files of a name and makes what is there follow them.

        Args:
            chain: the ensembles for which it is loaded, from the outermost; none when it was asked for by name.
        """
        # Looked up before there is an entry, so that made-up names leave nothing behind.
        if not files or override is None:
            await asyncio.to_thread(self._repository.find, name)
        entry = self._entry(name)
        entry.wanted = True
        entry.named = entry.named or not chain
        async with entry.lock:
            steps_missing = False
            try:
                plan = await asyncio.to_thread(self._repository.plan, name, override, files)
                steps_missing = True
                await self._load_steps(plan, (*chain, name))
                steps_missing, entry.polled = False, True
                if override is not None or plan.fingerprint != entry.fingerprint or not entry.serving():
                    await self._replace(entry, plan)
            except TritiumError as error:
                entry.polled = entry.polled or not (steps_missing or error.code is Code.INTERNAL)
                self.failures[name] = error.message
                raise
        await self._revive(name)

    async def _replace(self, entry: Entry, plan: Plan) -> None:
        """Makes what is there follow a plan: all of its versions or none."""
        old = entry.serving()
        swap = await draft(plan, old, self._make)
        if not old:
            entry.models = swap.models
        if swap.fresh:
            async with self._slots:
                await self._load_fresh(entry, swap)
        # Nothing waits from here to the end, so that no request finds neither the old nor the new.
        self._retire(swap.gone, entry.scratch)
        swap.finish()
        entry.models, entry.fingerprint, entry.polled = swap.models, plan.fingerprint, True
        # The plan is kept for its steps; the files that came with a request go when the model does.
        entry.scratch, entry.plan, entry.suspended = plan.scratch, replace(plan, scratch=None), False
        self.failures.pop(plan.name, None)
        self._missing.discard(plan.name)
        if not entry.wanted:
            self.unload(plan.name)

    async def _load_fresh(self, entry: Entry, swap: Swap) -> None:
        """Loads beside what is there or, for want of memory, in its place."""
        short = await swap.shortage()
        if not short:
            await load_all(swap.name, swap.fresh)
            if swap.gone:
                _log.info("loaded beside", model=swap.name)
            return
        _log.warning("it is drained before it is loaded again, and away meanwhile", model=swap.name, reason=short)
        entry.away = True
        try:
            await drain(swap.gone)
            try:
                await load_all(swap.name, swap.fresh)
            except TritiumError as error:
                await self._restore(entry, swap, error)
                raise
        finally:
            entry.away = False
        _log.info("drained, then loaded", model=swap.name)

    async def _restore(self, entry: Entry, swap: Swap, error: TritiumError) -> None:
        """Loads again what made room for a load that failed.

        Raises:
            TritiumError: that failed too.
        """
        if not entry.wanted:
            return
        _log.error("the load failed, what was there is loaded again", model=swap.name, error=error.message)
        old = [self._make(model.context) for model in swap.gone]
        entry.models = {**entry.models, **{int(model.version): model for model in old}}
        try:
            await load_all(swap.name, old)
        except TritiumError as again:
            raise invalid(
                f"{error.message}what was served before cannot be loaded any more: {again.message}"
            ) from error
        for model in old:
            model.open()

    def _make(self, context: LoadContext) -> Model:
        return Model(context, self._metrics, self._surroundings)

    def _retire(self, models: Sequence[Model], scratch: Scratch | None) -> None:
        """Unloads models as soon as their requests have ended; they take no new ones from now on."""
        for model in models:
            model.retire()
            self._leaving.add(model)
            task = asyncio.create_task(self._leave(model, scratch))
            self._leaves.add(task)
            task.add_done_callback(self._leaves.discard)

    async def _leave(self, model: Model, scratch: Scratch | None) -> None:
        """Unloads one; until then it may need its files, so they are kept."""
        await model.wait_idle()
        await model.unload()
        self._leaving.discard(model)
        _log.info("model is unloaded", model=model.name, version=model.version)


def _log_failure(name: str, error: BaseException | None) -> None:
    if isinstance(error, TritiumError):
        _log.error("model cannot be loaded", model=name, reason=in_words(name, error.message))
