"""Loading: what must match does, what must be refused is, and GGUF equals safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.llm.models.paged import logits
from tests.tiny import FAMILIES, VOCAB, make_checkpoint, make_config, make_weights, save_weights
from tests.tiny_gguf import make_gguf
from tritium.errors import TritiumError
from tritium.llm.checkpoint import open_checkpoint, unpickle
from tritium.llm.config import Rope
from tritium.llm.kernels import ops
from tritium.llm.layers.rotary import frequencies
from tritium.llm.models.decoder import Decoder
from tritium.llm.models.families import resolve
from tritium.llm.models.load import load, num_parameters

CPU = torch.device("cpu")
PROMPT = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(autouse=True)
def kernels() -> None:
    ops.choose(CPU, deterministic=False)


def loaded(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    checkpoint = open_checkpoint(path, **options)
    return load(resolve(checkpoint.metadata), checkpoint, dtype=dtype, device=CPU)


def refused(path: Path, *words: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(TritiumError) as caught:
        loaded(path, dtype)
    for word in words:
        assert word in caught.value.message, caught.value.message


def rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    """Change or drop (None) tensors of a tiny checkpoint; dots of their names are written as two underscores."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Any] = make_weights(config) | {n.replace("__", "."): w for n, w in changes.items()}
    save_weights(folder, {name: weight for name, weight in weights.items() if weight is not None})


def test_missing_and_misshapen(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, model__norm__weight=None)
    refused(folder, "1 tensors are missing", "'model.norm.weight'")
    rewrite(folder, model__layers__1__mlp__up_proj__weight=np.zeros((95, 64), np.float32))
    refused(folder, "'model.layers.1.mlp.up_proj.weight'", "[95, 64]", "[96, 64]")
    rewrite(folder, model__embed_tokens__weight=None)
    refused(folder, "'model.embed_tokens.weight'")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    folder = make_checkpoint(tmp_path)
    weight = make_weights(make_config())[name]
    weight.reshape(-1)[5] = value
    rewrite(folder, **{name.replace(".", "__"): weight})
    refused(folder, f"'{name}'", "not finite")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, model__norm__weight=np.full(64, 1e6, np.float32))
    refused(folder, "'model.norm.weight'", "1e+06", "float16", dtype=torch.float16)
    rewrite(folder, model__norm__weight=np.ones(64, np.int32))
    refused(folder, "'model.norm.weight'", "int32")


def test_a_configuration_larger_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = make_config() | {"intermediate_size": 2**24, "hidden_size": 2**24}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "'model.embed_tokens.weight'", "[384, 64]")


def test_extra_tensors_are_named_and_buffers_are_not(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    extra = {"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(8, np.float32)}
    rewrite(folder, **extra)
    assert loaded(folder).notices == []
    rewrite(folder, **extra, model__layers__0__self_attn__q_proj__bias=np.ones(64, np.float32))
    (notice,) = loaded(folder).notices
    assert "'model.layers.0.self_attn.q_proj.bias'" in notice


def test_tied_heads(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    expected = logits(loaded(tied), PROMPT, [24])
    embedding = make_weights(make_config(tie_word_embeddings=True))["model.embed_tokens.weight"]

    rewrite(tied, lm_head__weight=embedding)  # both, equal
    assert loaded(tied).notices == []
    assert torch.equal(logits(loaded(tied), PROMPT, [24]), expected)

    rewrite(tied, lm_head__weight=2 * embedding)  # both, different: the stored one is used
    model = loaded(tied)
    assert "'lm_head.weight' differs" in model.notices[0]
    assert torch.allclose(logits(model, PROMPT, [24]), 2 * expected, rtol=1e-4, atol=1e-3)

    untied = make_checkpoint(tmp_path / "untied")  # not tied, and no head
    rewrite(untied, lm_head__weight=None)
    assert resolve(open_checkpoint(untied).metadata).tied
    assert loaded(untied).head is not None


def test_memory_is_counted(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(tmp_path))
    expected = sum(weight.nbytes for weight in make_weights(make_config()).values())
    assert num_parameters(model.config) * 4 == expected
    assert model.weights_bytes == expected + model.cos_sin_PD.nbytes


def test_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "to_safetensors", lambda source, target: unpickle.main(str(source), str(target)))
    folder = make_checkpoint(tmp_path)
    expected = logits(loaded(folder), PROMPT, [24])
    (folder / "model.safetensors").unlink()
    weights = {name: torch.from_numpy(value) for name, value in make_weights(make_config()).items()}
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(logits(loaded(folder, allow_bin=True), PROMPT, [24]), expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("llama3", "mistral")])
def test_gguf_equals_safetensors(tmp_path: Path, family: str) -> None:
    expected = logits(loaded(make_checkpoint(tmp_path / "m", family)), PROMPT, [24])
    model = loaded(make_gguf(tmp_path / "m.gguf", family))
    assert model.notices == []
    assert torch.equal(logits(model, PROMPT, [24]), expected)


def test_gguf_with_biases(tmp_path: Path) -> None:
    expected = logits(loaded(make_checkpoint(tmp_path / "m", attention_bias=True)), PROMPT, [24])
    model = loaded(make_gguf(tmp_path / "m.gguf", attention_bias=True))
    assert torch.equal(logits(model, PROMPT, [24]), expected)


def test_gguf_with_rope_factors(tmp_path: Path) -> None:
    """Llama 3's scaling comes as a tensor of factors."""
    expected = logits(loaded(make_checkpoint(tmp_path / "m", "llama3")), PROMPT, [24])
    plain, scaled = Rope(10000.0, 16), Rope(10000.0, 16, "llama3", 8.0, 1.0, 4.0, 64)
    factors = (frequencies(plain) / frequencies(scaled)).numpy()
    model = loaded(make_gguf(tmp_path / "m.gguf", "llama3", extra={"rope_freqs.weight": factors}))
    assert model.notices == []
    torch.testing.assert_close(logits(model, PROMPT, [24]), expected, rtol=1e-4, atol=1e-3)
    bad = make_gguf(tmp_path / "bad.gguf", "llama3", extra={"rope_freqs.weight": factors[:3]})
    refused(bad, "rope_freqs.weight", "[3]", "8 positive")


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_gguf_equals_its_rounded_weights(tmp_path: Path, family: str, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    folder = make_checkpoint(tmp_path / "m", family)
    weights = make_weights(make_config(family))
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    save_weights(folder, weights)
    expected = logits(loaded(folder), PROMPT, [24])
    result = logits(loaded(make_gguf(tmp_path / "m.gguf", family, quant=quant)), PROMPT, [24])
    assert torch.equal(result, expected)
