"""The size gates: a file has at most 400 lines, a function at most 50 (docstring included)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE = 400
MAX_FUNCTION = 50
FILES = sorted(
    path
    for folder in ("src", "tests", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if "conformance" not in path.parts
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    count = len(text.splitlines())
    assert count <= MAX_FILE, f"{count} lines, at most {MAX_FILE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} at line {node.lineno}: {length} lines, at most {MAX_FUNCTION}"


def test_there_is_something_to_measure() -> None:
    assert len(FILES) > 20
