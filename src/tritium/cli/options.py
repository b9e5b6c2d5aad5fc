"""What single commands read besides the settings of server and engine: frozen dataclasses, one flag a field."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn; what is not given is left to the model's own defaults.

    Attributes:
        max_tokens: most tokens of an answer.
        temperature: 0 always takes the likeliest token.
        top_p: share of the probability that candidates must cover.
        top_k: number of candidates; 0 for all.
        min_p: least probability of a candidate, as a share of the best one's.
        repetition_penalty: above 1 makes repetition less likely.
        seed: makes the draws repeatable.
        stop: text that ends the answer; may be repeated.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def given(self) -> dict[str, Any]:
        """What was said, as ``llm.params.make_params`` takes it."""
        values: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None
        }
        values["stop"] = list(self.stop)
        return values


@dataclass(frozen=True, slots=True)
class Chat:
    """Which model to talk with, and how.

    Attributes:
        model: checkpoint folder, GGUF file or installed model name.
        system: instructions that stand before the conversation.
        stats: print tokens per second after each answer.
    """

    model: str = "smollm2"
    system: str | None = None
    stats: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """What to continue, and with which model.

    Attributes:
        prompt: the text to continue; ``-`` reads standard input.
        model: checkpoint folder, GGUF file or installed model name.
        chat: put the prompt through the model's chat template, as the message of a user.
    """

    prompt: str
    model: str = "smollm2"
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Models:
    """Where to look for models.

    Attributes:
        model_repository: folders of models in Triton's layout; may be repeated.
        json: print JSON.
    """

    model_repository: tuple[str, ...] = ()
    json: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """How to print.

    Attributes:
        json: print JSON.
    """

    json: bool = False


@dataclass(frozen=True, slots=True)
class Convert:
    """What to convert.

    Attributes:
        source: checkpoint folder with ``.bin`` shards, or a GGUF file or its installed name.
        out: folder to write; must not exist, or be empty.
        dtype: type of the written weights; auto keeps what the source has (float16 out of quantized GGUF).
    """

    source: str
    out: str
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"


@dataclass(frozen=True, slots=True)
class Doctor:
    """What to check.

    Attributes:
        model: model that should fit into memory here.
        json: print JSON.
    """

    model: str | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure, and where.

    Attributes:
        workload: A one stream, 128 tokens in and 128 out; B one prompt of 1024; C 64 requests, 32..256 in and
            out; D 32 requests that share a prefix of 512; E process start to first token; kv use of the KV cache.
        model: checkpoint folder, GGUF file or installed model name; with --url the name that the server serves.
        url: measure this server (its OpenAI route /v1/completions) instead of an engine of our own.
        runs: how often; the median run is reported.
        request_rate: requests per second, in a Poisson process; 0 sends all at once.
        max_concurrency: requests in flight at most; 0 for no limit.
        kv_max_length: length for which contiguous preallocation reserves, in tokens (workload kv).
        output: file for the JSON result.
        json: print the JSON result instead of the table.
    """

    workload: Literal["A", "B", "C", "D", "E", "kv"]
    model: str = "smollm2"
    url: str | None = None
    runs: Positive = 3
    request_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_concurrency: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_max_length: Positive = 2048
    output: str | None = None
    json: bool = False
