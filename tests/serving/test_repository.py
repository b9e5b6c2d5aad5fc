from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fakes import ECHO, write_model
from tests.serving.test_config import LLAMA, made
from tritium.errors import Code, TritiumError
from tritium.serving import fingerprint as module
from tritium.serving.repository import Repository, choose, versions_of


def refused(repository: Path, name: str, override: str | None = None) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        Repository([repository]).plan(name, override)
    return caught.value


def test_what_a_folder_holds(repository: Path):
    write_model(repository, "b", versions=("1", "3", "10"))
    write_model(repository, "a")
    (repository / ".hidden").mkdir()
    (repository / "file").touch()
    (repository / "bell\a").mkdir()
    assert Repository([repository]).names() == ["a", "b"]
    plan = Repository([repository], {"dtype": "float32"}).plan("b")
    (context,) = plan.contexts
    assert (context.name, context.version) == ("b", "10")
    assert (context.model_folder, context.version_folder) == (repository / "b", repository / "b" / "10")
    assert context.config is plan.config and context.settings == {"dtype": "float32"}


def test_versions_are_positive_integers_without_zeros_in_front(repository: Path):
    folder = write_model(repository, "m", versions=("2", "10", "01", "0", "-1", "1.5", "x", "٣", "9" * 40))
    (folder / "7").touch()
    assert versions_of(folder) == [2, 10]


def test_policies():
    there = [1, 2, 3, 10]
    assert choose(there, made("")) == [10]
    assert choose(there, made("version_policy { latest { num_versions: 2 } }")) == [3, 10]
    assert choose(there, made("version_policy { all { } }")) == there
    assert choose(there, made("version_policy { specific { versions: [10, 2, 5] } }")) == [2, 10]


def test_no_version_is_left(repository: Path):
    write_model(repository, "m", versions=())
    error = refused(repository, "m")
    assert error.code is Code.INVALID_ARGUMENT
    assert "at least one version must be available under the version policy of model 'm'" in error.message


def test_a_configuration_that_is_wrong(repository: Path):
    write_model(repository, "m", 'backend: "echo"\nno_such_field: 3')
    error = refused(repository, "m")
    assert error.code is Code.INTERNAL
    assert error.message.startswith("failed to load 'm', failed to poll from model repository: m/config.pbtxt:2:1: ")
    write_model(repository, "m", 'name: "other"')
    assert "name is 'other', expected 'm'" in refused(repository, "m").message


def test_names_are_looked_up_and_never_joined(repository: Path):
    write_model(repository.parent, "outside")
    for name in ("outside", "../outside", "", ".", "..", "/", "m\0", "a/b", "x" * 5000):
        error = refused(repository, name)
        assert error.code is Code.INTERNAL
        assert error.message.startswith(f"failed to load '{name}', failed to poll from model repository")


def test_the_same_name_in_two_repositories(repository: Path, tmp_path: Path):
    write_model(repository, "m")
    write_model(tmp_path / "more", "m")
    write_model(tmp_path / "more", "n")
    both = Repository([repository, tmp_path / "more"])
    assert both.names() == ["m", "n"]
    with pytest.raises(TritiumError, match="2 repositories have a folder of that name"):
        both.find("m")
    assert both.find("n").folder == tmp_path / "more" / "n"


def test_a_repository_that_is_not_there(tmp_path: Path):
    gone = Repository([tmp_path / "gone"])
    assert gone.names() == []
    with pytest.raises(TritiumError, match="gone' is not a folder"):
        gone.check()


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        ("1/model.gguf", "tritium"),
        ("1/model.safetensors", "tritium"),
        ("1/model.safetensors.index.json", "tritium"),
        ("1/pytorch_model-1.bin", "tritium"),
        ("1/model.json", "vllm"),
        ("1/checkpoint/model.safetensors", "tritium"),
    ],
)
def test_without_a_backend_the_files_tell(repository: Path, path: str, backend: str):
    write_model(repository, "m", None)
    file = repository / "m" / path
    file.parent.mkdir(exist_ok=True)
    file.touch()
    assert Repository([repository]).plan("m").config.backend == backend


def test_files_that_tell_nothing(repository: Path):
    folder = write_model(repository, "m", "")
    assert Repository([repository]).plan("m").config.backend == ""
    (folder / "1" / "folder").mkdir()
    assert Repository([repository]).plan("m").config.backend == ""
    write_model(repository, "llama-7b-trtllm", LLAMA)
    assert Repository([repository]).plan("llama-7b-trtllm").config.backend == ""


def test_triton_config_of_the_version_wins(repository: Path):
    folder = write_model(repository, "m", ECHO + "version_policy { all { } }", versions=("1", "2"))
    (folder / "triton_config.json").write_text('{"temperature": 0.7, "top_k": 50}')
    (folder / "2" / "triton_config.json").write_text('{"top_k": 5}')
    first, second = Repository([repository]).plan("m").contexts
    assert first.triton_config == {"temperature": 0.7, "top_k": 50}
    assert second.triton_config == {"temperature": 0.7, "top_k": 5}


@pytest.mark.parametrize("text", ["[1]", "{", "", '{"a": NaN}', '{"a":' * 100_000, "\udcff"])
def test_a_triton_config_that_is_no_object(repository: Path, text: str):
    folder = write_model(repository, "m")
    (folder / "triton_config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "m/triton_config.json is" in refused(repository, "m").message


def test_a_configuration_in_the_request_takes_the_place_of_the_file(repository: Path):
    write_model(repository, "m", "no_such_field: 3")
    plan = Repository([repository]).plan("m", '{"backend": "echo", "max_batch_size": 5}')
    assert (plan.config.backend, plan.config.max_batch_size) == ("echo", 5)
    assert "config: " in refused(repository, "m", "{").message


def test_fingerprints_follow_the_files(repository: Path):
    folder = write_model(repository, "m")
    both = Repository([repository])
    first = both.plan("m").fingerprint
    assert both.plan("m").fingerprint == first
    (folder / "1" / "weights").write_bytes(b"1")
    second = both.plan("m").fingerprint
    os.utime(folder / "1" / "weights", (1, 1))
    third = both.plan("m").fingerprint
    (folder / "1" / "gone").symlink_to("nowhere")
    assert len({first, second, third}) == 3
    assert both.plan("m").fingerprint == third


def test_folders_with_too_many_files(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_FILES", 2)
    folder = write_model(repository, "m")
    (folder / "1" / "a").touch()
    Repository([repository]).plan("m")
    (folder / "1" / "b").touch()
    assert "more than 2 files" in refused(repository, "m").message


@given(st.lists(st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20), max_size=8))
@settings(max_examples=50, deadline=None)
def test_any_listing_can_be_read(tmp_path_factory: pytest.TempPathFactory, names: list[str]):
    folder = tmp_path_factory.mktemp("listing")
    for name in names:
        if name not in (".", ".."):
            (folder / name).mkdir(exist_ok=True)
    versions = versions_of(folder)
    assert versions == sorted(set(versions))
    assert all(str(v) in names and v > 0 for v in versions)
    for name in Repository([folder]).names():
        assert name in names
        with pytest.raises(TritiumError, match="at least one version"):
            Repository([folder]).plan(name)
