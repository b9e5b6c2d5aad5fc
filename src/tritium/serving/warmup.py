"""Requests that run before a model is ready, as ``model_warmup`` describes them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tritium.backends.base import Backend, Timing
from tritium.backends.config import ModelConfig, SequenceBatching, WarmupInput, WarmupSample
from tritium.errors import TritiumError
from tritium.serving.batch import zeros
from tritium.serving.fingerprint import WARMUP_FOLDER
from tritium.serving.state import Teller, read_tensor
from tritium.serving.stats import ModelStats
from tritium.types import DType, InferRequest, SequenceRef, Tensor


def requests_of(config: ModelConfig, sample: WarmupSample, version: str, folder: Path | None) -> list[InferRequest]:
    """The requests of one run of a sample: ``batch_size`` of one inference each.

    Args:
        folder: of the model, for files and initial states.

    Raises:
        TritiumError: INVALID_ARGUMENT naming a file that is missing or has the wrong size.
    """
    front = (1,) if sample.batch_size > 0 else ()
    inputs = {one.name: _tensor(one, (*front, *one.dims), folder) for one in sample.inputs}
    sequence: SequenceRef | None = None
    if isinstance(config.batching, SequenceBatching):
        sequence = SequenceRef(1, start=True, end=True)
        inputs = {**_told(config, config.batching, sequence, folder), **inputs}
    return [
        InferRequest(
            model=config.name,
            version=version,
            id=f"warmup {sample.name}",
            inputs=dict(inputs),
            outputs=[],
            arrived_ns=time.monotonic_ns(),
            sequence=sequence,
        )
        for _ in range(max(1, sample.batch_size))
    ]


async def through(backend: Backend, config: ModelConfig, version: str, folder: Path | None, stats: ModelStats) -> None:
    """Runs the samples through a backend that schedules itself; they count like any other request, as in Triton.

    Raises:
        TritiumError: what a sample failed with.
    """
    for sample in config.warmup:
        for _ in range(sample.count):
            try:
                for request in requests_of(config, sample, version, folder):
                    timing = Timing()
                    async for answer in backend.stream(request, timing):
                        if answer.error is not None:
                            raise answer.error
                    stats.succeeded(1, time.monotonic_ns() - request.arrived_ns, timing)
            except TritiumError as error:
                raise failed(sample, error) from error


def failed(sample: WarmupSample, error: TritiumError) -> TritiumError:
    """What a load fails with whose warm-up did."""
    return TritiumError(error.code, f"failed to run warmup sample '{sample.name}': {error.message}")


def _told(
    config: ModelConfig, batching: SequenceBatching, sequence: SequenceRef, folder: Path | None
) -> dict[str, Tensor]:
    teller = Teller(config, batching, folder)
    try:
        return teller.inputs(sequence, teller.initial())
    except TritiumError:
        # A model that wants a text for the sequence.
        return teller.inputs(SequenceRef("w" * 128, start=True, end=True), teller.initial())


def _tensor(one: WarmupInput, shape: tuple[int, ...], folder: Path | None) -> Tensor:
    if one.source == "file":
        return read_tensor(one.name, one.dtype, shape, folder, WARMUP_FOLDER, one.file)
    # As in Triton, texts are empty also where random ones are asked for.
    if one.source == "zero" or one.dtype is DType.BYTES:
        return zeros(one.name, one.dtype, shape)
    return _random(one, shape)


def _random(one: WarmupInput, shape: tuple[int, ...]) -> Tensor:
    generator = np.random.default_rng()
    kind = one.dtype.numpy.kind
    if one.dtype is DType.BF16:
        # The upper halves of float32 values.
        array = (generator.random(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif kind == "f":
        array = generator.random(shape).astype(one.dtype.numpy)
    elif kind == "b":
        array = generator.integers(0, 2, shape).astype(np.bool_)
    else:
        limits = np.iinfo(one.dtype.numpy)
        array = generator.integers(limits.min, limits.max, shape, dtype=one.dtype.numpy, endpoint=True)
    return Tensor.from_numpy(one.name, array, one.dtype)
