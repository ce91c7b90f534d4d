"""Offline generation, the way nano-vLLM's own example does it.

python examples/offline.py [MODEL [MAX_TOKENS]]     # a preset, a directory, a .gguf file or a hub id; default: smollm2
"""

import sys

from core.llm import LLM, SamplingParams


def main(path: str = "smollm2", max_tokens: str = "256") -> None:
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=int(max_tokens))
    prompts = ["introduce yourself", "list all prime numbers within 100"]
    chats = [llm.chat_tokens([{"role": "user", "content": prompt}]) for prompt in prompts]
    outputs = llm.generate(chats, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
