"""Last step: token ids become text, one answer of the engine at a time and never half a character.

It keeps nothing between its requests, so any number of instances may share the answers of one stream: what came
before (``previous_ids``) says which bytes of a character are there already.
"""

import json

import numpy as np

import triton_python_backend_utils as pb_utils
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
        ids, lengths, previous, reasons = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("output_ids", "sequence_length", "previous_ids", "finish_reason")
        )
        texts = [
            self.text(before[before >= 0].tolist(), row[0, : length[0]].tolist(), bool(reason[0]))
            for row, length, before, reason in zip(ids, lengths, previous, reasons, strict=True)
        ]
        output = np.array(texts, dtype=np.object_).reshape(-1, 1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", output)])

    def text(self, before, ids, last):
        """What ``ids`` add to the text: whole characters, and at the end of the sequence the rest, if any."""
        decoder = self.tokenizer.detokenizer()
        decoder.push(before)
        text = decoder.push(ids)
        return (text + decoder.flush() if last else text).encode()
