"""``tritium config``: what is in force, and whose word it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_checkpoint
from tritium.cli import main
from tritium.llm.runner.ranks import physical_cores


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    make_checkpoint(folder / "own" / "1", dtype="float32")
    (folder / "own" / "config.pbtxt").write_text(
        'backend: "tritium" max_batch_size: 3 dynamic_batching { max_queue_delay_microseconds: 70 }'
        ' parameters { key: "block_size" value { string_value: "8" } }'
        " instance_group [ { count: 2 kind: KIND_CPU } ]"
    )
    (folder / "own" / "triton_config.json").write_text('{"temperature": 0.5}')
    make_checkpoint(folder / "theirs" / "1" / "weights")
    (folder / "theirs" / "1" / "model.json").write_text('{"model": "weights", "max_model_len": 20, "dtype": "float16"}')
    (folder / "bad" / "1").mkdir(parents=True)
    (folder / "bad" / "config.pbtxt").write_text('backend: "nope"')
    return folder


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["config", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def pair(entry: dict[str, Any]) -> tuple[Any, str]:
    return entry["value"], entry["source"]


def test_what_a_model_makes_of_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, str(repository / "own" / "1"), "--max-rows=5", "--device=cpu", "--metrics-host=0.0.0.0")
    assert pair(found["dtype"]) == ("float32", "checkpoint")
    assert pair(found["device"]) == ("cpu", "command line (--device)")
    assert pair(found["max_length"])[1] == "checkpoint" and found["max_length"]["value"] > 0
    assert pair(found["threads"]) == (physical_cores(), "machine")
    assert pair(found["max_rows"]) == (5, "command line (--max-rows)")
    assert found["kv_cache_bytes"]["value"] > 0 and found["num_blocks"]["source"] == "checkpoint, machine"
    assert pair(found["grpc_host"]) == ("127.0.0.1", "from host")
    assert pair(found["metrics_host"]) == ("0.0.0.0", "command line (--metrics-host)")
    assert pair(found["served_model_name"]) == (["1"], "from model")


def test_what_the_models_of_a_repository_make_of_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--model-repository", str(repository), "--dtype=bfloat16", "--device=cpu", "--threads=4")
    assert pair(found["dtype"]) == ("bfloat16", "command line (--dtype)")
    assert pair(found["max_length"]) == ("auto", "each model")
    own, theirs = found["models"]["own/1"], found["models"]["theirs/1"]
    assert pair(own["max_rows"]) == (3, "config.pbtxt: max_batch_size")
    assert pair(own["queue_delay_us"]) == (70, "config.pbtxt: max_queue_delay_microseconds")
    assert pair(own["block_size"]) == (8, "config.pbtxt: parameters['block_size']")
    assert pair(own["memory_fraction"]) == (0.45, "config.pbtxt: instance_group")
    assert pair(own["sampling.temperature"]) == (0.5, "triton_config.json")
    assert "threads" not in own and "dtype" not in own  # as on the command line
    assert pair(theirs["max_length"]) == (20, "model.json: max_model_len")
    assert pair(theirs["dtype"]) == ("float16", "model.json: dtype")
    assert "Backends here: tritium" in found["models"]["bad/1"]


def test_it_is_a_table_too(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--model-repository", str(repository)]) == 0
    text = capsys.readouterr().out
    assert "settings of own (version 1), where they are not those above" in text
    assert ["block_size", "8", "config.pbtxt:", "parameters['block_size']"] in [
        line.split() for line in text.splitlines()
    ]
    assert "\nbad: unable to find backend library for backend 'nope'" in text
    assert main(["config", str(repository / "bad")]) == 1
