"""Greedy tokens through HTTP against transformers, with the real model in float32.

The rule of docs/design.md: equal up to the first position where the reference's two best logits are closer
than ``GAP``; how often that was used is reported, and more than 2 % of the positions fail.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http.aio as httpclient

from tests.e2e.live import LiveServer
from tritium.llm.checkpoint import read_metadata
from tritium.llm.models.convert import convert
from tritium.llm.names import find_model
from tritium.llm.tokenizer import Tokenizer, load_tokenizer

GAP = 1e-3
MAX_EXCUSED = 0.02
NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child in two sentences.",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
]
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "介绍一下TensorRT-LLM",
    "Le chat est assis sur",
    "import numpy as np\n\nx = np.",
    "Q: What is 2 + 2?\nA:",
    "The quick brown fox",
    "Roses are red,",
    "In 1969, humans first",
    "<html>\n  <body>\n",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "🙂🙂🙂",
    "   ",
    "a",
    "To be, or not to be, that is",
    "Ein Haus, ein Baum und",
    "E = mc^2 means that",
    "The list of planets: Mercury, Venus,",
    "Breaking news:",
    "x" * 200,
    "word " * 300,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(read_metadata(find_model("smollm2")))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    convert(find_model("smollm2"), folder, dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def judge(model: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """The reference's best token after each prefix of our answer, and how far it is ahead of the second.

    As long as the best tokens are ours, this is the reference's own greedy continuation.
    """
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


async def served(client: httpclient.InferenceServerClient, prompt: list[int]) -> list[int]:
    values = {
        "input_ids": np.array([prompt], dtype=np.int32),
        "request_output_len": np.array([[NEW_TOKENS]], dtype=np.int32),
        "temperature": np.array([[0]], dtype=np.float32),
    }
    inputs = []
    for name, value in values.items():
        tensor = httpclient.InferInput(name, value.shape, "FP32" if value.dtype == np.float32 else "INT32")
        inputs.append(tensor.set_data_from_numpy(value))
    return (await client.infer("smollm2", inputs)).as_numpy("output_ids")[0, 0].tolist()


async def test_32_prompts_of_64_tokens(smol_server: LiveServer, tokenizer: Tokenizer, reference: Any) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    assert len(prompts) == 32
    async with httpclient.InferenceServerClient(smol_server.http, conn_limit=32, conn_timeout=600) as client:
        answers = await asyncio.gather(*(served(client, prompt) for prompt in prompts))
    compared = excused = 0
    for prompt, ours in zip(prompts, answers, strict=True):
        theirs, gaps = judge(reference, prompt, ours)
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        compared += same
        if same < len(ours):
            assert gaps[same] < GAP, f"{tokenizer.decode(prompt)!r}: {ours} is not {theirs} at {same}"
            excused += 1
        else:
            assert len(ours) == NEW_TOKENS or ours[-1] in tokenizer.eos_token_ids
    print(f"{compared} tokens equal, the rule was used {excused} times")
    assert excused <= MAX_EXCUSED * compared
