"""Making what is served follow what lies in the repositories: by polling, or when somebody asks for it.

A model counts as changed only when two looks at its folder, one after the other, see the same new state, and when
its checkpoints are as long as they themselves say: a folder that is being copied is left alone until it is whole. A
reload that fails leaves what was served before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tritium.errors import TritiumError
from tritium.observability import logs
from tritium.serving.catalog import Catalog
from tritium.serving.repository import Repository

# Between the looks of one rescan, and how long a folder may go on changing until it is left for another time.
SETTLE_S = 0.5
PATIENCE_S = 10.0
# A folder in which nothing has changed for that long is taken to be whole when the server starts.
QUIET_S = 3.0

_log = logs.get(__name__)


@dataclass(slots=True)
class Changes:
    """What one look, or a whole rescan, has done.

    Attributes:
        loaded: names that were loaded, or loaded again.
        unloaded: names whose folders are gone.
        failed: why others could not be loaded.
        moving: names whose folders were still changing, or not whole.
    """

    loaded: list[str] = field(default_factory=list[str])
    unloaded: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    moving: list[str] = field(default_factory=list[str])


class Watcher:
    """Compares the repositories with what is loaded.

    Args:
        everything: all models of the repositories shall be loaded, and no others; otherwise only the files of
            those that are loaded are looked at.
    """

    def __init__(self, catalog: Catalog, repository: Repository, *, everything: bool) -> None:
        self._catalog = catalog
        self._repository = repository
        self._everything = everything
        self._seen: dict[str, str] = {}
        self._tried: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._rescan: asyncio.Task[Changes] | None = None

    async def run(self, interval_s: float) -> None:
        """Looks again and again; ends when it is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.look()
            except Exception as error:  # polling shall not end silently
                _log.error("repositories cannot be polled", error=error, exc_info=error)

    async def rescan(self) -> Changes:
        """Looks until nothing changes any more; calls at the same time share one."""
        if self._rescan is None or self._rescan.done():
            self._rescan = asyncio.create_task(self._settle())
        return await asyncio.shield(self._rescan)

    async def whole(self, names: Sequence[str]) -> list[str]:
        """Those of the names whose folders are whole now, after a wait for those that are changing.

        The others are loaded by a later look.
        """
        begun = asyncio.get_running_loop().time()
        moving = await asyncio.to_thread(lambda: [n for n in names if self._repository.fresh(n, QUIET_S)])
        seen = await self._digests(moving)
        while moving and asyncio.get_running_loop().time() - begun < PATIENCE_S:
            await asyncio.sleep(SETTLE_S)
            now = await self._digests(moving)
            moving, seen = [name for name in moving if seen[name] != now[name]], now
        for name in moving:
            _log.warning("model folder keeps changing, it is left alone", model=name)
        return [name for name in names if name not in moving and await self._is_whole(name)]

    async def _is_whole(self, name: str) -> bool:
        lacking = await asyncio.to_thread(self._repository.incomplete, name)
        if lacking and self._told.get(name) != lacking:
            _log.warning("model folder is not whole yet, it is left alone", model=name, lacking=lacking)
        self._told[name] = lacking
        return not lacking

    async def _digests(self, names: Iterable[str]) -> dict[str, str]:
        return {name: await asyncio.to_thread(self._digest, name) for name in names}

    async def _settle(self) -> Changes:
        self._tried.clear()  # somebody wants failed ones to be tried again
        changes = await self.look()
        begun = asyncio.get_running_loop().time()
        while changes.moving and asyncio.get_running_loop().time() - begun < PATIENCE_S:
            await asyncio.sleep(SETTLE_S)
            more = await self.look()
            changes.loaded += more.loaded
            changes.unloaded += more.unloaded
            changes.failed |= more.failed
            changes.moving = more.moving
        return changes

    async def look(self) -> Changes:
        """Looks once, and loads and unloads what has changed and is quiet."""
        changes = Changes()
        try:
            names = await asyncio.to_thread(self._repository.names)
            digests = await self._digests(names)
        except TritiumError as error:
            _log.error("repository cannot be looked at", error=error.message)
            return changes
        ready: list[str] = []
        for name in sorted({*digests, *self._catalog.names()}):
            digest = digests.get(name, "")
            if not self._everything and not (digest and self._catalog.serving(name)):
                continue
            if digest == self._tried.get(name, self._catalog.fingerprint(name)):
                self._seen.pop(name, None)
            elif digest != self._seen.get(name):
                self._seen[name] = digest
                changes.moving.append(name)
            elif digest and not await self._is_whole(name):
                changes.moving.append(name)
            else:
                ready.append(name)
        for name in ready:
            self._tried[name] = digests.get(name, "")
            self._seen.pop(name, None)
        await asyncio.gather(*(self._apply(name, name in digests, changes) for name in ready))
        return changes

    def _digest(self, name: str) -> str:
        try:
            return self._repository.fingerprint(name)
        except OSError:
            return ""  # it went away meanwhile

    async def _apply(self, name: str, there: bool, changes: Changes) -> None:
        if not there:
            self._catalog.unload(name)
            changes.unloaded.append(name)
            _log.info("model folder is gone", model=name)
            return
        try:
            await self._catalog.load(name)
        except TritiumError as error:
            changes.failed[name] = error.message
        else:
            changes.loaded.append(name)
