"""The text at the start."""

from __future__ import annotations

import msgspec

from tests.serving.fakes import engine_info
from tritium.frontends.banner import for_each_model, memory, own_settings, with_facts
from tritium.llm.types import EngineStats
from tritium.serving.views import EngineView
from tritium.settings import Effective


def test_what_became_of_what_was_open() -> None:
    given = {
        "host": Effective("0.0.0.0", "TRITIUM_HOST"),
        "grpc_host": Effective(None, "default"),
        "http_port": Effective(0, "command line (--port)"),
        "grpc_port": Effective(8001, "default"),
        "served_model_name": Effective((), "default"),
        "dtype": Effective("auto", "default"),
        "max_rows": Effective(64, "default"),
    }
    found = with_facts(given, {"http": "0.0.0.0:4711", "grpc": "[::1]:8001"}, ("smollm2", "org/Smol"))
    assert found["grpc_host"] == Effective("0.0.0.0", "from host")
    assert found["http_port"] == Effective(4711, "machine: 0 by command line (--port)")
    assert found["grpc_port"] == given["grpc_port"]
    assert found["served_model_name"] == Effective(("smollm2", "org/Smol"), "from model")
    assert for_each_model(found)["dtype"] == Effective("auto", "each model")
    assert for_each_model(found)["max_rows"] == given["max_rows"]


def test_several_engines_are_summed_up() -> None:
    info = engine_info()
    budget = msgspec.structs.replace(info.budget, weights_bytes=3 << 20, activations_bytes=1 << 20, kv_bytes=4 << 20)
    info = msgspec.structs.replace(info, budget=budget)
    one = EngineView("m", "1", [EngineStats()], [info])
    assert not any("engines" in line for line in memory(one))
    two = EngineView("m", "1", [EngineStats()] * 2, [info, info])
    (line,) = (line for line in memory(two) if line.startswith("    all "))
    assert line.split(maxsplit=3)[:3] == ["all", "16.0", "MiB"]
    assert line.endswith("  2 engines: weights 6.0 MiB, activations 2.0 MiB, KV 8.0 MiB")
    assert memory(two)[0] == "  memory of m (version 1, llama; the first of its engines)"


def test_own_settings() -> None:
    assert own_settings("m", "1", {}) == []
    lines = own_settings("m", "2", {"dtype": Effective("float16", "model.json: dtype")})
    assert lines[1] == "  settings of m (version 2), where they are not those above"
    assert lines[-1].split() == ["dtype", "float16", "model.json:", "dtype"]
