"""Settings: four sources, one precedence, every value with its source; other projects' spellings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tritium.cli import COMMANDS, ENGINE, SERVER, known_settings
from tritium.cli.flags import Group, Parsed, canonical, explained, parse
from tritium.errors import Code, TritiumError
from tritium.llm.config import EngineConfig
from tritium.settings import ALIASES, NOTICES, ServerSettings, below_command_line, read_file, settings_of


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TRITIUM_"):
            monkeypatch.delenv(name)


def serve(*argv: str) -> Parsed:
    return parse("serve", "summary", (SERVER, ENGINE), argv, known_settings())


def test_defaults() -> None:
    parsed = serve()
    assert parsed.get(ServerSettings) == ServerSettings()
    assert parsed.get(EngineConfig, model="m") == EngineConfig(model="m")
    assert {e.source for e in parsed.effective.values()} == {"default"}
    assert parsed.chosen(EngineConfig) == {}


def test_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tritium.toml"
    file.write_text("max-rows = 1\nhttp_port = 1001\ngrpc_port = 1002\nmetrics_port = 1003\n")
    monkeypatch.setenv("TRITIUM_HTTP_PORT", "2001")
    monkeypatch.setenv("TRITIUM_GRPC_PORT", "2002")
    parsed = serve("--config", str(file), "--http-port", "3001")
    settings = parsed.get(ServerSettings)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (3001, 2002, 1003)
    assert parsed.effective["http_port"].source == "command line (--http-port)"
    assert parsed.effective["grpc_port"].source == "TRITIUM_GRPC_PORT"
    assert parsed.effective["metrics_port"].source == str(file)
    assert parsed.effective["host"].source == "default"
    assert parsed.chosen(EngineConfig) == {"max_rows": 1}


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".toml", 'max_model_len = 99\nload-model = ["a", "b"]\nprefix_cache = false\n'),
        (".yaml", "max_model_len: 99\nload-model: [a, b]\nprefix_cache: false\n"),
        (".json", '{"max_model_len": 99, "load-model": ["a", "b"], "prefix_cache": false}'),
    ],
)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str) -> None:
    file = tmp_path / f"c{suffix}"
    file.write_text(text)
    monkeypatch.setenv("TRITIUM_CONFIG", str(file))
    parsed = serve()
    assert parsed.effective["max_length"].value == 99
    assert parsed.effective["load_model"].value == ("a", "b")
    assert parsed.effective["prefix_cache"].value is False


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "http_prot = 1", "unknown setting 'http_prot' (did you mean http_port?)"),
        ("a.toml", 'http_port = "x"', "http_port is 'x', expected a whole number from 0 to 65535"),
        ("a.toml", "http_port = 70000", "http_port is 70000, expected a whole number from 0 to 65535"),
        ("a.toml", "= 1", "--config"),
        ("a.yaml", "[1, 2]", "expected a table of settings, got list"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a.ini", "", "expected a file ending in"),
        ("a.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(TritiumError) as caught:
        serve("--config", str(file))
    assert said.lower() in caught.value.message.lower()


def test_missing_and_large_file(tmp_path: Path) -> None:
    with pytest.raises(TritiumError, match="No such file"):
        read_file(tmp_path / "none.toml")
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"host": "x" * (1 << 20)}))
    with pytest.raises(TritiumError, match="larger than"):
        read_file(large)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("TRITIUM_MODEL", "smollm2", "model", "smollm2"),
        ("TRITIUM_PREFIX_CACHE", "false", "prefix_cache", False),
        ("TRITIUM_MAX_LENGTH", "none", "max_length", None),
        ("TRITIUM_MAX_NUM_SEQS", "3", "max_rows", 3),
        ("TRITIUM_DTYPE", "half", "dtype", "float16"),
        ("TRITIUM_MODEL_REPOSITORY", "/a, /b", "model_repository", ("/a", "/b")),
        ("TRITIUM_PREFERRED_ROWS", "4,8", "preferred_rows", (4, 8)),
        ("TRITIUM_MEMORY_FRACTION", "0.5", "memory_fraction", 0.5),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object) -> None:
    monkeypatch.setenv(variable, text)
    effective = serve().effective[name]
    assert (effective.value, effective.source) == (value, variable)


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITIUM_HTTP_PORT", "many")
    with pytest.raises(TritiumError, match="TRITIUM_HTTP_PORT is 'many', expected a whole number from 0 to 65535"):
        serve()
    monkeypatch.delenv("TRITIUM_HTTP_PORT")
    monkeypatch.setenv("TRITIUM_HTTP_PROT", "1")
    assert "did you mean http_port?" in serve().notices[0]
    # A setting of another command is no mistake.
    monkeypatch.delenv("TRITIUM_HTTP_PROT")
    monkeypatch.setenv("TRITIUM_TEMPERATURE", "0")
    assert serve().notices == []


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--port", "9"], "http_port", 9),
        (["--port=9"], "http_port", 9),
        (["--max_num_seqs=9"], "max_rows", 9),
        (["--max-num-batched-tokens", "99"], "max_tokens_per_step", 99),
        (["--gpu-memory-utilization", "0.5"], "memory_fraction", 0.5),
        (["--enable-prefix-caching"], "prefix_cache", True),
        (["--no-enable-prefix-caching"], "prefix_cache", False),
        (["--enable_prefix_caching=false"], "prefix_cache", False),
        (["--no-prefix-cache"], "prefix_cache", False),
        (["--prefix-cache", "false"], "prefix_cache", False),
        (["--no-prefix-cache=false"], "prefix_cache", True),
        (["--shutdown-timeout", "5"], "exit_timeout_secs", 5.0),
        (["--model-store=/a", "--model-repository", "/b"], "model_repository", ("/a", "/b")),
        (["--http-address", "0.0.0.0"], "host", "0.0.0.0"),
        (["--allow-grpc=false"], "allow_grpc", False),
        (["--load-model=a", "--load-model=*"], "load_model", ("a", "*")),
        (["--dtype", "half"], "dtype", "float16"),
        (["--seed", "-3"], "seed", -3),
        (["--max-length", "None"], "max_length", None),
        (["smollm2"], "model", "smollm2"),
        (["--model", "smollm2"], "model", "smollm2"),
        (["--", "--odd"], "model", "--odd"),
        (["--served-model-name=a", "--served-model-name=b"], "served_model_name", ("a", "b")),
        (
            ["m", "--served-model-name", "a", "b", "--port=9", "--served-model-name", "c"],
            "served_model_name",
            tuple("abc"),
        ),
        (["--served-model-name", "a", "m"], "served_model_name", ("a",)),
    ],
)
def test_spellings(argv: list[str], name: str, value: object) -> None:
    effective = serve(*argv).effective[name]
    assert effective.value == value
    assert effective.source.startswith("command line")


def test_repeated_flag_replaces_the_default_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITIUM_LOAD_MODEL", "old")
    assert serve("--load-model", "new").effective["load_model"].value == ("new",)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-num-seq", "4"], "unknown flag --max-num-seq (did you mean --max-num-seqs?)"),
        (["--zzz"], "unknown flag --zzz"),
        (["--http-port"], "--http-port needs a value"),
        (["--http-port", "--grpc-port", "1"], "--http-port needs a value"),
        (["--port", "70000"], "--port is 70000, expected a whole number from 0 to 65535"),
        (["--exit-timeout-secs", "-1"], "--exit-timeout-secs is -1, expected a number of at least 0"),
        (["--threads", "0"], "--threads is 0, expected a whole number from 1 to 1024"),
        (["--threads", "100000"], "--threads is 100000, expected"),
        (["--max-rows=-3"], "--max-rows is -3, expected a whole number from 1 to 65536"),
        (["--max-num-seqs=99999999999"], "--max-num-seqs is 99999999999, expected a whole number from 1 to 65536"),
        (["--block-size=0"], "--block-size is 0, expected a whole number of at least 1"),
        (["--max-model-len", "1"], "--max-model-len is 1, expected a whole number of at least 2 or none"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2, expected a number above 0 and at most 1"),
        (["--memory-fraction", "nan"], "--memory-fraction is nan, expected a number above 0"),
        (["--preferred-rows=4", "--preferred-rows=x"], "--preferred-rows is 4, 'x', expected a whole number"),
        (["--prefix-cache=perhaps"], "--prefix-cache is 'perhaps', expected true or false"),
        (["--http-port", "x"], "--http-port is 'x', expected a whole number"),
        (["--dtype", "int3"], "--dtype is 'int3', expected one of auto, float32, float16, bfloat16"),
        (["a", "b"], "unexpected argument 'b', expected no more than MODEL"),
        (["--model=a", "b"], "unexpected argument 'b', expected no more than none"),
    ],
)
def test_bad_flags(argv: list[str], said: str) -> None:
    with pytest.raises(TritiumError) as caught:
        serve(*argv)
    assert said.lower() in caught.value.message.lower()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(command, COMMANDS[command].summary, COMMANDS[command].groups, ["--help"], known_settings())
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: tritium {command} ")
    assert shown.isascii() and "``" not in shown and "None" not in shown and "--config FILE" in shown
    assert max(map(len, shown.splitlines())) <= 100
    settings = [s for group in COMMANDS[command].groups for s in group.settings()]
    assert [s.name for s in settings if s.flag not in shown and s.name.upper() not in shown] == []


@pytest.mark.parametrize(
    ("command", "said"), [("bench", "WORKLOAD is missing, expected one of A,"), ("generate", "PROMPT")]
)
def test_what_is_required(command: str, said: str) -> None:
    with pytest.raises(TritiumError, match=said):
        parse(command, "", COMMANDS[command].groups, [], known_settings())


def test_an_error_names_the_flag_that_was_typed() -> None:
    parsed = serve("--max-model-len", "9")
    error = TritiumError(Code.INVALID_ARGUMENT, "max_length is 9, expected 2 to 8")
    assert explained(error, parsed) == "max_length is 9, expected 2 to 8 (max_length is what --max-model-len gave)"
    assert explained(error, serve()) == error.message
    assert explained(TritiumError(Code.INTERNAL, "my_max_length"), parsed) == "my_max_length"


@pytest.mark.parametrize("flag", sorted(NOTICES))
def test_notices(flag: str) -> None:
    parsed = serve(f"--{flag}", "auto", "smollm2", f"--{flag.replace('-', '_')}=enable")
    assert parsed.get(ServerSettings).model == "smollm2"
    assert len(parsed.notices) == 2
    assert all(NOTICES[flag] in notice for notice in parsed.notices)


def test_tables_name_what_exists() -> None:
    fields = {f.name for cls in (ServerSettings, EngineConfig) for f in dataclasses.fields(cls)}
    assert set(ALIASES.values()) <= fields
    assert not set(ALIASES) & {name.replace("_", "-") for name in fields}
    assert not set(NOTICES) & set(ALIASES)


def test_help_names_source_alias_and_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITIUM_MAX_ROWS", "7")
    with pytest.raises(SystemExit) as caught:
        serve("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Also --max-num-seqs, --max-batch-size. Set to 7 by TRITIUM_MAX_ROWS." in shown
    assert "--block-size INT tokens per KV block. Default: 16." in shown


def test_every_setting_has_help() -> None:
    for command in COMMANDS.values():
        for group in command.groups:
            assert [s.name for s in group.settings() if not s.help] == []


def test_no_command_has_a_name_twice() -> None:
    for command in COMMANDS.values():
        names = [s.name for group in command.groups for s in group.settings()]
        assert len(names) == len(set(names))


def test_canonical_keeps_the_order_of_arguments() -> None:
    line = canonical(["a", "--port", "1", "b", "-h", "--", "--c"], Group(ServerSettings).settings())
    assert (line.positional, line.values, line.help) == (["a", "b", "--c"], {"http_port": ["1"]}, True)


def test_below_command_line_without_anything() -> None:
    table, notices = below_command_line(settings_of(ServerSettings), known_settings())
    assert table["host"].value == "127.0.0.1"
    assert notices == []
