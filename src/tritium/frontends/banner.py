"""What an operator sees at the start: where, what, with which settings, in how much memory; what to try."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from tritium.observability.tables import settings_table, size
from tritium.serving.server import EngineView, Server
from tritium.settings import Effective

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MACHINE = "machine"
# What an engine finds out where nobody says it: ``llm.runner.ranks`` resolves them.
LEFT_OPEN = frozenset(("dtype", "device", "max_length", "kv_cache_bytes", "num_blocks", "threads"))


def with_facts(
    effective: Mapping[str, Effective], urls: Mapping[str, str] | None = None, names: Sequence[str] = ()
) -> dict[str, Effective]:
    """The server's settings, with what became of those that were left open.

    Args:
        urls: addresses that are listened on, by the name of the port.
        names: under which a single model is served.
    """
    found = dict(effective)
    for name in ("grpc_host", "metrics_host"):
        if name in found and found[name].value is None:
            found[name] = Effective(found["host"].value, "from host")
    for name, url in (urls or {}).items():
        port = int(url.rpartition(":")[2])
        if (given := found.get(f"{name}_port")) is not None and given.value == 0:
            found[f"{name}_port"] = Effective(port, f"{MACHINE}: 0 by {given.source}")
    if names and not found["served_model_name"].value:
        found["served_model_name"] = Effective(tuple(names), "from model")
    return found


def banner(server: Server, urls: Mapping[str, str], effective: Mapping[str, Effective], ready_s: float) -> str:
    """The whole text.

    Args:
        effective: the server's settings, ``with_facts``.
    """
    names = [entry.name for entry in server.index() if server.model_ready(entry.name)]
    lines = [f"Tritium {version('tritium')} serves {', '.join(names) or 'no model yet'}, ready in {ready_s:.1f} s", ""]
    what = {
        "http": "http://{}  (/v1 OpenAI, /v2 KServe, /metrics)",
        "grpc": "{}  (KServe v2, health, reflection)",
        "metrics": "http://{}/metrics",
    }
    lines += [f"  {name:<8} {what[name].format(url)}" for name, url in urls.items()]
    if (host := effective.get("host")) is not None and host.value in LOOPBACK:
        lines.append("  only this machine can connect; --host 0.0.0.0 listens on every address")
    lines += [f"  not loaded: {name}: {reason}" for name, reason in server.failures().items()]
    engines = server.engines()
    if (model := effective.get("model")) is not None and model.value is not None and engines:
        lines += ["", *_indented(settings_table({**effective, **engines[0].settings}))]
    else:
        lines += ["", *_indented(settings_table(for_each_model(effective)))]
        lines += [line for engine in engines for line in own_settings(engine.name, engine.version, engine.settings)]
    for engine in engines:
        lines += ["", *memory(engine)]
    if engines and "http" in urls:
        body = {"model": engines[0].name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
        lines += ["", "  try:", f"  curl http://{urls['http']}/v1/chat/completions \\"]
        lines += ["    -H 'Content-Type: application/json' \\", f"    -d '{json.dumps(body)}'"]
    return "\n".join([*lines, ""])


def for_each_model(effective: Mapping[str, Effective]) -> dict[str, Effective]:
    """The settings with those marked that each model's engine decides for itself."""
    return {
        name: Effective("auto", "each model") if name in LEFT_OPEN and e.value in (None, "auto") else e
        for name, e in effective.items()
    }


def own_settings(name: str, version: str, settings: Mapping[str, Effective]) -> list[str]:
    """What differs for one model of a repository from the table above."""
    heading = f"  settings of {name} (version {version}), where they are not those above"
    return ["", heading, *_indented(settings_table(settings), 4)] if settings else []


def memory(engine: EngineView) -> list[str]:
    """The memory budget of a model's engines: the first one in full, and all of them together."""
    info = engine.info
    budget = info.budget
    tokens = budget.num_blocks * budget.block_size
    rows = [
        ("weights", size(budget.weights_bytes), f"{info.dtype} on {info.device}: {info.dtype_reason}"),
        ("activations", size(budget.activations_bytes), f"kernels: {info.kernels}"),
        (
            "KV cache",
            size(budget.kv_bytes),
            f"{size(budget.kv_bytes_per_token)} per token: {tokens} tokens in {budget.num_blocks} blocks of "
            f"{budget.block_size}; {info.max_length} at most in a sequence, {info.max_rows} sequences at a time",
        ),
        ("margin", size(budget.margin_bytes), "left free"),
    ]
    phases = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {s:.2f} s" for name, s in info.startup.items())
    several = len(engine.infos) > 1
    which = "; the first of its engines" if several else ""
    lines = [f"  memory of {engine.name} (version {engine.version}, {info.family}{which})"]
    lines += [f"    {name:<12} {value:>10}  {about}" for name, value, about in rows]
    if several:
        budgets = [one.budget for one in engine.infos]
        parts = [sum(b.weights_bytes for b in budgets), sum(b.activations_bytes for b in budgets)]
        parts.append(sum(b.kv_bytes for b in budgets))
        words = ", ".join(
            f"{what} {size(part)}" for what, part in zip(("weights", "activations", "KV"), parts, strict=True)
        )
        lines.append(f"    {'all':<12} {size(sum(parts)):>10}  {len(budgets)} engines: {words}")
    lines.append(f"    start        {phases}")
    return lines + [f"    note         {notice}" for notice in info.notices]


def _indented(text: str, by: int = 2) -> list[str]:
    return [" " * by + line for line in text.splitlines()]
