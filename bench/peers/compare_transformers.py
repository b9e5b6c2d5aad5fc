"""Workloads A, C and D on transformers ``generate`` and on Tritium, alternately in one run; prints the ratios.

transformers gets what is best for it: BF16 weights, static batches of 16 sorted by output length (so that
little of a batch is padding), its own SDPA attention. Both read the same weights: the GGUF file, dequantized.
Each round runs one side right after the other, so that a noisy neighbour meets both. transformers runs in a thread:
the clients of our idle engines must be able to hear them.

    python bench/peers/compare_transformers.py [--model smollm2] [--runs 3] [--workloads A,C,D] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tritium.bench import Item, Sample, workload
from tritium.bench.engine import run_once
from tritium.llm.checkpoint import read_metadata
from tritium.llm.client import EngineClient
from tritium.llm.config import EngineConfig
from tritium.llm.models.convert import convert
from tritium.llm.names import find_model
from tritium.llm.tokenizer import load_tokenizer

PAD = 2


class Clock:
    """A transformers streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """The peer."""

    def __init__(self, path: Path, threads: int, batch: int) -> None:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as scratch:
            folder = path
            if path.suffix == ".gguf":  # transformers reads those only with accelerate installed
                folder = Path(scratch) / "model"
                convert(path, folder, dtype="bfloat16")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()
        self.batch = batch

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], count: int, clock: Clock | None = None) -> None:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), PAD)
        mask = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        config = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=PAD, use_cache=True
        )
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=clock)
        assert out.shape[1] == longest + count

    def run(self, items: list[Item]) -> dict[str, float]:
        clock = Clock() if len(items) == 1 else None
        ordered = sorted(items, key=lambda item: item.output_len)
        begun = time.perf_counter()
        for first in range(0, len(ordered), self.batch):
            part = ordered[first : first + self.batch]
            self.generate([i.prompt for i in part], max(i.output_len for i in part), clock)
        wall = time.perf_counter() - begun
        result = {"wall_s": wall, "output_tokens_per_s": sum(i.output_len for i in items) / wall}
        if clock is not None:  # the first call of put is the prompt
            first, last = clock.times[1], clock.times[-1]
            result["ttft_ms"] = 1e3 * (first - begun)
            if last > first:  # B has one token
                result["decode_tokens_per_s"] = (len(clock.times) - 2) / (last - first)
        return result


def figures(samples: list[Sample], wall: float) -> dict[str, float]:
    failed = [sample.error for sample in samples if sample.error]
    assert not failed, failed
    result = {"wall_s": wall, "output_tokens_per_s": sum(s.output_tokens for s in samples) / wall}
    if len(samples) == 1:
        times = samples[0].token_times_s
        rest = times[-1][0] - times[0][0]
        result["ttft_ms"] = 1e3 * times[0][0]
        if rest > 0:
            result["decode_tokens_per_s"] = (samples[0].output_tokens - 1) / rest
    return result


async def compare(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    peer = Transformers(path, arguments.threads, arguments.batch)
    tokenizer = load_tokenizer(read_metadata(path))
    configs = {"tritium": EngineConfig(model=str(path), dtype="bfloat16", threads=arguments.threads)}
    if "D" in arguments.workloads:
        without = EngineConfig(model=str(path), dtype="bfloat16", threads=arguments.threads, prefix_cache=False)
        configs["tritium, prefix cache off"] = without
    clients = {name: EngineClient(config, tokenizer, name=name) for name, config in configs.items()}
    for client in clients.values():
        await client.start()
    try:
        return {name: await rounds(name, arguments.runs, peer, clients) for name in arguments.workloads}
    finally:
        for client in clients.values():
            await client.stop()


async def rounds(name: Any, runs: int, peer: Transformers, clients: dict[str, EngineClient]) -> dict[str, Any]:
    items = workload(name)
    found: dict[str, list[dict[str, float]]] = {}
    warm = [Item(items[0].prompt[:16], 8)]
    await asyncio.to_thread(peer.run, warm)
    nothing: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    for number in range(runs):
        found.setdefault("transformers", []).append(await asyncio.to_thread(peer.run, items))
        for label, client in clients.items():
            if label == "tritium" or name == "D":
                samples, wall = await run_once(client, items, f"{name}-{number}", 0, nothing)
                found.setdefault(label, []).append(figures(samples, wall))
        print(name, number, {k: {m: round(x, 2) for m, x in v[-1].items()} for k, v in found.items()}, flush=True)
    medians = {
        label: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for label, results in found.items()
    }
    return {"runs": found, "median": medians, "ratios": ratios(medians)}


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    ours, theirs = medians["tritium"], medians["transformers"]
    result = {
        f"{key}, tritium over transformers": ours[key] / theirs[key] for key in theirs if key.endswith("tokens_per_s")
    }
    without = medians.get("tritium, prefix cache off")
    if without is not None:
        result["speed-up by the prefix cache"] = without["wall_s"] / ours["wall_s"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=16, help="static batch size of transformers")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["A", "C", "D"])
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    result = asyncio.run(compare(arguments, find_model(arguments.model)))
    for name, facts in result.items():
        print(f"\nworkload {name}, median of {arguments.runs}")
        for label, figures_ in facts["median"].items():
            print(f"  {label:<28}" + "  ".join(f"{key} {value:.1f}" for key, value in figures_.items()))
        for label, value in facts["ratios"].items():
            print(f"  {label}: {value:.2f}x")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
