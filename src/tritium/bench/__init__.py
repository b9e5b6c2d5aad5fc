"""Benchmarks: the workloads, and what all of them share. See ``load`` (a server) and ``engine`` (none)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

WorkloadName = Literal["A", "B", "C", "D", "E"]


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload: exactly ``output_len`` tokens are wanted, the end token is ignored.

    Attributes:
        start_s: when it is sent, in seconds from the beginning.
    """

    prompt: list[int]
    output_len: int
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """How one request went. Times are seconds from the moment it was sent.

    Attributes:
        token_times_s: arrival of each piece, with the number of its tokens.
        error: why it failed; "" when it did not.
    """

    prompt_tokens: int
    output_tokens: int
    token_times_s: list[tuple[float, int]]
    elapsed_s: float
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_times_s[0][0] if self.token_times_s else self.elapsed_s


def workload(name: WorkloadName, *, request_rate: float = 0.0, seed: int = 0) -> list[Item]:
    """The requests of a workload, as token ids of SmolLM2's tokenizer.

    Args:
        request_rate: arrivals per second (Poisson process); 0 for all at once.
    """
    data = _read("c.json" if name == "C" else "abde.json")
    entry: Any = data if name == "C" else data[name]
    requests = entry.get("requests", [entry])
    draw = random.Random(seed)
    at, items = 0.0, list[Item]()
    for request in requests:
        items.append(Item(request["prompt_ids"], request["output_len"], at))
        if request_rate > 0:
            at += draw.expovariate(request_rate)
    return items


def _read(name: str) -> Any:
    return json.loads((files("tritium.bench") / "workloads" / name).read_text(encoding="utf-8"))
