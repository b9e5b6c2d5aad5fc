"""How the C++ library is chosen, built and refused."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tritium.llm.kernels import cpu, ops
from tritium.llm.kernels.cpu import binding, build


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        assert ops.choose("cpu", False).startswith("cpu (") and ops.notices() == []
        assert ops.choose("cuda", False) == "torch"
        assert ops.choose("cuda", True) == "reference"
        monkeypatch.setattr(cpu, "load", lambda: "no library today")
        assert ops.choose("cpu", False) == "torch" and ops.notices() == ["no library today"]
        assert ops.choose("cpu", True) == "reference"
        with pytest.raises(ValueError, match="'nothing'"):
            ops.use("nothing")
    finally:
        monkeypatch.undo()
        ops.choose("cpu", False)


def test_one_openmp_runtime() -> None:
    """The library shares torch's threads; two runtimes would fight for the cores."""
    code = (
        "import torch; from tritium.llm.kernels import cpu; cpu.load();"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the sources and of the library that the package has of them."""
    here = binding.FOLDER
    library = cpu.load()
    if isinstance(library, str):
        pytest.skip(library)
    for name in (*build.SOURCES, *build.HEADERS, build.library_path(here, library.isa).name):
        shutil.copy(here / name, tmp_path / name)
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    return tmp_path


def fresh(**options: bool) -> cpu.CpuKernels | str:
    return binding.load.__wrapped__(**options)


def test_no_library_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "cpu_flags", frozenset)
    assert "lacks AVX2" in str(fresh())


def test_a_library_of_other_sources_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert isinstance(fresh(), cpu.CpuKernels)
    with (folder / "tiles.h").open("a") as source:
        source.write("// changed\n")
    assert "no g++ found" in str(fresh()) and "run on torch" in str(fresh())
    assert "is missing" in str(fresh(compile=False))


def test_a_library_of_other_flags_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    assert "is missing" in str(fresh(compile=False))


@pytest.mark.parametrize(("damage", "said"), [(bytes, "other sources"), (lambda data: b"not a library", "do not load")])
def test_a_renamed_or_broken_library_is_refused(folder: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    (path,) = folder.glob("*.so")
    with (folder / "tiles.h").open("a") as source:
        source.write(f"// changed: {said}\n")
    build.library_path(folder, path.name.split("_")[1].split(".")[0]).write_bytes(damage(path.read_bytes()))
    assert said in str(fresh())


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_changed_sources_are_compiled_when_they_are_needed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (old,) = folder.glob("*.so")
    with (folder / "tiles.h").open("a") as source:
        source.write("// changed\n")
    with caplog.at_level("INFO", "tritium.engine"):
        assert isinstance(fresh(), cpu.CpuKernels)
        assert isinstance(fresh(), cpu.CpuKernels)
    (new,) = folder.glob("*.so")
    assert new != old
    assert [r.message for r in caplog.records] == [
        "the C++ kernels of these sources are not built, compiling them",
        "the C++ kernels are compiled",
    ]


def test_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build(tmp_path) == ([], build.build(tmp_path)[1])
    assert f"{sys.executable} -m tritium.llm.kernels.cpu" in build.build(tmp_path)[1]
    for source in (*build.SOURCES, *build.HEADERS):
        (tmp_path / source).write_text("this is not C++")
    monkeypatch.setenv("CXX", "g++")
    libraries, problem = build.build(tmp_path)
    assert libraries == [] and "failed for" in problem
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".cpp", ".h")]


def test_make_clean_takes_the_libraries() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(["make", "-n", "clean"], cwd=root, capture_output=True, text=True, check=True)
    pattern = re.search(r"rm -f (src/\S+)", done.stdout)
    assert pattern is not None
    built = build.library_path(root / "src/tritium/llm/kernels/cpu", "avx2")
    assert fnmatch(str(built.relative_to(root)), pattern[1])


def test_batch_struct_is_all_words() -> None:
    assert ctypes.sizeof(binding.Batch) == 8 * len(binding.Batch._fields_)
