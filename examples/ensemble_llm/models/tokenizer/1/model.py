"""First step: texts become token ids, one row for each."""

import json

import numpy as np

import triton_python_backend_utils as pb_utils
from tritium.errors import TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.names import find_model
from tritium.llm.tokenizer import load_tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        path = find_model(parameters["model"]["string_value"])
        self.tokenizer = load_tokenizer(read_metadata(path))

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        try:
            rows = [self.tokenizer.encode(text.decode()) for text in texts.reshape(-1)]
        except (UnicodeDecodeError, TritiumError) as error:
            refusal = pb_utils.TritonError(f"text_input: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refusal)
        lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
        # Short rows are filled up; the lengths say where they end.
        ids = np.zeros((len(rows), lengths.max()), dtype=np.int32)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = row
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("input_lengths", lengths)]
        )
