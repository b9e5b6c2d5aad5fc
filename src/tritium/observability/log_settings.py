"""The log settings of Triton's logging extension: what is in force, and changes while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from tritium.errors import Code, TritiumError, invalid
from tritium.observability import logs
from tritium.observability.logs import Switches

Setting = bool | int | str

SWITCHES = ("log_info", "log_warning", "log_error")
_LEVELS = ("debug", "info", "warning", "error")


class LogSettings:
    """How this process logs. Made once, at the start; sets the logging up.

    Args:
        level: least severe line that is written, before the switches.
        format: of a line.
        file: where lines go; "" for standard error.
        info, warning, error: whether lines of that level are written, if ``level`` lets them.
        verbose: above 0 the same as level debug.

    Raises:
        TritiumError: INVALID_ARGUMENT for an unknown level or format, or a file that cannot be written.
    """

    def __init__(
        self,
        level: str = "info",
        format: str = "text",
        file: str = "",
        *,
        info: bool = True,
        warning: bool = True,
        error: bool = True,
        verbose: int = 0,
    ) -> None:
        self._file = file
        self._format = format
        self._stream = _open(file) if file else None
        self._handler = logs.setup(level, format, self._stream)
        self._switches = Switches()
        rank = _LEVELS.index(level)
        self._switches.verbose = verbose or int(rank == 0)
        self._switches.info, self._switches.warning, self._switches.error = (
            info and rank < 2,
            warning and rank < 3,
            error,
        )
        self._handler.addFilter(self._switches)
        self._apply()

    def as_dict(self) -> dict[str, Setting]:
        """The settings by Triton's names, in its order."""
        return {
            "log_file": self._file,
            "log_info": self._switches.info,
            "log_warning": self._switches.warning,
            "log_error": self._switches.error,
            "log_verbose_level": self._switches.verbose,
            "log_format": "default" if self._format == "text" else self._format,
        }

    def update(self, changes: Mapping[str, Setting]) -> None:
        """Changes settings, all or none; keys that are no setting are passed over, as in Triton.

        Child processes, of models and of engines, follow.

        Args:
            changes: values of the right type.

        Raises:
            TritiumError: UNIMPLEMENTED for ``log_file``; UNAVAILABLE, as Triton says it, for an unknown format.
        """
        if "log_file" in changes:
            raise TritiumError(Code.UNIMPLEMENTED, "log file location can not be updated through network protocol")
        format = str(changes.get("log_format", self._format))
        if format not in logs.FORMATTERS:
            raise TritiumError(Code.UNAVAILABLE, f"invalid argument for --log_format, got: {format[:100]}")
        for name in SWITCHES:
            if name in changes:
                setattr(self._switches, name.removeprefix("log_"), bool(changes[name]))
        self._switches.verbose = int(changes.get("log_verbose_level", self._switches.verbose))
        self._format = format
        self._handler.setFormatter(logs.formatter(format))
        self._apply()
        logs.announce()

    def close(self) -> None:
        """Closes the file; lines go to standard error from then on."""
        if self._stream is not None:
            logs.setup(format=self._format)
            self._stream.close()

    def _apply(self) -> None:
        logs.set_level(self._switches.lowest())


def _open(path: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise invalid(f"--log-file {path}: {error.strerror}", param="log_file") from None
