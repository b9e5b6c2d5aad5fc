"""The model repository of a soak: a small Python model for each scheduler, ensembles, and a language model."""

from __future__ import annotations

from pathlib import Path

from scripts.soak.run import NAME

# Each instance leaves its process id beside the repository, so that it can be killed.
HEAD = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


def tensor(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def answer(name, value):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value)])


class Base:
    def initialize(self, arguments):
        folder = json.loads(arguments["model_config"])["parameters"]["pids"]["string_value"]
        place = os.path.join(folder, arguments["model_instance_name"])
        with open(place + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.replace(place + ".new", place)
        self.sums = {}


"""
LINEAR = """
class TritonPythonModel(Base):
    def execute(self, requests):
        time.sleep(0.002)
        return [answer("OUT", tensor(request, "IN") * %d + %d) for request in requests]
"""
# Keeps its sums itself, so that they are lost with it.
DIRECT = """
class TritonPythonModel(Base):
    def execute(self, requests):
        answers = []
        for request in requests:
            if not tensor(request, "READY").item():
                answers.append(answer("OUT", np.zeros((1, 1), np.int32)))
                continue
            id = tensor(request, "ID").item()
            before = 0 if tensor(request, "START").item() else self.sums[id]
            self.sums[id] = before + tensor(request, "IN").item()
            answers.append(answer("OUT", np.full((1, 1), self.sums[id], np.int32)))
            if tensor(request, "END").item():
                del self.sums[id]
        return answers
"""
# Its sums are kept by the server, and outlive it.
OLDEST = """
class TritonPythonModel(Base):
    def execute(self, requests):
        answers = []
        for request in requests:
            total = tensor(request, "SUM") + tensor(request, "IN")
            outputs = [pb_utils.Tensor("OUT", total), pb_utils.Tensor("SUM_OUT", total)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
DECOUPLED = """
class TritonPythonModel(Base):
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(tensor(request, "IN").item()):
                if request.is_cancelled():
                    break
                sender.send(answer("OUT", np.full((1, 1), number, np.int32)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""
ONE = TENSORS.replace("-1", "1")
TWO = "instance_group { count: 2 kind: KIND_CPU }\n"
CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
BATCHING = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: %d %s }\n"
# Never both: Triton does not promise an order among priorities.
ORDERED = "preserve_ordering: true"
LEVELS = "priority_levels: 2 default_priority_level: 2"
PAIR = """
platform: "ensemble" max_batch_size: 8
%s
ensemble_scheduling {
  step { model_name: "plain" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "MIDDLE" } }
  step { model_name: "dynamic" model_version: -1
    input_map { key: "IN" value: "MIDDLE" } output_map { key: "OUT" value: "OUT" } }
}
"""
# Most requests that may be inside one instance when it dies: its largest batch, or its sequences.
INSIDE = {"plain": 1, "dynamic": 8, "rerun": 0, "direct": 4, "oldest": 4, "decoupled": 4}
# What models that are linear make of x: (factor, summand).
LINES = {"plain": (2, 1), "dynamic": (3, 5), "rerun": (7, 2), "cached": (11, 3), "coming": (5, 4)}


def write_model(folder: Path, name: str, code: str, config: str) -> None:
    """Writes a Python model, its files in one step each; one that holds the same already is left alone."""
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    pids = folder.parent / "pids"
    parameters = f'parameters {{ key: "pids" value {{ string_value: "{pids}" }} }}\n'
    text = f'backend: "python"\n{parameters}{config}'
    for path, content in ((version / "model.py", HEAD + code), (folder / name / "config.pbtxt", text)):
        if not path.exists() or path.read_text() != content:
            new = path.with_suffix(".new")
            new.write_text(content)
            new.replace(path)


def write_line(folder: Path, name: str, line: tuple[int, int], config: str) -> None:
    write_model(folder, name, LINEAR % line, config)


def write_dynamic(folder: Path, delay_us: int, ordered: bool) -> None:
    """The model whose batching changes while it serves."""
    batching = BATCHING % (delay_us, ORDERED if ordered else LEVELS)
    write_line(folder, "dynamic", LINES["dynamic"], f"max_batch_size: 8\n{TENSORS}{TWO}{batching}")


def write_moving(folder: Path, summand: int) -> None:
    """The model whose file changes while it serves."""
    write_line(folder, "moving", (1, summand), f"max_batch_size: 8\n{TENSORS}{BATCHING % (100, LEVELS)}")


def write_llm(folder: Path, checkpoint: str, delay_us: int) -> None:
    """The language model, whose queue changes while it serves."""
    version = folder / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    new = folder / NAME / "config.new"
    new.write_text(
        f'backend: "tritium" max_batch_size: 16\n'
        f'parameters {{ key: "model" value {{ string_value: "{checkpoint}" }} }}\n'
        f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}\n"
    )
    new.replace(folder / NAME / "config.pbtxt")


def write_all(folder: Path, checkpoint: str) -> None:
    """The whole repository."""
    (folder.parent / "pids").mkdir(parents=True)
    write_line(folder, "plain", LINES["plain"], f"max_batch_size: 8\n{TENSORS}{TWO}")
    write_dynamic(folder, 500, False)
    rerun = 'parameters { key: "retry_on_crash" value { string_value: "true" } }\n'
    write_line(folder, "rerun", LINES["rerun"], f"max_batch_size: 8\n{TENSORS}{rerun}{BATCHING % (500, ORDERED)}")
    cached = "response_cache { enable: true }\n"
    write_line(folder, "cached", LINES["cached"], f"max_batch_size: 8\n{TENSORS}{cached}")
    write_line(folder, "coming", LINES["coming"], f"max_batch_size: 8\n{TENSORS}")
    write_moving(folder, 0)
    direct = f"sequence_batching {{ direct {{ }} max_sequence_idle_microseconds: 60000000 {CONTROLS} }}\n"
    write_model(folder, "direct", DIRECT, f"max_batch_size: 4\n{ONE}{TWO}{direct}")
    state = 'state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
    oldest = "oldest { max_candidate_sequences: 8 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 300 }"
    oldest = f"sequence_batching {{ {oldest} max_sequence_idle_microseconds: 60000000 {state} }}\n"
    write_model(folder, "oldest", OLDEST, f"max_batch_size: 4\n{ONE}{TWO}{oldest}")
    decoupled = "model_transaction_policy { decoupled: true }\ndynamic_batching { }\n"
    write_model(folder, "decoupled", DECOUPLED, f"max_batch_size: 4\n{ONE}{decoupled}")
    (folder / "pair" / "1").mkdir(parents=True)
    (folder / "pair" / "config.pbtxt").write_text(PAIR % TENSORS)
    write_llm(folder, checkpoint, 0)
