"""Sends a text to the ensemble with Triton's gRPC client and prints the answer as it comes."""

from __future__ import annotations

import argparse
import queue

import numpy as np
import tritonclient.grpc as grpcclient


def tensor(name: str, datatype: str, value: object, dtype: type) -> grpcclient.InferInput:
    """An input of one element."""
    made = grpcclient.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


def main() -> None:
    """Reads the command line, asks, prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    inputs = [
        tensor("text_input", "BYTES", arguments.text.encode(), np.object_),
        tensor("max_tokens", "INT32", arguments.max_tokens, np.int32),
        tensor("temperature", "FP32", 0, np.float32),
        tensor("stream", "BOOL", True, np.bool_),
    ]
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(arguments.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(arguments.model, inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"error: {error}")
            text = result.as_numpy("text_output")
            if text is not None:
                print(text[0, 0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                print()
                return


if __name__ == "__main__":
    main()
