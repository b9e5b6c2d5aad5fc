"""Compiles the C++ kernels with the system's g++, once per instruction set. Standard library only.

``hatch_build.py`` calls it at install; ``binding.load`` when the library of the present sources is missing;
``python -m tritium.llm.kernels.cpu`` calls it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Newest first: what `-march` and its extras need of /proc/cpuinfo.
ISAS: dict[str, tuple[list[str], frozenset[str]]] = {
    "avx512": (
        ["-march=x86-64-v4", "-mavx512bf16"],
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx2", "fma", "f16c"}),
    ),
    "avx2": (["-march=x86-64-v3"], frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
}
# GCC 12 takes the "undefined" operands of its own AVX-512 headers for a mistake.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",
]
SOURCES = ("attention.cpp", "fused.cpp", "logits.cpp", "sampling.cpp")
HEADERS = ("batch.h", "tiles.h", "vector.h")
COMPILE_LIMIT_S = 300


def library_path(folder: Path, isa: str) -> Path:
    """Where the library of one instruction set lies, when it was built from the present sources.

    The name holds their hash, so that a library of other sources or other flags is never even looked at.
    """
    return folder / f"libtritium_{isa}.{source_hash(folder, isa)}.so"


def source_hash(folder: Path, isa: str) -> str:
    """Names the sources and the flags that a library is built from."""
    digest = hashlib.blake2b(" ".join([*FLAGS, *ISAS[isa][0]]).encode(), digest_size=8)
    for name in (*SOURCES, *HEADERS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def build(folder: Path, isas: Iterable[str] = ISAS) -> tuple[list[Path], str]:
    """Compiles ``folder``'s sources for these instruction sets, beside them; libraries of other sources go.

    Returns:
        The libraries, and why there is none (empty when all is well). Never raises for a missing or
        failing compiler: the ops then run on torch.
    """
    if os.uname().machine not in ("x86_64", "amd64"):
        return [], f"the C++ kernels are written for x86-64, not {os.uname().machine}"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        again = shlex.join([sys.executable or "python", "-m", "tritium.llm.kernels.cpu"])
        return [], f"no g++ found; install it (apt-get install g++), then run: {again}"
    if not os.access(folder, os.W_OK):
        return [], f"the folder of the sources cannot be written ({folder})"
    built: list[Path] = []
    with _alone(folder):
        for isa in isas:
            problem = _compile(folder, isa, compiler)
            if problem:
                return built, problem
            built.append(library_path(folder, isa))
    return built, ""


def _compile(folder: Path, isa: str, compiler: str) -> str:
    """Compiles one library unless it is there; "", or why that failed."""
    target = library_path(folder, isa)
    if target.exists():  # somebody else was faster
        return ""
    partial = target.with_suffix(f".{os.getpid()}")
    sources = [str(folder / name) for name in SOURCES]
    macro = f"-DSOURCE_HASH={source_hash(folder, isa)}"
    try:
        command = [compiler, *FLAGS, *ISAS[isa][0], macro, *sources, "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        if done.returncode != 0:
            return f"{compiler} failed for {isa}: {done.stderr.strip()[-2000:]}"
        partial.replace(target)  # whole or not at all
    except subprocess.TimeoutExpired:
        return f"{compiler} took more than {COMPILE_LIMIT_S} s"
    finally:
        partial.unlink(missing_ok=True)
    for old in folder.glob(f"libtritium_{isa}.*so"):
        if old != target:
            old.unlink(missing_ok=True)  # a process that has it mapped keeps it
    return ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder: engines that start side by side compile once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
