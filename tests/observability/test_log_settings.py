from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.observability.log_settings import LogSettings
from tritium.observability.logs import LogState

_log = logs.get("tritium.test")


@pytest.fixture(autouse=True)
def _leave_logging_alone() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("tritium")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


def lines(file: Path) -> list[str]:
    _log.debug("a step")
    _log.info("a change")
    _log.warning("a worry")
    _log.error("a fault")
    text = file.read_text()
    file.write_text("")
    return [word for word in ("step", "change", "worry", "fault") if f"a {word}" in text]


def test_switches(tmp_path: Path) -> None:
    file = tmp_path / "log"
    settings = LogSettings("info", "text", str(file), warning=False)
    assert settings.as_dict() == {
        "log_file": str(file),
        "log_info": True,
        "log_warning": False,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert lines(file) == ["change", "fault"]
    settings.update({"log_info": False, "log_warning": True, "no_such": True})
    assert lines(file) == ["worry", "fault"]
    settings.update({"log_verbose_level": 2, "log_error": False, "log_format": "json"})
    assert lines(file) == ["step", "worry"]
    assert settings.as_dict()["log_format"] == "json"
    settings.update({"log_verbose_level": 0, "log_warning": False})
    assert lines(file) == []
    settings.close()


@pytest.mark.parametrize(("level", "expected"), [("debug", 1), ("warning", 0)])
def test_level_sets_the_switches(tmp_path: Path, level: str, expected: int) -> None:
    settings = LogSettings(level, "ISO8601", str(tmp_path / "log"))
    found = settings.as_dict()
    settings.close()
    assert (found["log_verbose_level"], found["log_info"], found["log_format"]) == (
        expected,
        level == "debug",
        "ISO8601",
    )


def test_refusals(tmp_path: Path) -> None:
    settings = LogSettings("info", "text", str(tmp_path / "log"))
    with pytest.raises(TritiumError, match="log file location can not be updated") as caught:
        settings.update({"log_file": "x"})
    assert caught.value.code is Code.UNIMPLEMENTED
    with pytest.raises(TritiumError, match="invalid argument for --log_format, got: xml") as caught:
        settings.update({"log_info": False, "log_format": "xml"})
    assert caught.value.code is Code.UNAVAILABLE
    assert settings.as_dict()["log_info"] is True
    settings.close()
    with pytest.raises(TritiumError, match="--log-file"):
        LogSettings("info", "text", str(tmp_path))


def test_followers_are_told_of_every_change(tmp_path: Path) -> None:
    settings = LogSettings("info", "text", str(tmp_path / "log"))
    assert logs.state() == LogState("text", 0, True, True, True)
    seen: list[LogState] = []
    unfollow = logs.follow(seen.append)
    settings.update({"log_verbose_level": 1, "log_warning": False})
    settings.update({"log_format": "json"})
    with pytest.raises(TritiumError):
        settings.update({"log_format": "xml"})
    unfollow()
    settings.update({"log_verbose_level": 0})
    settings.close()
    assert seen == [LogState("text", 1, True, False, True), LogState("json", 1, True, False, True)]
    assert [seen[0].passes(level) for level in ("debug", "info", "warning", "error")] == [True, True, False, True]


@pytest.mark.parametrize("name", ["", "tritium"])
def test_another_process_applies_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a name only: whatever else the process logs is left alone."""
    own = logging.getLogger("tritium")
    before = own.handlers[:], own.propagate
    library = logging.getLogger("library")
    try:
        for state, expected in (
            (LogState("text", 1, False, True, True), ["debug", "warning", "error"]),
            (LogState("json", 0, True, False, False), ["info"]),
            (LogState("text", 0, False, False, False), []),
        ):
            logs.apply(state, name)
            for level in ("debug", "info", "warning", "error"):
                getattr(_log, level)(f"a {level} line")
            said = capsys.readouterr().err
            assert [level for level in ("debug", "info", "warning", "error") if f"a {level} line" in said] == expected
            assert said.startswith("{") == (state.format == "json")
        logs.apply(LogState("text", 0, True, True, True), name)
        library.warning("heard")
        assert ("heard" in capsys.readouterr().err) == (name == "")
    finally:
        own.handlers[:], own.propagate = before
