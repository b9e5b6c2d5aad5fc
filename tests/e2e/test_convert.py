"""``tritium convert`` of a GGUF file: the folder alone answers as the file does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.e2e.live import LiveServer
from tests.tiny_gguf import make_gguf

CHAT = {"model": "m", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "介绍一下 x"}]}
TEXT = {"model": "m", "max_tokens": 12, "temperature": 0, "prompt": "The quick brown fox", "logprobs": 0}


def answers(model: Path, log: Path) -> list[object]:
    """Greedy answers to a text and to a conversation, without what differs from request to request."""
    with LiveServer([str(model), "--served-model-name=m", "--dtype=float32"], log) as server:
        found: list[object] = []
        for route, body in (("completions", TEXT), ("chat/completions", CHAT)):
            answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found += [answer.json()["choices"][0], answer.json()["usage"]]
        return found


def test_a_converted_gguf_file_is_served_alone(tmp_path: Path) -> None:
    source, out = make_gguf(tmp_path / "m.gguf", quant="Q8_0"), tmp_path / "out"
    # Quantized weights are products of float16 scales and small integers: only float32 holds them exactly.
    command = [sys.executable, "-m", "tritium", "convert", str(source), str(out), "--dtype=float32"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(Path(line) for line in ran.stdout.splitlines()) == sorted(out.iterdir())
    before = answers(source, tmp_path / "before.log")
    source.unlink()
    after = answers(out, tmp_path / "after.log")
    assert after == before
