"""Form: what requests of one kind have in common, read and checked once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritium.backends.config import ModelConfig
from tritium.serving.request_checks import check_request
from tritium.types import DType, InferRequest, RequestedOutput, Tensor

# What is kept of each kind; when there are more, all are forgotten, since then they are not alike.
MAX_KEPT = 512


class Form:
    """Requests that differ in nothing but the bytes of their tensors.

    Attributes:
        config: of the model when the form was checked; requests for another one are checked anew.
        rows: inferences in a request; 0 where its content decides whether it fits.
        asked: the request that it was made of, as its codec read it.
        answers: what its codec keeps of answers, by ``kind_of_answer``.
    """

    __slots__ = ("_inputs", "_outputs", "answers", "asked", "config", "rows")

    def __init__(self, asked: Any, config: ModelConfig, begins: Sequence[int], rows: int) -> None:
        request: InferRequest = asked.request
        self.config = config
        self.rows = rows
        self.asked = asked
        self.answers: dict[Any, Any] = {}
        self._outputs = request.outputs
        self._inputs = [
            (tensor.name, tensor.dtype, tensor.shape, begin, begin + tensor.data.nbytes)
            for tensor, begin in zip(request.inputs.values(), begins, strict=True)
        ]

    def request(self, model: str, version: str, data: memoryview, arrived_ns: int) -> InferRequest:
        """A request of this form, over the bytes in which its tensors lie."""
        inputs = {name: Tensor(name, dtype, shape, data[begin:end]) for name, dtype, shape, begin, end in self._inputs}
        return InferRequest(model, version, "", inputs, self._outputs, arrived_ns)

    def keep(self, key: Any, answer: Any) -> None:
        """Keeps something of an answer."""
        if len(self.answers) >= MAX_KEPT:
            self.answers.clear()
        self.answers[key] = answer


def form_of(asked: Any, config: ModelConfig, begins: Sequence[int]) -> Form | None:
    """The form of a request; None when it says more than its tensors' names, types and shapes.

    Args:
        asked: what a codec read.
        begins: where the bytes of its tensors begin.

    Raises:
        TritiumError: it does not fit the model.
    """
    request: InferRequest = asked.request
    plain = InferRequest(request.model, request.version, "", request.inputs, request.outputs, request.arrived_ns)
    if request != plain or any(o != RequestedOutput(o.name, binary=o.binary) for o in request.outputs):
        return None
    rows = check_request(config, request)
    return Form(asked, config, begins, 0 if any(t.dtype is DType.BYTES for t in request.inputs.values()) else rows)
