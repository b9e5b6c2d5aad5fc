"""The backend ``tensorflow``: SavedModels made here, in a process of their own, compared with numpy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.backends.runtime_models import (
    bf16,
    config,
    from_bf16,
    infer,
    io,
    load_error,
    parameter,
    serving,
    shown,
)

# Not among what tests need: it is by far the largest package. `pip install tensorflow-cpu` and they run.
pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow-cpu is not installed")

MAKE = """
import sys, tensorflow as tf

class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.string)])
    def both(self, X, S):
        return {"Y": X * 2, "T": tf.strings.join([S, "!"])}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.bfloat16)])
    def half(self, X):
        return {"Y": X / 2}

    @tf.function(input_signature=[tf.TensorSpec([3], tf.int32)])
    def fixed(self, X):
        return {"Y": tf.reduce_sum(X)}

model = Model()
signatures = {"serving_default": model.both, "half": model.half, "fixed": model.fixed}
for path in sys.argv[1:]:
    tf.saved_model.save(model, path, signatures=signatures)
"""
X = np.arange(8, dtype=np.float32).reshape(2, 4)
S = np.array([[b"\xff"], [b"x"]], np.object_)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel with three signatures, made in a process of its own: this one shall not import TensorFlow."""
    folder = tmp_path_factory.mktemp("saved") / "model.savedmodel"
    done = subprocess.run([sys.executable, "-c", MAKE, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def place(saved: Path, repository: Path, name: str, text: str | None) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.savedmodel").symlink_to(saved)
    if text is not None:
        config(repository / name, text)


async def test_without_a_configuration(saved: Path, tmp_path: Path) -> None:
    place(saved, tmp_path, "m", None)
    place(saved, tmp_path, "half", parameter("TF_SIGNATURE_DEF", "half"))
    place(saved, tmp_path, "fixed", parameter("TF_SIGNATURE_DEF", "fixed") + parameter("TF_NUM_INTRA_THREADS", "1"))
    async with serving(tmp_path) as server:
        assert server.failures() == {}
        assert "tensorflow" not in sys.modules
        found = await infer(server, "m", X=X, S=S)
        assert np.array_equal(found["Y"], X * 2) and found["T"].tolist() == [[b"\xff!"], [b"x!"]]
        made = shown(server, "m")
        assert (made["platform"], made["max_batch_size"]) == ("tensorflow_savedmodel", 4)
        assert {t["name"]: (t["data_type"], t["dims"]) for t in made["input"]} == {
            "X": ("TYPE_FP32", [4]),
            "S": ("TYPE_STRING", [1]),
        }
        assert from_bf16((await infer(server, "half", X=bf16("X", [[1, -4]])))["Y"]).tolist() == [[0.5, -2]]
        assert (await infer(server, "fixed", X=np.array([1, 2, 4], np.int32)))["Y"].tolist() == [7]


async def test_batches(saved: Path, tmp_path: Path) -> None:
    text = "max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 300000 }"
    place(saved, tmp_path, "m", 'platform: "tensorflow_savedmodel" ' + text)
    async with serving(tmp_path) as server:
        found = await asyncio.gather(*(infer(server, "m", X=X * i, S=S) for i in range(4)))
        assert all(np.array_equal(one["Y"], X * i * 2) for i, one in enumerate(found))
        assert all(one["T"].tolist() == [[b"\xff!"], [b"x!"]] for one in found)
        (stats,) = server.statistics("m")
        assert (stats.inference_count, stats.execution_count) == (8, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (parameter("TF_SIGNATURE_DEF", "other"), "has the signatures fixed, half, serving_default, expected other"),
        (parameter("TF_NUM_INTER_THREADS", "x"), "'TF_NUM_INTER_THREADS' of model 'm' is 'x', expected a whole number"),
        (
            f"max_batch_size: 4 output {io('Y', 'FP32', '4')} "
            + " ".join(
                f"input {io(name, kind, dims)}" for name, kind, dims in (("X", "FP16", "4"), ("S", "STRING", "1"))
            ),
            "expects datatype TYPE_FP16 for input 'X', model provides TYPE_FP32",
        ),
        (
            f"max_batch_size: 4 input {io('X', 'FP32', '4')} output {io('Y', 'FP32', '4')}",
            "configuration expects 1 inputs, model provides 2: it lacks 'S'",
        ),
    ],
)
async def test_what_is_refused(saved: Path, tmp_path: Path, text: str, message: str) -> None:
    place(saved, tmp_path, "m", 'backend: "tensorflow" ' + text)
    assert message in await load_error(tmp_path, "m")


async def test_bad_files(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    config(tmp_path / "m", 'backend: "tensorflow"')
    assert "has no 'model.savedmodel'" in await load_error(tmp_path, "m")
    (folder / "model.savedmodel").mkdir()
    assert "'model.savedmodel' cannot be loaded by tensorflow" in await load_error(tmp_path, "m")
    (folder / "model.savedmodel" / "saved_model.pb").write_bytes(b"no protobuf" * 9)
    assert "'model.savedmodel' cannot be loaded by tensorflow" in await load_error(tmp_path, "m")
