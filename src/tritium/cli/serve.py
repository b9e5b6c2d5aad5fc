"""``tritium serve``: hands the settings to ``launch``."""

from __future__ import annotations

from tritium.cli.flags import Parsed
from tritium.llm.config import EngineConfig
from tritium.settings import ServerSettings, prepare_libraries


def serve(parsed: Parsed) -> int:
    """Serves until a signal."""
    prepare_libraries()
    from tritium import launch

    return launch.run(parsed.get(ServerSettings), parsed.chosen(EngineConfig), parsed.effective)
