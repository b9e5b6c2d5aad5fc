"""Tiny GGUF files with the weights and the tokenizer of ``tiny.make_checkpoint``, written by the ``gguf`` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import CHAT_TEMPLATE, SPECIAL, _tokenizer_json, make_config, make_weights

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face weight."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def make_gguf(
    path: Path,
    family: str = "llama",
    *,
    quant: str = "F32",
    seed: int = 0,
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, float] | None = None,
    **overrides: Any,
) -> Path:
    """Write a whole model; matrices are quantized to ``quant`` (a type that the package can quantize to).

    Args:
        extra: more tensors, as float32.
        keys: more or other float keys, by name.
        overrides: of ``tiny.make_config``.
    """
    config = make_config(family, **overrides)
    kind = gguf.GGMLQuantizationType[quant]
    arch = "llama" if family in ("llama3", "mistral") else family
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    _add_architecture(writer, config)
    for name, value in (keys or {}).items():
        writer.add_float32(name, value)
    _add_tokenizer(writer, config)
    for name, weight in make_weights(config, seed).items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = permute(weight, config[f"num_{'attention' if 'q_proj' in name else 'key_value'}_heads"])
        matrix = weight.ndim == 2 and kind != gguf.GGMLQuantizationType.F32
        if matrix:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weight)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_architecture(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    model = json.loads(_tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in SPECIAL] for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
