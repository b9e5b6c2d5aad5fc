"""``tritium config``: every setting in force, and whose word it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tritium.backends import find
from tritium.backends.llm import LlmBackend, plan
from tritium.cli import options
from tritium.cli.flags import Parsed
from tritium.errors import TritiumError
from tritium.frontends.banner import for_each_model, own_settings, with_facts
from tritium.launch import first_plans
from tritium.llm.config import EngineConfig
from tritium.llm.names import served_names
from tritium.observability.tables import settings_table
from tritium.settings import Effective, ServerSettings, shown


def config(parsed: Parsed) -> int:
    """Prints every setting of ``serve`` as it would be in force, and what each model makes of them."""
    server = {n: e for n, e in parsed.effective.items() if n != "json"}
    settings = parsed.get(ServerSettings)
    names = served_names(settings.model, settings.served_model_name) if settings.model is not None else ()
    server = with_facts(server, names=names)
    own = dict(_own(settings, parsed.chosen(EngineConfig)))
    if settings.model is not None:
        (found,) = own.values()
        if isinstance(found, str):
            print(f"tritium: note: {settings.model}: {found}", file=sys.stderr)
        else:
            server |= found
        own = {}
    server = for_each_model(server)
    if parsed.get(options.Show).json:
        shown_own = {name: found if isinstance(found, str) else _plain(found) for name, found in own.items()}
        print(json.dumps({**_plain(server), **({"models": shown_own} if shown_own else {})}, indent=2))
        return 0
    print(settings_table(server))
    for (name, version), found in ((key.rsplit("/", 1), found) for key, found in own.items()):
        lines = ["", f"{name}: {found}"] if isinstance(found, str) else own_settings(name, version, found)
        print("\n".join(line.removeprefix("  ") for line in lines))
    return 0


def _plain(settings: Mapping[str, Effective]) -> dict[str, Any]:
    return {n: {"value": shown(n, e.value), "source": e.source} for n, e in settings.items()}


def _own(settings: ServerSettings, engine: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Effective] | str]]:
    """By ``name/version``, the settings that language models have of their own, or why one cannot be loaded."""
    nothing = settings.model is None and not settings.model_repository
    for name, found in () if nothing else first_plans(settings, engine):
        if isinstance(found, TritiumError):
            yield f"{name}/-", found.message
            continue
        for context in found.contexts:
            key = f"{context.name}/{context.version}"
            try:
                backend = find(context.config.backend, context.config.platform, context.name)
                if issubclass(backend, LlmBackend):
                    yield key, plan(context)[1]
            except TritiumError as error:
                yield key, error.message
