from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.serving.fakes import ECHO, Echo, write_model
from tests.serving.support import refused, serving, until
from tritium.errors import Code, TritiumError
from tritium.serving.model_files import Scratch, keep_labels, with_labels
from tritium.serving.repository import Repository

LABELLED = 'max_batch_size: 4 backend: "echo" output { name: "OUT" data_type: TYPE_FP32 dims: 3 label_filename: "%s" }'
CONFIG = '{"backend": "echo", "max_batch_size": 5, "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}]}'


def test_labels(repository: Path) -> None:
    write_model(repository, "m", LABELLED % "labels.txt")
    (repository / "m" / "labels.txt").write_text("one\n\ndrei ü\n")
    config = Repository((repository,)).plan("m").config
    spec = config.output("OUT")
    assert spec is not None and spec.labels == ("one", "", "drei ü")
    bare = with_labels(config, repository / "m")
    assert keep_labels(bare, config) == config


@pytest.mark.parametrize("name", ["missing.txt", "../outside.txt", "/etc/passwd", "binary"])
def test_labels_that_cannot_be_read(repository: Path, name: str) -> None:
    (repository.parent / "outside.txt").write_text("x")
    write_model(repository, "m", LABELLED % name)
    (repository / "m" / "binary").write_bytes(b"\xff")
    (repository / "outside.txt").write_text("x")
    with pytest.raises(TritiumError, match="failed to poll"):
        Repository((repository,)).plan("m")


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a\0b", "x" * 2000])
def test_files_stay_within_the_folder(path: str) -> None:
    with pytest.raises(TritiumError, match="is not a path below"):
        Scratch("m", {path: b""})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb"])
def test_names_that_are_no_folder(name: str) -> None:
    with pytest.raises(TritiumError, match="cannot be that of a folder"):
        Scratch(name, {"x": b""})


def test_files_in_each_others_way_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TritiumError, match="cannot be written"):
        Scratch("m", {"a": b"", "a/b": b""})
    assert not list(tmp_path.iterdir())
    scratch = Scratch("m", {"1/deep/file": b"content"})
    assert (scratch.folder / "1/deep/file").read_bytes() == b"content"
    del scratch
    gc.collect()
    assert not list(tmp_path.iterdir())


async def test_files_of_a_request(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve until the model is unloaded; then they are gone, and the repository's own count again."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    write_model(repository, "echo")
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        assert (await refused(server.load("echo", None, {"1/x": b""}))).code is Code.INTERNAL
        await server.load("echo", CONFIG, {"7/x": b"new"})
        assert server.model_ready("echo", "7") and not server.model_ready("echo", "1")
        folder = Echo.made[-1].context.version_folder
        assert folder is not None and (folder / "x").read_bytes() == b"new"
        await server.load("echo")  # the repository's files have not changed
        assert server.model_ready("echo", "7")
        await server.unload("echo")
        await until(lambda: not list(temporary.iterdir()))
        await server.load("echo")
        assert server.model_ready("echo", "1")
        await server.load("brand_new", CONFIG, {"1/x": b""})
        assert server.model_ready("brand_new")
        assert (await refused(server.load("other", "{", {"1/x": b""}))).code is Code.INTERNAL
        assert "other" not in {entry.name for entry in server.index() if entry.state}


def test_named_configurations(repository: Path) -> None:
    write_model(repository, "m")
    (repository / "m" / "configs").mkdir()
    (repository / "m" / "configs" / "small.pbtxt").write_text(ECHO.replace("max_batch_size: 4", "max_batch_size: 1"))
    assert Repository((repository,), config_name="small").plan("m").config.max_batch_size == 1
    assert Repository((repository,), config_name="large").plan("m").config.max_batch_size == 4


def test_without_auto_complete(repository: Path) -> None:
    write_model(repository, "m")
    settings = {"": {"a": "1"}, "echo": {"b": "2"}}
    plan = Repository((repository,), auto_complete=False, backend_settings=settings).plan("m")
    assert not plan.contexts[0].auto_complete
    assert plan.contexts[0].backend_config == {"a": "1", "b": "2"}
    (repository / "m" / "config.pbtxt").unlink()
    with pytest.raises(TritiumError, match="is missing"):
        Repository((repository,), auto_complete=False).plan("m")
