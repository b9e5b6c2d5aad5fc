"""Tiny random checkpoints with a working tokenizer, made in milliseconds and the same every time.

``make_checkpoint(folder, family="llama", **overrides)`` writes a Hugging Face checkpoint folder that both Tritium
and transformers load. No torch is needed for float32 weights, so that tests of torch-free packages may use it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other foxes are sleeping in the forest.",
    "An inference server for large language models answers requests over the protocols that clients know.",
    "Once upon a time there was a little model that wanted to serve tokens to everyone in the world.",
    "介绍一下模型推理服务器:它接收请求,把文本变成词元,然后逐个生成新的词元。",
    "def main(): return [x for x in range(10) if x % 2 == 0]  # numbers 0 1 2 3 4 5 6 7 8 9",
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
}


@cache
def _tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer.to_str()


def make_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE of ``VOCAB`` ids, any text round-trips."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def make_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of a family (a key of ``FAMILIES``)."""
    config: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    return config | FAMILIES[family] | overrides


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names, spread so that the logits have clear winners."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config["num_key_value_heads"]
    kind = config["model_type"]
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        if bias:
            weights[f"{name}.bias"] = rng.standard_normal(rows, np.float32) * np.float32(0.1)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)

    weights["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden), np.float32)
    attention_bias = bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            bias = kind == "qwen2" or attention_bias
            matrix(f"{layer}.self_attn.{part}_proj", count * head_dim, hidden, bias=bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=attention_bias)
        if kind == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, bias=mlp_bias)
        matrix(f"{layer}.mlp.up_proj", inner, hidden, bias=mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return weights


def save_weights(folder: Path, weights: dict[str, np.ndarray], *, shards: int = 1, dtype: str = "float32") -> None:
    """Write ``model.safetensors``, or ``shards`` files and their index."""
    if shards == 1:
        _save_file(folder / "model.safetensors", weights, dtype)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        _save_file(folder / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_file(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    if dtype == "float32":
        from safetensors.numpy import save_file

        save_file(weights, path, metadata={"format": "pt"})
        return
    import torch
    from safetensors.torch import save_file as save_torch

    cast = {name: torch.from_numpy(weight).to(getattr(torch, dtype)) for name, weight in weights.items()}
    save_torch(cast, path, metadata={"format": "pt"})


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    shards: int = 1,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Write a whole tiny checkpoint (weights, config, generation config, tokenizer) and return its folder.

    Args:
        folder: made when absent.
        family: a key of ``FAMILIES``.
        seed: of the random weights.
        shards: number of safetensors files.
        chat_template: None leaves the template out.
        overrides: keys of ``config.json`` (``num_hidden_layers=1``, ``dtype="bfloat16"``, ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **overrides)
    save_weights(folder, make_weights(config, seed), shards=shards, dtype=config["dtype"])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    make_tokenizer(folder, chat_template=chat_template)
    return folder
