"""The table of statuses is whole, and an error carries what a protocol needs."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import tritium
from tritium.errors import STATUS, Code, TritiumError, invalid, pip_install


def test_every_code_has_statuses() -> None:
    assert set(STATUS) == set(Code)
    assert all(status.v1 >= 400 and status.v2 >= 400 for status in STATUS.values())
    numbers = [status.grpc for status in STATUS.values()]
    assert len(set(numbers)) == len(numbers)


def test_an_error_names_what_is_wrong() -> None:
    error = invalid("top_p is 2, expected 0 to 1", param="top_p", reason="range")
    assert (str(error), error.code, error.param, error.reason) == (
        "top_p is 2, expected 0 to 1",
        Code.INVALID_ARGUMENT,
        "top_p",
        "range",
    )
    assert error.status.v2 == 400
    assert TritiumError(Code.UNAVAILABLE, "full", retry_after_s=2).retry_after_s == 2


def test_commands_are_those_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shlex.split(pip_install("tritium[x]")) == [sys.executable, "-m", "pip", "install", "tritium[x]"]
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert pip_install("torch") == "'/a b/python' -m pip install torch"


def test_no_message_says_a_bare_pip() -> None:
    """Whoever reads ``pip install x`` may have another environment's pip in the path."""
    for path in Path(tritium.__file__).parent.rglob("*.py"):
        assert not re.search(r"\bpip install\b", path.read_text(encoding="utf-8")), path
