"""Reloads of a model on a GPU: beside the old one where both fit, in its place where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.serving.support import serving
from tests.tiny import make_checkpoint
from tritium.backends.llm import LlmBackend
from tritium.serving.memory import free
from tritium.serving.server import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CONFIG = 'backend: "tritium" max_batch_size: %d\nparameters { key: "kv_cache_bytes" value { string_value: "%d" } }\n'


def backend(server: Server) -> LlmBackend:
    found = server._catalog.find("m", "").text_backend()
    assert isinstance(found, LlmBackend)
    return found


@pytest.mark.parametrize(("share", "path"), [(0.2, "loaded beside"), (0.6, "drained, then loaded")])
async def test_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float, path: str) -> None:
    caplog.set_level("INFO")
    kv_bytes = int(torch.cuda.mem_get_info(0)[0] * share)
    make_checkpoint(tmp_path / "models" / "m" / "1")
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG % (4, kv_bytes))
    async with serving(tmp_path / "models", control="explicit", load_models=["m"]) as server:
        pid = backend(server)._engines[0].pid
        need = await backend(server).footprint(backend(server).context)
        (gpu,) = need.gpus
        assert need.gpus[gpu] >= kv_bytes and not need.host
        said = (await free([gpu])).gpus[gpu]
        assert abs(said - torch.cuda.mem_get_info(0)[0]) < 2 << 30
        (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG % (5, kv_bytes))
        await server.load("m")
        assert backend(server)._engines[0].pid not in (None, pid)
        assert backend(server).engine_info().max_rows == 5
    assert any(record.getMessage().startswith(path) for record in caplog.records)
