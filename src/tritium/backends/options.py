"""What a configuration asks of a runtime: ``parameters``, ``optimization`` and the backend's settings.

Each value is read by the backend that knows it; what nobody has read is named once, at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import TritiumError, invalid

# Read by the server itself; "placement" also by ``serving.instances``.
OF_THE_SERVER = frozenset({"placement", "retry_on_crash", "text_correlation_id"})
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One entry of ``optimization.execution_accelerators``."""

    name: str
    parameters: Mapping[str, str]


class Options:
    """The wishes of one model.

    Args:
        config: in the form of ``ModelConfig.to_json``.
        settings: what ``--backend-config`` says to the backend.
    """

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, str]) -> None:
        self.model: str = config["name"]
        self._parameters: dict[str, str] = {
            key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()
        }
        self._settings = settings
        self._optimization: Mapping[str, Any] = config.get("optimization") or {}
        self._read: set[str] = set()

    # -- parameters -----------------------------------------------------------------------------------------

    def text(self, key: str, default: str = "") -> str:
        """The value of a parameter as it stands there."""
        self._read.add(key)
        return self._parameters.get(key, default)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """A parameter that is on or off.

        Raises:
            TritiumError: INVALID_ARGUMENT when it is neither.
        """
        value = self.text(key)
        if key not in self._parameters:
            return default
        if value.strip().lower() in _TRUE + _FALSE:
            return value.strip().lower() in _TRUE
        raise self.wrong(key, value, "true or false")

    def number(self, key: str, default: int | None = None, low: int = 0) -> int | None:
        """A parameter that is a whole number from ``low``.

        Raises:
            TritiumError: INVALID_ARGUMENT when it is none.
        """
        value = self.text(key)
        if key not in self._parameters:
            return default
        return _number(value, low, lambda expected: self.wrong(key, value, expected))

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """A parameter that is one of ``choices``; "" when it is not set. Letters count without regard to case.

        Raises:
            TritiumError: INVALID_ARGUMENT when it is none of them.
        """
        value = self.text(key)
        if not value or value.upper() in choices:
            return value.upper()
        raise self.wrong(key, value, "one of " + ", ".join(choices))

    def unused(self, key: str) -> None:
        """A parameter or field that has no meaning here after all: it is named at load like an unknown one."""
        self._read.discard(key)

    def wrong(self, key: str, value: str, expected: str) -> TritiumError:
        """The error for a value of a parameter."""
        return invalid(f"parameter '{key}' of model '{self.model}' is '{value}', expected {expected}", param=key)

    # -- settings of the backend ----------------------------------------------------------------------------

    def setting(self, key: str, default: int, low: int = 0) -> int:
        """A whole number of ``--backend-config``.

        Raises:
            TritiumError: INVALID_ARGUMENT when it is none.
        """
        self._read.add(f"--backend-config {key}")
        value = self._settings.get(key)
        if value is None:
            return default
        return _number(
            value, low, lambda expected: invalid(f"--backend-config {key} is '{value}', expected {expected}")
        )

    # -- optimization ---------------------------------------------------------------------------------------

    def graph_level(self) -> int:
        """``optimization.graph.level``; 0 when nothing is said."""
        self._read.add("optimization.graph")
        return int((self._optimization.get("graph") or {}).get("level") or 0)

    def accelerators(self, kind: str) -> list[Accelerator]:
        """Those of ``cpu_execution_accelerator`` or ``gpu_execution_accelerator``."""
        field = f"{kind}_execution_accelerator"
        self._read.add(f"optimization.execution_accelerators.{field}")
        return [Accelerator(one["name"], one.get("parameters", {})) for one in self._accelerators().get(field, ())]

    def cuda_graphs(self) -> bool:
        """``optimization.cuda.graphs``."""
        self._read.add("optimization.cuda.graphs")
        return bool((self._optimization.get("cuda") or {}).get("graphs"))

    def ignored(self) -> list[str]:
        """What is set and was not read, by name."""
        found = [f"parameters.{key}" for key in sorted(self._parameters) if key not in self._read | OF_THE_SERVER]
        found += [
            f"--backend-config {key}"
            for key in sorted(self._settings)
            if f"--backend-config {key}" not in self._read and key != "placement"
        ]
        return found + [field for field in self._set_fields() if field not in self._read]

    def _accelerators(self) -> Mapping[str, Any]:
        return self._optimization.get("execution_accelerators") or {}

    def _set_fields(self) -> list[str]:
        cuda = self._optimization.get("cuda") or {}
        graph = self._optimization.get("graph")
        found = ["optimization.graph"] if graph else []
        found += [f"optimization.cuda.{key}" for key, value in cuda.items() if value]
        return found + [f"optimization.execution_accelerators.{key}" for key, v in self._accelerators().items() if v]


def _number(value: str, low: int, wrong: Any) -> int:
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if number < low:
        raise wrong(f"a whole number from {low}")
    return number
