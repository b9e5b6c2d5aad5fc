"""Python models: configurations that they complete, loads that fail, and the steps of their life."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.backends.python_models import NOTHING, answer, floats, value, write
from tests.backends.python_models import request as ask
from tritium.errors import Code, TritiumError
from tritium.serving.instance import Instance


async def test_auto_complete(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [3], "optional": True})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
    context = write(tmp_path, code, "")
    first, second = (Instance(context, f"demo_{i}", NOTHING) for i in (0, 1))
    try:
        config = await first.start()
        assert config.max_batch_size == 16 and config.batching is not None
        assert config.inputs[0].dims == (3,) and config.inputs[0].optional and config.outputs[0].name == "OUT"
        assert config.instances[0].device == "cpu"
        assert await second.start(config) == config
        assert value(await answer(second, ask(floats(1, 2, 3)))) == [1, 2, 3]
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "Python model file not found: version 1 of model 'demo' has no 'model.py'"),
        (
            "class TritonPythonModel:\n    def execute(self, requests:\n",
            "SyntaxError: '(' was never closed (model.py, ",
        ),
        ("class Other:\n    pass\n", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise RuntimeError('refused')\n",
            "RuntimeError: refused\n\nAt:\n  {file}(8): initialize\n",
        ),
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module_at_all'\n\nAt:\n  "),
        (
            "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c):\n        return 3\n",
            "auto_complete_config function in model 'demo' returned a int",
        ),
        (
            "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c):\n        "
            "c.add_input({'name': 'IN', 'data_type': 'TYPE_INT8', 'dims': [-1]})\n        return c\n",
            "ValueError: unable to load model 'demo', configuration expects datatype TYPE_FP32 for input 'IN'",
        ),
        ("import os\nos._exit(1)\n", "the process of instance 'demo_0' ended in its load"),
    ],
)
async def test_models_that_cannot_be_loaded(tmp_path: Path, code: str, message: str) -> None:
    instance = Instance(write(tmp_path, code), "demo_0", NOTHING)
    async with asyncio.timeout(20):
        with pytest.raises(TritiumError) as caught:
            await instance.start()
    assert message.format(file=tmp_path / "demo" / "1" / "model.py") in caught.value.message
    assert caught.value.code is Code.INTERNAL and instance.pid is None
    await instance.stop()


async def test_life_cycle_and_relative_imports(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = f"""
from .helper import WORD
import beside

class TritonPythonModel:
    def initialize(self, args):
        assert WORD == "helper" and beside.WORD == "beside"
        self.calls = 0

    async def is_ready(self):
        self.calls += 1
        return self.calls > 1

    def finalize(self):
        open({str(trace)!r}, "w").write("finalized")
        raise ValueError("too late to matter")
"""
    context = write(tmp_path, code)
    (tmp_path / "demo" / "1" / "helper.py").write_text('WORD = "helper"\n')
    (tmp_path / "demo" / "beside.py").write_text('WORD = "beside"\n')
    instance = Instance(context, "demo_0", NOTHING)
    await instance.start()
    assert [await instance.healthy(), await instance.healthy()] == [False, True]
    found = await answer(instance, ask(floats(1)))
    assert found.error is not None and "does not implement `execute` method" in found.error.message
    await instance.stop()
    assert trace.read_text() == "finalized" and not await instance.healthy()
