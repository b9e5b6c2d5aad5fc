"""Model repositories on disk: which models and versions there are, and what their files say.

``<repository>/<model>/config.pbtxt`` and ``<repository>/<model>/<version>/...``. Names come from requests and
are only ever looked up in the listing of a repository, never joined into a path.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tritium.backends import detect, incomplete, name_of
from tritium.backends.base import LoadContext
from tritium.backends.config import All, Latest, ModelConfig, Specific
from tritium.errors import Code, TritiumError, invalid
from tritium.observability import logs
from tritium.serving import fingerprint
from tritium.serving.config import empty, make_config, parse_json, parse_text, read_limited
from tritium.serving.fingerprint import CONFIG_FILE, CONFIGS_FOLDER, TRITON_CONFIG_FILE, File
from tritium.serving.model_files import Scratch, label_files, with_labels

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A model folder in a repository."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model's files ask for: one context for each version that its policy picks.

    Attributes:
        fingerprint: differs when a file of the model has changed.
        scratch: the folder of files that came with a request; removed once nobody holds the plan.
    """

    name: str
    config: ModelConfig
    contexts: tuple[LoadContext, ...]
    fingerprint: str
    scratch: Scratch | None = None


def single(
    name: str, checkpoint: Path, *, backend: str, max_batch_size: int, settings: Mapping[str, object] | None = None
) -> Plan:
    """The plan of one checkpoint without a repository, as version 1.

    Raises:
        TritiumError: INVALID_ARGUMENT when ``max_batch_size`` is negative.
    """
    source = empty()
    source.backend, source.max_batch_size = backend, max_batch_size
    config = make_config(source, name, name)
    context = LoadContext(name, "1", config, checkpoint=checkpoint, settings=dict(settings or {}))
    return Plan(name, config, (context,), fingerprint="")


@dataclass(slots=True)
class Repository:
    """One or more folders of models.

    Attributes:
        settings: passed on to every backend.
        backend_settings: texts by key, by the name of the backend that they are for; "" is for all.
        config_name: a model's configuration is ``configs/<this>.pbtxt``, where there is such a file.
        namespacing: a name was meant to stand for one model in each folder, which no folder may need.
        auto_complete: whether backends may complete configurations; without, a model must have a file.
    """

    folders: Sequence[Path]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    backend_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    config_name: str = ""
    namespacing: bool = False
    auto_complete: bool = True

    def check(self) -> None:
        """Checks that the folders are there and, where namespaces are asked for, that nobody needs them.

        Raises:
            TritiumError: NOT_FOUND naming the folder; UNIMPLEMENTED naming models that several folders have.
        """
        for folder in self.folders:
            if not folder.is_dir():
                raise TritiumError(Code.NOT_FOUND, f"model repository '{folder}' is not a folder")
        twice = [name for name, places in sorted(self._scan().items()) if len(places) > 1]
        if self.namespacing and twice:
            raise TritiumError(
                Code.UNIMPLEMENTED,
                f"--model-namespacing: {', '.join(twice)} lie in more than one model repository, and requests cannot "
                "say which one they mean; expected names that differ",
                param="model_namespacing",
            )

    def names(self) -> list[str]:
        """Names of all model folders, in order."""
        return sorted(self._scan())

    def find(self, name: str) -> Found:
        """The folder of a model.

        Raises:
            TritiumError: INTERNAL, as Triton answers, when there is none or more than one.
        """
        places = self._scan().get(name, [])
        if not places:
            raise _not_polled(name, "no repository has a folder of that name")
        if len(places) > 1:
            raise _not_polled(name, f"{len(places)} repositories have a folder of that name")
        return Found(name, places[0])

    def fingerprint(self, name: str) -> str:
        """A digest that differs when a file of the model has changed; "" when there is no such model. Blocks."""
        places = self._scan().get(name, [])
        return fingerprint.digest(fingerprint.files_of(places[0])) if len(places) == 1 else ""

    def fresh(self, name: str, seconds: float) -> bool:
        """Whether something in a model's folder has changed in the last ``seconds``. Blocks."""
        return any(time.time() - fingerprint.newest(place) < seconds for place in self._scan().get(name, []))

    def incomplete(self, name: str) -> str:
        """What a model's checkpoints still lack by their own word; "" when nothing says so. Blocks."""
        for place in self._scan().get(name, []):
            for version in versions_of(place):
                if lacking := incomplete(place / str(version)):
                    return f"version {version}: {lacking}"
        return ""

    def plan(self, name: str, override: str | None = None, files: Mapping[str, bytes] | None = None) -> Plan:
        """Reads what a model's files ask for. Blocks; call it in a thread.

        Args:
            override: a configuration in JSON that takes the place of the file.
            files: by path below the model's folder, in place of what lies there; wants ``override``.

        Raises:
            TritiumError: INTERNAL when folder or configuration cannot be read, INVALID_ARGUMENT when the
                policy leaves no version.
        """
        scratch = None
        if files:
            if override is None:
                raise _not_polled(name, "files in a request want a 'config' beside them")
            scratch = Scratch(name, files)
            # A plain load that follows shall not take the repository's files for changed ones.
            digest = self.fingerprint(name)
            found = Found(name, scratch.folder)
        else:
            found, digest = self.find(name), ""
        try:
            # Taken first: a file that changes while it is read makes the next load a real one.
            there = fingerprint.files_of(found.folder)
            versions = versions_of(found.folder)
            config = with_labels(self._read_config(found, versions, override), found.folder)
            chosen = choose(versions, config)
            general = _read_triton_config(found.folder, f"{name}/{TRITON_CONFIG_FILE}")
            contexts = tuple(self._context(found, config, version, general, there) for version in chosen)
        except TritiumError as error:
            raise _not_polled(name, error.message) from error
        if not contexts:
            raise invalid(
                f"load failed for model '{name}': at least one version must be available under the version policy "
                f"of model '{name}'\n"
            )
        return Plan(name, config, contexts, digest if scratch else fingerprint.digest(there), scratch)

    def _context(
        self, found: Found, config: ModelConfig, version: int, general: Mapping[str, object], files: Sequence[File]
    ) -> LoadContext:
        folder = found.folder / str(version)
        own = _read_triton_config(folder, f"{found.name}/{version}/{TRITON_CONFIG_FILE}")
        read = fingerprint.loaded_by(files, version, label_files(config))
        return LoadContext(
            name=found.name,
            version=str(version),
            config=config,
            version_folder=folder,
            model_folder=found.folder,
            triton_config={**general, **own},
            settings=self.settings,
            auto_complete=self.auto_complete,
            backend_config={
                **self.backend_settings.get("", {}),
                **self.backend_settings.get(name_of(config.backend, config.platform), {}),
            },
            files=fingerprint.digest(read),
            content=fingerprint.content(found.folder, read) if config.response_cache else "",
        )

    def _read_config(self, found: Found, versions: Sequence[int], override: str | None) -> ModelConfig:
        path = found.folder / CONFIG_FILE
        if self.config_name and (named := found.folder / CONFIGS_FOLDER / f"{self.config_name}.pbtxt").exists():
            path = named
        shown = f"{found.name}/{path.relative_to(found.folder)}"
        if override is not None:
            shown = "config"
            source = parse_json(override, shown)
        elif path.exists():
            source = parse_text(read_limited(path, shown), shown)
        elif not self.auto_complete:
            raise invalid(f"{shown} is missing, and configurations are not completed here")
        else:
            source = empty()
        if not source.backend and not source.platform and versions and self.auto_complete:
            source.backend = detect(found.folder / str(versions[-1]))
        return make_config(source, found.name, shown)

    def _scan(self) -> dict[str, list[Path]]:
        """Model folders by name; hidden ones are left out."""
        found: dict[str, list[Path]] = {}
        for folder in self.folders:
            try:
                entries = sorted(folder.iterdir())
            except OSError as error:
                _log.error("repository cannot be listed", repository=folder, error=error)
                continue
            for entry in entries:
                # Printable leaves out names that are no text, which no protocol could carry.
                if not entry.name.startswith(".") and entry.name.isprintable() and entry.is_dir():
                    found.setdefault(entry.name, []).append(entry)
        return found


def versions_of(folder: Path) -> list[int]:
    """Version folders of a model, ascending: names that are positive integers without a leading zero."""
    found: list[int] = []
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        name = entry.name
        if name.isascii() and name.isdecimal() and not name.startswith("0") and int(name) < 1 << 63:
            found.append(int(name))
        else:
            _log.info("folder is no version", model=folder.name, folder=name)
    return sorted(found)


def choose(versions: Sequence[int], config: ModelConfig) -> list[int]:
    """The versions that the policy serves, ascending.

    Args:
        versions: those that there are, ascending.
    """
    match config.versions:
        case All():
            return list(versions)
        case Latest(count):
            return list(versions)[-count:]
        case Specific(wanted):
            return [version for version in versions if version in wanted]


def _read_triton_config(folder: Path, shown: str) -> dict[str, object]:
    """The object in a ``triton_config.json``; empty when there is no such file."""
    path = folder / TRITON_CONFIG_FILE
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(read_limited(path, shown), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{shown} is not a JSON object: {error}") from error
    except RecursionError:
        raise invalid(f"{shown} is nested too deeply") from None


def _not_polled(name: str, why: str) -> TritiumError:
    if not name:  # which needs no reason, and has none in the recorded answer
        return TritiumError(Code.INTERNAL, "failed to load '', failed to poll from model repository")
    return TritiumError(Code.INTERNAL, f"failed to load '{name}', failed to poll from model repository: {why}")
