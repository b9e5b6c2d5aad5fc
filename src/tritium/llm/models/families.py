"""From a checkpoint's own words to ``TransformerConfig``, per family, and the names of its weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint.metadata import Metadata
from tritium.llm.config import DTypeName, Rope, TransformerConfig

# Beyond any model there is, so that a hostile file cannot ask for absurd tables.
MAX_SIZE = 2**24
MAX_POSITIONS = 2**22
MAX_LAYERS = 4096

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
STORED_DTYPES: dict[str, DTypeName] = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Family:
    """What a ``config.json`` means where it says nothing: the defaults of transformers' configuration class.

    Attributes:
        kv_heads: None for as many as query heads.
        head_dim: None for hidden / heads.
        qkv_bias: fixed for the family; None follows ``attention_bias``, which then holds for the output too.
        windowed: always (Mistral), by ``use_sliding_window`` (Qwen) or never.
    """

    name: str
    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    eos: int | None = None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    windowed: Literal["always", "switch", "never"] = "never"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", 2048, eos=2),
    "MistralForCausalLM": Family("mistral", 131072, kv_heads=8, eos=2, qkv_bias=False, windowed="always"),
    "Qwen2ForCausalLM": Family("qwen2", 32768, kv_heads=32, qkv_bias=True, windowed="switch"),
    "Qwen3ForCausalLM": Family("qwen3", 32768, kv_heads=32, head_dim=128, qk_norm=True, windowed="switch"),
}
MODEL_TYPES = {family.name: architecture for architecture, family in FAMILIES.items()}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


def resolve(metadata: Metadata) -> TransformerConfig:
    """The architecture of a checkpoint.

    Raises:
        TritiumError: names the key that is missing, unknown or asks for something not supported.
    """
    config = _from_gguf(metadata) if metadata.kind == "gguf" else _from_hugging_face(metadata)
    if config.heads % config.kv_heads:
        raise invalid(f"{config.heads} attention heads cannot share {config.kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise invalid(f"head_dim is {config.head_dim}, expected an even number for the rotary embedding")
    return config


class Keys:
    """A configuration read with checks; errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the default where the key is absent (a null is a value)."""
        return self.values.get(self.prefix + key, default)

    def wrong(self, key: str, expected: str) -> TritiumError:
        """The error for a key with a value that will not do."""
        name = self.prefix + key
        if name not in self.values:
            return invalid(f"{self.source} has no '{name}', expected {expected}", param=name)
        return invalid(f"{self.source}: '{name}' is {self.values[name]!r:.100}, expected {expected}", param=name)

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE, *, null: int | None = None) -> int:
        """A whole number from 1 to the limit; ``null`` stands for a null, written or by default."""
        value = self.get(key, default)
        value = null if value is None else value
        if type(value) is not int or not 1 <= value <= limit:
            raise self.wrong(key, f"a whole number from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value


def unsupported(what: str) -> TritiumError:
    """The error for something real that Tritium cannot serve."""
    return TritiumError(Code.UNIMPLEMENTED, what, param="model")


def token_ids(value: Any) -> tuple[int, ...]:
    """End token ids, which come as one number, a list, or nothing."""
    ids = value if isinstance(value, list) else [value]
    return tuple(token for token in ids if type(token) is int and token >= 0)


def _family(keys: Keys) -> Family:
    supported = ", ".join(FAMILIES)
    names = keys.get("architectures") or [MODEL_TYPES.get(str(keys.get("model_type")), keys.get("model_type"))]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.wrong("architectures", f"a list with one of {supported}")
    if names[0] not in FAMILIES:
        raise unsupported(f"the architecture '{names[0]:.100}' is not supported, only {supported}")
    return FAMILIES[names[0]]


def _from_hugging_face(metadata: Metadata) -> TransformerConfig:
    keys = Keys(metadata.config, "config.json")
    family = _family(keys)
    _refuse_quantized(keys)
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    kv_heads = keys.size("num_key_value_heads", family.kv_heads, null=heads)
    head_dim = keys.size("head_dim", family.head_dim, null=hidden // heads)
    if not keys.get("head_dim", family.head_dim):
        _check_divides(hidden, heads)
    layers = keys.size("num_hidden_layers", limit=MAX_LAYERS)
    attention_bias = family.qkv_bias is None and keys.flag("attention_bias", False)
    activation = ACTIVATIONS.get(str(keys.get("hidden_act", "silu")))
    if activation is None:
        raise keys.wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    window, window_layers = _window(keys, family, layers)
    max_positions = keys.size("max_position_embeddings", family.max_positions, MAX_POSITIONS)
    ends = metadata.generation_config.get("eos_token_id", keys.get("eos_token_id", family.eos))
    return TransformerConfig(
        family=family.name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        max_positions=max_positions,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation,
        rope=_rope(keys, head_dim, max_positions),
        tied=keys.flag("tie_word_embeddings", False) or _no_head(metadata, "lm_head.weight"),
        qkv_bias=bool(family.qkv_bias) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.name == "llama" and keys.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        window=window,
        window_layers=window_layers,
        dtype=_stored_dtype(metadata, keys),
        eos_token_ids=token_ids(ends),
    )


def _check_divides(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise invalid(f"hidden size {hidden} is no multiple of {heads} attention heads, and no head_dim is given")


def _no_head(metadata: Metadata, name: str) -> bool:
    return bool(metadata.tensors) and name not in metadata.tensors


def _refuse_quantized(keys: Keys) -> None:
    quantization = keys.get("quantization_config") or keys.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise unsupported(f"config.json: 'quantization_config' asks for {method!r:.100}, which is not supported yet")


def _stored_dtype(metadata: Metadata, keys: Keys) -> DTypeName:
    """What the configuration says; else the type of the largest tensor; else bfloat16."""
    name = keys.get("dtype") or keys.get("torch_dtype")
    name = str(name).removeprefix("torch.") if name else None
    if name in STORED_DTYPES.values():
        return cast(DTypeName, name)
    if name is not None:
        raise keys.wrong("dtype" if keys.get("dtype") else "torch_dtype", "float32, float16 or bfloat16")
    largest = max(metadata.tensors.values(), key=lambda info: info.num_bytes, default=None)
    return STORED_DTYPES.get(largest.dtype, "bfloat16") if largest else "bfloat16"


def _window(keys: Keys, family: Family, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """Sliding window and the layers that have it (None: all), with the meaning that transformers gives the keys."""
    if family.windowed == "never":
        return None, None
    if family.windowed == "switch" and not keys.flag("use_sliding_window", False):
        return None, None
    if keys.get("sliding_window", 4096) is None:
        return None, None
    window = keys.size("sliding_window", 4096)
    if family.windowed == "always":
        return window, None
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise keys.wrong("max_window_layers", "a whole number of layers")
        return window, tuple(layer >= first for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"{layers} entries of {' or '.join(known)}")
    return window, tuple(kind == "sliding_attention" for kind in kinds)


def _rope(keys: Keys, head_dim: int, max_positions: int) -> Rope:
    """Both spellings: ``rope_parameters`` (transformers 5), or ``rope_scaling`` beside ``rope_theta``."""
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    values = keys.get(name) or {}
    if not isinstance(values, dict):
        raise keys.wrong(name, "an object")
    rope = Keys(values, f"config.json: '{name}'")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise unsupported(
            f"config.json: '{name}' has the type {kind!r:.100}, only default, linear, llama3 are supported"
        )
    if rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise unsupported("config.json: 'partial_rotary_factor' other than 1 is not supported")
    theta = rope.number("rope_theta") if "rope_theta" in values else keys.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta, head_dim)
    if kind == "linear":
        return Rope(theta, head_dim, kind, rope.number("factor"))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({low:g})")
    original = rope.size("original_max_position_embeddings", max_positions)
    return Rope(theta, head_dim, kind, rope.number("factor"), low, high, original)


def _from_gguf(metadata: Metadata) -> TransformerConfig:
    family = metadata.config.get("general.architecture")
    if family not in GGUF_FAMILIES:
        supported = ", ".join(GGUF_FAMILIES)
        raise unsupported(f"the GGUF architecture {family!r:.100} is not supported, only {supported}")
    keys = Keys(metadata.config, metadata.path.name, f"{family}.")
    if keys.get("expert_count", 0):
        raise unsupported(f"{metadata.path.name} is a mixture of experts ({family}.expert_count), not supported yet")
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", keys.get("rope.dimension_count", hidden // heads))
    if keys.get("attention.key_length", keys.get("rope.dimension_count")) is None:
        _check_divides(hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise unsupported(f"{metadata.path.name}: '{family}.{key}' is not the head size ({head_dim})")
    tensors = metadata.tensors
    if "token_embd.weight" not in tensors:
        raise invalid(f"{metadata.path.name} has no tensor 'token_embd.weight'")
    embedding = tensors["token_embd.weight"]
    ends = [metadata.tokenizer["gguf"].get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return TransformerConfig(
        family=family,
        hidden=hidden,
        layers=keys.size("block_count", limit=MAX_LAYERS),
        heads=heads,
        kv_heads=keys.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.size("feed_forward_length"),
        vocab=embedding.shape[0],
        max_positions=keys.size("context_length", limit=MAX_POSITIONS),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation="silu",
        rope=_gguf_rope(keys, head_dim),
        tied=_no_head(metadata, "output.weight"),
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family == "qwen3",
        window=keys.get("attention.sliding_window") and keys.size("attention.sliding_window"),
        dtype=STORED_DTYPES.get(embedding.dtype, "bfloat16"),
        eos_token_ids=tuple(dict.fromkeys(token_ids(ends))),
        quantized=_quantized(metadata),
    )


def _quantized(metadata: Metadata) -> str | None:
    """The ggml type that holds most bytes; None where that is a plain type. Files mix types: Q4_1 has Q6_K parts."""
    total: dict[str, int] = {}
    for info in metadata.tensors.values():
        total[info.dtype] = total.get(info.dtype, 0) + info.num_bytes
    kind = max(total, key=lambda name: total[name])
    return None if kind in STORED_DTYPES else kind


def _gguf_rope(keys: Keys, head_dim: int) -> Rope:
    """Llama 3's scaling is not in the keys: its factors are the tensor ``rope_freqs.weight``, read at load."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "none")
    if kind == "linear":
        return Rope(theta, head_dim, "linear", keys.number("rope.scaling.factor"))
    if kind not in ("none", None):
        raise unsupported(
            f"{keys.source}: '{keys.prefix}rope.scaling.type' is {kind!r:.100}, only none and linear are supported"
        )
    if keys.get("rope.scale_linear"):
        return Rope(theta, head_dim, "linear", keys.number("rope.scale_linear"))
    return Rope(theta, head_dim)


# Names of a layer's weights: ours -> (Hugging Face, GGUF).
LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
TOP_NAMES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"


def stored_name(name: str, *, gguf: bool) -> str:
    """The checkpoint's name of one of our tensors (``layers.0.q.weight``, ``embed.weight``, ...)."""
    column = 1 if gguf else 0
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{TOP_NAMES[parts[0]][column]}.{parts[1]}"
    prefix = "blk" if gguf else "model.layers"
    return f"{prefix}.{parts[1]}.{LAYER_NAMES[parts[2]][column]}.{parts[3]}"
