"""The file that traces are written to: a JSON array, whole after every trace."""

from __future__ import annotations

import json
import os
from io import BufferedWriter
from typing import Any

from tritium.errors import invalid


class TraceFile:
    """A JSON array that grows at its end, and is whole after each growth.

    Args:
        log_frequency: traces after which the next file begins; 0 for one file.

    Raises:
        TritiumError: INVALID_ARGUMENT when the file cannot be written.
    """

    def __init__(self, path: str, log_frequency: int) -> None:
        self._path = path
        self.log_frequency = log_frequency
        self._index = 0
        self._in_file = 0
        try:
            self._open: BufferedWriter | None = self._begin(f"{path}.0" if log_frequency else path)
        except OSError as error:
            raise invalid(f"trace file '{path}' cannot be written: {error.strerror}", param="trace_config") from None

    def _begin(self, path: str) -> BufferedWriter:
        self._in_file = 0
        # Only for its owner: traces may hold what users sent.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
        file.write(b"[]")
        file.flush()
        return file

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Appends the entries of one trace."""
        if self._open is None or (self.log_frequency and self._in_file >= self.log_frequency):
            self.close()
            self._index += 1
            self._open = self._begin(f"{self._path}.{self._index}")
        text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        self._open.seek(-1, os.SEEK_END)
        self._open.write((",\n" if self._in_file else "").encode() + text.encode() + b"]")
        self._open.flush()
        self._in_file += 1

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None
