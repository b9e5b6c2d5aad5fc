from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tritium.errors import TritiumError
from tritium.observability import logs


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    tritium = logging.getLogger("tritium")
    before = (list(root.handlers), root.level, tritium.level)
    yield io.StringIO()
    root.handlers[:], level, own = before[0], before[1], before[2]
    root.setLevel(level)
    tritium.setLevel(own)


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_a_text_line_has_time_level_module_message_and_fields(out: io.StringIO) -> None:
    logs.setup("info", "text", out)
    logs.get("tritium.test").info("model is loaded", model="m 1", seconds=1.23456789, version="1", empty="")
    (line,) = lines(out)
    assert line[10] == "T"
    assert line[23] == "Z"
    assert line[25:] == 'INFO    tritium.test: model is loaded model="m 1" seconds=1.23457 version=1 empty=""'


def test_a_json_line_is_an_object(out: io.StringIO) -> None:
    logs.setup("info", "json", out)
    with logs.bound_request_id("abc"):
        logs.get("tritium.test").warning("queue is full", waiting=3, share=float("nan"), level="x", where=None)
    (line,) = lines(out)
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "logger": "tritium.test",
        "message": "queue is full",
        "waiting": 3,
        "share": "nan",
        "where": None,
        "request_id": "abc",
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_nobody_can_forge_a_line(out: io.StringIO, form: str) -> None:
    logs.setup("info", form, out)
    evil = "a\r\n2026-01-01T00:00:00.000Z INFO  forged\x1b[31m\u2028x"
    with logs.bound_request_id(evil):
        logs.get("tritium.test").info(evil, model=evil)
        logs.get("tritium.test").info("old way: %s", evil)
        logging.getLogger("tritium.library").info("of a library %s", evil)
        try:
            raise ValueError(evil)
        except ValueError:
            logs.get("tritium.test").error("failed")
    assert len(lines(out)) == 4
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_users_write_is_never_shown(out: io.StringIO, form: str) -> None:
    logs.setup("debug", form, out)
    logs.get("tritium.test").info(
        "request", prompt="my secret", messages=["secret"], text_output="secret", user="secret"
    )
    assert "secret" not in out.getvalue()
    assert "<9 characters>" in out.getvalue()
    assert "<1 items>" in out.getvalue()


def test_long_values_are_cut(out: io.StringIO) -> None:
    logs.setup("info", "text", out)
    logs.get("tritium.test").info("request", model="x" * 10**6)
    assert len(out.getvalue()) < 700
    assert "(1000000 characters)" in out.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_stays_with_its_line(out: io.StringIO, form: str) -> None:
    logs.setup("info", form, out)
    log = logs.get("tritium.test")
    try:
        raise ValueError("bad\nthing")
    except ValueError as error:
        log.exception("it failed", model="m")
        log.error("it failed", exc_info=error)
    if form == "json":
        assert all("ValueError: bad" in json.loads(line)["exception"] for line in lines(out))
    else:
        heads = [line for line in lines(out) if not line.startswith("    | ")]
        assert len(heads) == 2
        assert out.getvalue().count("    | ValueError: bad") == 2


async def test_each_request_has_its_own_id(out: io.StringIO) -> None:
    logs.setup("info", "json", out)
    log = logs.get("tritium.test")

    async def request(name: str) -> None:
        with logs.bound_request_id(name):
            await asyncio.sleep(0)
            await asyncio.create_task(inner(name))

    async def inner(name: str) -> None:
        await asyncio.sleep(0)
        log.info("step", expected=name)

    await asyncio.gather(*(request(str(i)) for i in range(5)))
    log.info("outside")
    found: list[dict[str, Any]] = [json.loads(line) for line in lines(out)]
    assert all(one["request_id"] == one["expected"] for one in found[:-1])
    assert "request_id" not in found[-1]


def test_levels_hold_and_libraries_are_quiet(out: io.StringIO) -> None:
    logs.setup("warning", "text", out)
    log = logs.get("tritium.test")
    log.info("no")
    log.debug("no")
    log.warning("yes")
    assert not log.enabled("info")
    assert log.enabled("error")
    logs.setup("info", "text", out)
    logging.getLogger("library").info("no")
    logging.getLogger("library").warning("yes")
    assert len(lines(out)) == 2


def test_setup_again_replaces_and_children_follow(out: io.StringIO) -> None:
    assert logs.child_arguments()[::2] == ["--log-level", "--log-format"]
    logs.setup("info", "text", io.StringIO())
    logs.setup("debug", "json", out)
    logs.get("tritium.test").debug("once")
    assert len(lines(out)) == 1
    assert logs.child_arguments() == ["--log-level", "debug", "--log-format", "json"]


@pytest.mark.parametrize(("level", "form"), [("loud", "text"), ("info", "loud")])
def test_unknown_settings_are_named(level: str, form: str) -> None:
    with pytest.raises(TritiumError, match="'loud', expected one of"):
        logs.setup(level, form)
