"""A model that always says the same: its greedy answer to a conversation is one known text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tests.tiny import VOCAB, make_config, make_tokenizer, make_weights, save_weights

# Characters of one to four bytes in UTF-8, most of them spread over several tokens.
TEXT = "介绍TensorRM-L: 龍🙂é!"


def make_chain(folder: Path, text: str = TEXT) -> Path:
    """Writes a checkpoint whose next token follows from the last one alone, and returns its folder.

    A line break, with which the chat template ends, is followed by ``text``, and that by the end of the answer;
    so is any other token. The tokens of ``text`` must all be different.
    """
    config = make_config(hidden_size=VOCAB, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=1)
    make_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chain = [*tokenizer.encode("\n").ids, *tokenizer.encode(text).ids]
    assert len(set(chain)) == len(chain), "a token comes twice"
    follows = np.full(VOCAB, config["eos_token_id"])
    follows[chain[:-1]] = chain[1:]
    weights = make_weights(config)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:] = 0  # the layer adds nothing
    weights["model.norm.weight"][:] = 1
    weights["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    weights["lm_head.weight"] = np.eye(VOCAB, dtype=np.float32)[follows].T.copy()
    save_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
