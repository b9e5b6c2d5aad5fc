from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import LLAMA3_ROPE, make_config
from tritium.errors import TritiumError
from tritium.llm.checkpoint import Metadata, TensorInfo
from tritium.llm.config import Rope, TransformerConfig
from tritium.llm.models.families import resolve

NOTHING = Path("nothing")
HEAD = {"lm_head.weight": TensorInfo("F32", (384, 64), NOTHING, 0, 384 * 64 * 4)}


def resolved(
    family: str = "llama", *, tensors: Any = None, generation: Any = None, **overrides: Any
) -> TransformerConfig:
    config = {key: value for key, value in make_config(family, **overrides).items() if value != "absent"}
    return resolve(Metadata(NOTHING, "safetensors", config, generation or {}, {}, HEAD if tensors is None else tensors))


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}


def resolved_gguf(
    family: str = "llama", tensors: tuple[str, ...] = (), tokens: Any = None, **overrides: Any
) -> TransformerConfig:
    values = {key.replace("llama", family): family if value == "llama" else value for key, value in GGUF.items()}
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    values = {key: value for key, value in values.items() if value != "absent"}
    names = ("token_embd.weight", *tensors)
    table = {name: TensorInfo("Q8_0", (384, 64), NOTHING, 0, 1) for name in names}
    return resolve(Metadata(Path("x.gguf"), "gguf", values, {}, {"gguf": tokens or {}}, table))


def test_llama() -> None:
    assert resolved() == TransformerConfig(
        family="llama",
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        vocab=384,
        max_positions=1024,
        norm_eps=1e-5,
        activation="silu",
        rope=Rope(10000.0, 16),
        tied=False,
        dtype="float32",
        eos_token_ids=(2,),
    )


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    optional = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act")
    absent = dict.fromkeys((*optional, "tie_word_embeddings", "eos_token_id", "dtype"), "absent")
    config = resolved(**absent, num_attention_heads=32)
    assert (config.kv_heads, config.norm_eps, config.rope.theta, config.max_positions) == (32, 1e-6, 10000.0, 2048)
    assert (config.tied, config.eos_token_ids, config.dtype, config.activation) == (False, (2,), "float32", "silu")
    assert resolved("mistral", **absent, num_attention_heads=32).kv_heads == 8
    assert resolved("mistral", sliding_window="absent").window == 4096
    assert resolved("qwen2", **absent, num_attention_heads=32).max_positions == 32768
    assert resolved("qwen3", head_dim="absent").head_dim == 128
    assert resolved(num_key_value_heads=None).kv_heads == 4
    assert resolved(architectures="absent").family == "llama"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(5e5, 16)),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, Rope(7.0, 16)),
        ({"rope_scaling": None}, Rope(1e4, 16)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(1e4, 16, "linear", 2.0)),
        ({"rope_parameters": LLAMA3_ROPE}, Rope(1e4, 16, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_scaling": LLAMA3_ROPE, "rope_theta": "absent"}, Rope(1e4, 16, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"head_dim": 32}, Rope(1e4, 32)),
    ],
)
def test_rope(overrides: dict[str, Any], expected: Rope) -> None:
    assert resolved(**overrides).rope == expected


def test_windows() -> None:
    assert resolved("mistral").window == 12
    assert resolved("mistral", sliding_window=None).window is None
    assert resolved("llama", sliding_window=5).window is None
    assert resolved("qwen2", sliding_window=5).window is None
    on: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}
    config = resolved("qwen2", **on, max_window_layers=1)
    assert (config.window, config.window_layers) == (5, (False, True))
    config = resolved("qwen3", **on, layer_types=["sliding_attention", "full_attention"])
    assert (config.window, config.window_layers) == (5, (True, False))


def test_biases_and_norms() -> None:
    def flags(config: TransformerConfig) -> tuple[bool, ...]:
        return (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)

    assert flags(resolved("llama")) == (False, False, False, False)
    assert flags(resolved("llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert flags(resolved("mistral", attention_bias=True)) == (False, False, False, False)
    assert flags(resolved("qwen2")) == (True, False, False, False)
    assert flags(resolved("qwen3", attention_bias=True)) == (True, True, False, True)


def test_tied() -> None:
    assert resolved(tie_word_embeddings=True).tied
    other = {"model.embed_tokens.weight": TensorInfo("BF16", (1,), NOTHING, 0, 2)}
    assert resolved(tensors=other).tied
    assert not resolved(tensors={}).tied  # .bin shards: nobody knows yet


def test_dtype() -> None:
    tensors = HEAD | {"big": TensorInfo("BF16", (1,), NOTHING, 0, 10**9)}
    assert resolved(dtype="absent", tensors=tensors).dtype == "bfloat16"
    assert resolved(dtype="absent", torch_dtype="float16").dtype == "float16"
    assert resolved(dtype="torch.bfloat16").dtype == "bfloat16"
    assert resolved(dtype="absent", tensors={}).dtype == "bfloat16"


def test_end_tokens() -> None:
    assert resolved(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert resolved(generation={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert resolved(generation={"eos_token_id": 7}).eos_token_ids == (7,)
    assert resolved(eos_token_id=None).eos_token_ids == ()
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert resolved_gguf(tokens=ids).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": "absent", "model_type": "gpt2"}, ["gpt2", "MistralForCausalLM"]),
        ({"architectures": "absent", "model_type": "absent"}, ["architectures"]),
        ({"architectures": ["a", "b"]}, ["architectures"]),
        ({"hidden_size": "absent"}, ["has no 'hidden_size'"]),
        ({"num_hidden_layers": 0}, ["'num_hidden_layers' is 0"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "1000000"]),
        ({"vocab_size": 1e3}, ["'vocab_size' is 1000.0"]),
        ({"vocab_size": True}, ["'vocab_size' is True"]),
        ({"intermediate_size": "9"}, ["intermediate_size"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["64", "5", "head_dim"]),
        ({"head_dim": 7}, ["head_dim is 7"]),
        ({"hidden_act": "relu"}, ["'hidden_act' is 'relu'", "silu"]),
        ({"hidden_act": ["silu"]}, ["hidden_act"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_parameters", "dynamic"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"rope_type": ["x"]}}, ["rope_scaling"]),
        ({"rope_scaling": 4}, ["rope_scaling", "an object"]),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
    ],
)
def test_refusals(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TritiumError) as caught:
        resolved(**overrides)
    for word in words:
        assert word in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sliding_window": 0}, ["sliding_window"]),
        ({"max_window_layers": -1}, ["max_window_layers"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 entries"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types", "chunked_attention"]),
    ],
)
def test_window_refusals(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TritiumError) as caught:
        resolved("qwen2", use_sliding_window=True, **overrides)
    for word in words:
        assert word in caught.value.message, caught.value.message


def test_gguf() -> None:
    config = resolved_gguf()
    assert (config.family, config.head_dim, config.vocab, config.tied) == ("llama", 16, 384, True)
    assert config.rope == Rope(10000.0, 16)
    assert config.dtype == "bfloat16"
    assert not resolved_gguf(tensors=("output.weight",)).tied
    biased = resolved_gguf(tensors=("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"))
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert resolved_gguf("qwen2").qkv_bias
    assert resolved_gguf("qwen3", qwen3__attention__key_length=32, qwen3__rope__dimension_count=32).head_dim == 32
    assert resolved_gguf(llama__attention__sliding_window=7).window == 7
    linear = resolved_gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear.rope == Rope(10000.0, 16, "linear", 4.0)
    assert resolved_gguf(llama__rope__scale_linear=3.0).rope == Rope(10000.0, 16, "linear", 3.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"general__architecture": "gemma2"}, ["gemma2", "llama, qwen2, qwen3"]),
        ({"general__architecture": "absent"}, ["None"]),
        ({"llama__block_count": "absent"}, ["x.gguf", "'llama.block_count'"]),
        ({"llama__attention__head_count": [4, 4]}, ["llama.attention.head_count"]),
        ({"llama__expert_count": 8}, ["expert_count"]),
        ({"llama__rope__dimension_count": 8, "llama__attention__key_length": 16}, ["llama.rope.dimension_count"]),
        ({"llama__attention__value_length": 8}, ["llama.attention.value_length"]),
        ({"llama__rope__scaling__type": "yarn"}, ["llama.rope.scaling.type", "yarn"]),
    ],
)
def test_gguf_refusals(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TritiumError) as caught:
        resolved_gguf(**overrides)
    for word in words:
        assert word in caught.value.message, caught.value.message
