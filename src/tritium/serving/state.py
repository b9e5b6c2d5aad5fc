"""What the server tells a model of its sequence with each request: control tensors, and the state it keeps for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tritium.backends.config import ANY, Control, InitialState, ModelConfig, SequenceBatching, StateSpec
from tritium.errors import TritiumError, invalid
from tritium.serving.batch import zeros
from tritium.types import DType, InferRequest, InferResponse, SequenceRef, Tensor

INITIAL_FOLDER = "initial_state"
# Triton 2.51 gives a text correlation id to a model as a buffer of this many bytes and refuses what does not fill
# it; a model's parameter of this name with the value "exact" gives the text as it is, whatever its length.
TEXT_ID = "text_correlation_id"
TEXT_ID_BYTES = 128

States = dict[str, Tensor]


class Teller:
    """Adds to a request what its model is told of the sequence, and takes the state out of the answer.

    Args:
        folder: of the model, for the files of initial states.

    Raises:
        TritiumError: INVALID_ARGUMENT when a file is missing or has the wrong size.
    """

    def __init__(self, config: ModelConfig, batching: SequenceBatching, folder: Path | None) -> None:
        self._front = (1,) if config.max_batch_size > 0 else ()
        self._controls = batching.controls
        self._specs = batching.states
        self._exact = config.parameters.get(TEXT_ID) == "exact"
        self._initial = {state.input: _initial(state, self._front, folder) for state in batching.states}
        self._outputs = {state.output: state for state in batching.states}
        self._rendered = {
            (control.kind, value): self._tensor(control, control.values[value])
            for control in batching.controls
            if control.kind != "corrid"
            for value in (False, True)
        }
        self.has_ready = any(control.kind == "ready" for control in batching.controls)

    def initial(self) -> States:
        """The state of a sequence that begins."""
        return dict(self._initial)

    def inputs(self, sequence: SequenceRef, states: Mapping[str, Tensor], *, ready: bool = True) -> dict[str, Tensor]:
        """The tensors that a request of ``sequence`` gets on top of its own.

        Raises:
            TritiumError: INVALID_ARGUMENT when the id is not of the type that the model has declared.
        """
        told = {"start": sequence.start, "end": sequence.end, "ready": ready}
        found: dict[str, Tensor] = {}
        for control in self._controls:
            if control.kind == "corrid":
                found[control.name] = self._correlation(control, sequence.id)
            else:
                found[control.name] = self._rendered[control.kind, told[control.kind]]
        found.update(states)
        return found

    def take(self, response: InferResponse, states: States) -> None:
        """Moves the state outputs of an answer into ``states``, copied: their buffers belong to the answer."""
        if not self._outputs:
            return
        kept: list[Tensor] = []
        for tensor in response.outputs:
            state = self._outputs.get(tensor.name)
            if state is None:
                kept.append(tensor)
            else:
                states[state.input] = Tensor(state.input, tensor.dtype, tensor.shape, memoryview(bytes(tensor.data)))
        response.outputs = kept

    def filler(self, like: InferRequest) -> InferRequest:
        """A request that only fills a place and is not ready: zeros in the shapes of ``like``."""
        inputs = {name: zeros(name, tensor.dtype, tensor.shape) for name, tensor in like.inputs.items()}
        for control in self._controls:
            if control.kind == "corrid":
                inputs[control.name] = zeros(control.name, control.dtype, (*self._front, 1))
            else:
                inputs[control.name] = self._rendered[control.kind, False]
        inputs.update(self._initial)
        return dataclasses.replace(like, id="", inputs=inputs, parameters={}, sequence=None, timeout_us=0, trace=None)

    def _tensor(self, control: Control, value: float) -> Tensor:
        array = np.full((*self._front, 1), value, dtype=control.dtype.numpy)
        return Tensor.from_numpy(control.name, array, control.dtype)

    def _correlation(self, control: Control, id: int | str) -> Tensor:
        if control.dtype is DType.BYTES:
            return self._text(control, id)
        if isinstance(id, str):
            raise invalid(
                f"sequence_id is the text '{id}', expected a number for the control '{control.name}' of type "
                f"{control.dtype.value}",
                param="sequence_id",
            )
        limits = np.iinfo(control.dtype.numpy)
        if not limits.min <= id <= limits.max:
            raise invalid(
                f"sequence_id is {id}, expected a value of {control.dtype.value} for the control '{control.name}'",
                param="sequence_id",
            )
        array: Any = np.full((*self._front, 1), id, dtype=control.dtype.numpy)
        return Tensor.from_numpy(control.name, array, control.dtype)

    def _text(self, control: Control, id: int | str) -> Tensor:
        content = id.encode() if isinstance(id, str) else b""
        if not content or (not self._exact and len(content) < TEXT_ID_BYTES):
            raise _as_recorded(control)
        return Tensor.from_strings(control.name, [content], (*self._front, 1))


def _as_recorded(control: Control) -> TritiumError:
    return invalid(
        f"unexpected number of string elements 2 for inference input '{control.name}', expecting 1",
        param="sequence_id",
    )


def _initial(state: StateSpec, front: tuple[int, ...], folder: Path | None) -> Tensor:
    """What a state begins with; zeros where nothing is said."""
    chosen: Sequence[InitialState] = state.initial
    first = chosen[0] if chosen else InitialState(state.input, state.dtype, state.dims)
    shape = (*front, *(1 if size == ANY else size for size in first.dims))
    if not first.file:
        return zeros(state.input, state.dtype, shape)
    return read_tensor(state.input, state.dtype, shape, folder, INITIAL_FOLDER, first.file)


def read_tensor(name: str, dtype: DType, shape: tuple[int, ...], folder: Path | None, part: str, file: str) -> Tensor:
    """A tensor whose bytes lie in ``<model>/<part>/<file>``.

    Raises:
        TritiumError: INVALID_ARGUMENT naming file and size.
    """
    shown = f"{part}/{file}"
    path = folder / part / file if folder is not None else None
    if path is None or ".." in Path(file).parts or Path(file).is_absolute() or not path.is_file():
        raise invalid(f"file '{shown}' for '{name}' is not in the folder of the model", param=name)
    tensor = Tensor(name, dtype, shape, memoryview(path.read_bytes()))
    if dtype is DType.BYTES:
        tensor.strings()
    elif tensor.data.nbytes != zeros(name, dtype, shape).data.nbytes:
        raise invalid(
            f"file '{shown}' for '{name}' has {tensor.data.nbytes} bytes, expected "
            f"{zeros(name, dtype, shape).data.nbytes} for shape {list(shape)} of {dtype.value}",
            param=name,
        )
    return tensor
