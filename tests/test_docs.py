"""What the pages say must be so: links, flags, commands, and the tables that repeat one in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tritium.backends import BACKENDS, PLATFORMS, llm_settings, llm_tensors
from tritium.cli import COMMANDS
from tritium.llm.models import ARCHITECTURES
from tritium.llm.models.families import FAMILIES, GGUF_FAMILIES
from tritium.serving import config_checks
from tritium.settings import ALIASES, NOTICES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Flags of other programs, which the pages name as such.
FOREIGN = {"--no-deps", "--runs", "--workloads", "--check", "--help", "--config", "--ulimit"}
# Those of perf_analyzer.
FOREIGN |= {"--concurrency-range", "--request-rate-range", "--shape", "--streaming", "--input-data", "--shared-memory"}
FOREIGN |= {"--output-shared-memory-size", "--measurement-mode"}
FOREIGN |= {"--rounds", "--seconds", "--only"}
# Flags that a page says are not there.
REFUSED = {"--trace-file", "--trace-level"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def known_flags() -> set[str]:
    settings = [s for command in COMMANDS.values() for group in command.groups for s in group.settings()]
    names = {s.name.replace("_", "-") for s in settings} | set(ALIASES) | set(NOTICES)
    names |= {f"no-{s.name.replace('_', '-')}" for s in settings if s.is_bool}
    return {f"--{name}" for name in names} | FOREIGN | REFUSED


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pages
def test_named_files_are_there(page: Path) -> None:
    for name in re.findall(r"\b(?:src|tests|scripts|bench|docs)/[\w/.-]*[\w]", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pages
def test_flags_are_known(page: Path) -> None:
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))
    flags = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    assert flags - known_flags() - {"--FLAG", "--no-FLAG"} == set()


@pages
def test_commands_are_known(page: Path) -> None:
    for name in re.findall(r"(?:^|`)(?:\$ )?tritium ([a-z]+)", page.read_text(), re.MULTILINE):
        assert name in COMMANDS, f"{page.name} has 'tritium {name}'"


@pages
def test_make_targets_are_known(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("script", ["settings_page", "reference_pages"])
def test_the_pages_out_of_tables_are_current(script: str) -> None:
    command = [sys.executable, f"scripts/{script}.py", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_models_page_names_every_architecture() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert set(re.findall(r"^\| `(\w+ForCausalLM)` ", page, re.MULTILINE)) == set(FAMILIES)
    assert {family.name for family in FAMILIES.values()} == set(ARCHITECTURES)
    assert all(f"`{name}`" in page for name in GGUF_FAMILIES)
    # Whoever adds an architecture says which models that is.
    assert not re.search(r"ForCausalLM` .* \|  \|$", page, re.MULTILINE)


@pytest.mark.parametrize(
    "names",
    [
        [*BACKENDS, *PLATFORMS],
        [*llm_settings._TRTLLM_KEYS, *llm_settings._TRTLLM_IGNORED],
        [*llm_settings._VLLM_KEYS, *llm_settings._VLLM_IGNORED],
        [*llm_settings._MUST_BE_ONE, *llm_settings._PATH_KEYS],
        [*llm_tensors.STANDARD_INPUTS, *llm_tensors.STANDARD_OUTPUTS],
        [*config_checks._UNSUPPORTED, *config_checks._WITHOUT_EFFECT],
    ],
    ids=["backends", "tensorrtllm", "vllm", "parameters", "tensors", "fields"],
)
def test_the_repository_page_names_all(names: list[str]) -> None:
    page = (ROOT / "docs" / "model-repository.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_what_articles_say_is_answered_as_the_page_says() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for flag in ("--enable-inflight-batching", "--use_inflight_batching", "--use_gemm_plugin"):
        assert flag in page and flag.lstrip("-").replace("_", "-") in NOTICES
    assert REFUSED.isdisjoint(known_flags() - REFUSED - FOREIGN)
