"""Prompts and conversations to token ids, with messages that say what was given and what is missing."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from core.checkpoint import Checkpoint
from core.text import Tokenizer

Prompt = str | Sequence[int]


def encode(prompt: Any, tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> list[int]:
    """Text, or token ids as any sequence or one-dimensional array. ValueError for everything else."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"model {checkpoint.name} has no tokenizer; give token ids instead of text")
        return tokenizer.encode(prompt)
    try:
        kinds = set(map(type, prompt))
        if kinds <= {int}:  # by far the most frequent, and prompts are long
            return list(prompt)
        if bool in kinds:
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt is text or a list of token ids, got {prompt!r}") from None


def encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> list[int]:
    """A conversation, ready for an answer. ValueError if the checkpoint has no chat template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(f"model {checkpoint.name} has no chat template; use plain prompts (chat=off, LLM.generate)")
    return tokenizer.chat(messages)


def several(prompts: Any) -> list[Any]:
    """One prompt (text, or token ids) or many, as a list."""
    return [prompts] if isinstance(prompts, str) or (len(prompts) and _is_number(prompts[0])) else list(prompts)


def _is_number(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, float)  # refused later, as a token of one prompt
    return True
