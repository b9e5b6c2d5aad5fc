from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.llm.models.paged import logits
from tests.llm.tokenizer_samples import TEXTS, smollm2
from tests.tiny import VOCAB, make_checkpoint, make_config, make_weights
from tests.tiny_gguf import make_gguf
from tritium.errors import Code, TritiumError
from tritium.llm.checkpoint import open_checkpoint, read_metadata, unpickle
from tritium.llm.kernels import ops
from tritium.llm.models import convert as module
from tritium.llm.models.convert import convert
from tritium.llm.models.families import resolve
from tritium.llm.models.load import load
from tritium.llm.tokenizer import load_tokenizer, tokenizer_files

CPU = torch.device("cpu")
PROMPT = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(7)).tolist()


def our_logits(path: Path) -> torch.Tensor:
    ops.choose(CPU, deterministic=False)
    checkpoint = open_checkpoint(path)
    return logits(load(resolve(checkpoint.metadata), checkpoint, dtype=torch.float32, device=CPU), PROMPT, [24])


def test_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The child process is tested with the checkpoints; here its work is done in place.
    monkeypatch.setattr(unpickle, "to_safetensors", lambda source, target: unpickle.main(str(source), str(target)))
    source = make_checkpoint(tmp_path / "source")
    expected = our_logits(source)
    (source / "model.safetensors").unlink()
    weights = {name: torch.from_numpy(value) for name, value in make_weights(make_config()).items()}
    names = list(weights)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in shards.items():
        torch.save({name: weights[name] for name in part}, source / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))

    written = convert(source, tmp_path / "out")
    assert {path.name for path in written} == {path.name for path in (tmp_path / "out").iterdir()}
    names_out = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in written} == names_out
    assert torch.equal(our_logits(tmp_path / "out"), expected)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []

    torch.save(weights, source / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(TritiumError, match="appears twice"):
        convert(source, tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


def test_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    source = make_checkpoint(tmp_path / "source", "qwen3")
    written = convert(source, tmp_path / "out")
    assert sum(path.suffix == ".safetensors" for path in written) > 1
    assert torch.equal(our_logits(tmp_path / "out"), our_logits(source))


def test_dtype(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", dtype="bfloat16")
    metadata = read_metadata(tmp_path / "out")
    assert {info.dtype for info in metadata.tensors.values()} == {"BF16"}
    assert resolve(metadata).dtype == "bfloat16"


def test_the_output_must_be_new(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(TritiumError) as caught:
        convert(source, source)
    assert caught.value.code is Code.ALREADY_EXISTS


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf(tmp_path: Path, family: str) -> None:
    source = make_gguf(tmp_path / "m.gguf", family)
    written = convert(source, tmp_path / "out")
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert sorted(path.name for path in written) == sorted(names)
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in written)
    # The ends of an answer are the GGUF's and those that its vocabulary spells, as a folder lists them.
    facts = resolve(read_metadata(tmp_path / "out"))
    assert facts.eos_token_ids == (2, 0)
    assert replace(facts, eos_token_ids=(2,)) == resolve(read_metadata(source))
    ours = our_logits(source)
    assert torch.equal(our_logits(tmp_path / "out"), ours)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        assert (model(torch.tensor([PROMPT])).logits[0] - ours).abs().max() < 1e-4


def test_quantized_gguf(tmp_path: Path) -> None:
    convert(make_gguf(tmp_path / "m.gguf", quant="Q8_0"), tmp_path / "out")
    assert {info.dtype for info in read_metadata(tmp_path / "out").tensors.values()} == {"F16"}


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    convert(smollm2(), out)
    return out


@pytest.mark.parametrize("reader", [PreTrainedTokenizerFast, AutoTokenizer])
def test_transformers_reads_the_tokenizer_of_smollm2(smollm2_folder: Path, reader: type) -> None:
    ours, theirs = load_tokenizer(read_metadata(smollm2())), reader.from_pretrained(smollm2_folder)
    for text in (*TEXTS, "".join(TEXTS), "<|im_start|>user\nhi<|im_end|>\n"):
        assert theirs(text)["input_ids"] == ours.encode(text, allow_special=True)
    messages = [{"role": "user", "content": "介绍一下 TensorRT-LLM\n"}]
    prompt = ours.encode_chat(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == prompt
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert theirs.decode(prompt, skip_special_tokens=True) == ours.decode(prompt)
    assert GenerationConfig.from_pretrained(smollm2_folder).eos_token_id == [2, 0]


def test_the_converted_tokenizer_of_smollm2_is_the_same(smollm2_folder: Path) -> None:
    before, after = load_tokenizer(read_metadata(smollm2())), load_tokenizer(read_metadata(smollm2_folder))
    assert (after.eos_token_ids, after.bos_token_id) == (before.eos_token_ids, before.bos_token_id) == ((2, 0), 1)
    for text in TEXTS:
        assert after.encode(text) == before.encode(text)
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    assert after.encode_chat(messages) == before.encode_chat(messages)


def test_a_tokenizer_that_the_files_cannot_say_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(values: dict[str, object], max_length: int) -> dict[str, bytes]:
        found = tokenizer_files(values, max_length)
        document = json.loads(found["tokenizer.json"])
        document["model"]["merges"] = document["model"]["merges"][::2]
        return found | {"tokenizer.json": json.dumps(document).encode()}

    monkeypatch.setattr(module, "tokenizer_files", shortened)
    with pytest.raises(TritiumError, match="GGUF file's tokenizer: token ids"):
        convert(make_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_gguf_that_config_json_cannot_describe(tmp_path: Path) -> None:
    biases = {
        f"blk.{layer}.attn_{part}.bias": np.ones(size)
        for layer in (0, 1)
        for part, size in (("q", 64), ("k", 32), ("v", 32))
    }
    source = make_gguf(tmp_path / "m.gguf", extra=biases)
    with pytest.raises(TritiumError, match="qkv_bias"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_gguf_with_rope_factors_is_refused(tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(TritiumError, match="rope_freqs"):
        convert(source, tmp_path / "out")
