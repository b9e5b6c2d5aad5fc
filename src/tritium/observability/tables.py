"""Tables for the terminal, in plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tritium.settings import Effective, shown


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: bool = False) -> str:
    """Columns padded to their widest cell; with ``numbers``, all but the first are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if numbers and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def size(num_bytes: float) -> str:
    """``1.5 GiB`` and the like."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def settings_table(effective: Mapping[str, Effective]) -> str:
    """All settings in force, their values and sources."""
    rows = [(name, _shown(shown(name, e.value)), e.source) for name, e in effective.items()]
    return table(("setting", "value", "source"), rows)


# Of a value; a longer one would push the sources out of sight.
_WIDTH = 60


def _shown(value: Any) -> str:
    if value is None or value in ((), ""):
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = ", ".join(map(str, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
