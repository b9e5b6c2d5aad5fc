"""Text in, token ids out, and back: tokenizers of every checkpoint format, chat templates, incremental decoding.

Reading order: ``vocabulary`` (what a token is), ``codec`` (how text becomes ids), the three readers
``from_json``, ``from_gguf`` and ``from_sentencepiece``, then ``tokenizer`` which holds them together,
``detokenizer``, ``chat_template`` and the ``sandbox`` it renders in. ``to_files`` is the way back: a GGUF file's
tokenizer as the files of a folder.
"""

from tritium.llm.tokenizer.detokenizer import Detokenizer
from tritium.llm.tokenizer.to_files import generation_ids, tokenizer_files
from tritium.llm.tokenizer.tokenizer import Tokenizer, TokenizerSource, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "TokenizerSource", "generation_ids", "load_tokenizer", "tokenizer_files"]
