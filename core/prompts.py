"""The prompts of `core.run`: from the command line, a text file (one a line) or JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.checkpoint import Checkpoint
from core.config import Composed
from core.encoding import encode, encode_chat
from core.interfaces import SamplingParams


@dataclass(frozen=True)
class Question:
    """One prompt: text, token ids, or a conversation."""

    name: str  # for messages: "prompt 2", "prompts.jsonl line 4"
    text: str | None
    tokens: list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams

    @property
    def shown(self) -> str:
        """What the terminal calls it."""
        return self.text or (self.messages[-1].get("content", "") if self.messages else f"{len(self.tokens or [])} token ids")


@dataclass(frozen=True)
class Encoded:
    """Token ids of a question, and whether the checkpoint's chat template made them."""

    tokens: list[int]
    templated: bool


def encode_question(question: Question, checkpoint: Checkpoint, chat: str) -> Encoded:
    """Text goes through the chat template if there is one (chat=auto) or always (chat=on). ValueError names the question."""
    tokenizer = checkpoint.tokenizer()
    template = tokenizer is not None and tokenizer.has_chat_template
    templated = question.messages is not None or (question.text is not None and (chat == "on" or (chat == "auto" and template)))
    try:
        if templated:
            messages = question.messages or [{"role": "user", "content": question.text}]
            return Encoded(encode_chat(messages, tokenizer, checkpoint), True)
        return Encoded(encode(question.text if question.text is not None else question.tokens, tokenizer, checkpoint), False)
    except ValueError as error:
        raise ValueError(f"{question.name}: {error}") from None


def read_questions(composed: Composed) -> list[Question]:
    """Raises ValueError with file and line."""
    config = composed.config
    if {"prompts", "prompts_file"} <= composed.explicit:
        raise ValueError(f"prompts and prompts_file={config.prompts_file} were both given: leave one out")
    params = config.sampling.params()
    if config.prompts_file is None:
        return [Question(f"prompt {i}", text, None, None, params) for i, text in enumerate(config.prompts)]
    path = Path(config.prompts_file).expanduser()
    if not path.is_file():
        raise ValueError(f"prompts_file={config.prompts_file}: no such file")
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"prompts_file={config.prompts_file}: must end in .txt (a prompt a line) or .jsonl")
    return list(_lines(path, params))


def _lines(path: Path, params: SamplingParams) -> Iterator[Question]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name = f"{path.name} line {number}"
        if path.suffix == ".txt":
            yield Question(name, line, None, None, params)
            continue
        try:
            yield _from_json(name, json.loads(line), params)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _from_json(name: str, row: Any, params: SamplingParams) -> Question:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('each line is an object with either "prompt" (text or token ids) or "messages"')
    row = dict(row)
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    if prompt is not None and not isinstance(prompt, str) and not _are_ids(prompt):
        raise ValueError(f'"prompt" must be text or a list of token ids, got {prompt!r}')
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages) and messages):
        raise ValueError(f'"messages" must be a list of objects with role and content, got {messages!r}')
    if hidden := row.keys() & {"extra", "given"}:
        raise ValueError(f"unknown sampling parameter {min(hidden)!r}")
    text, tokens = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    return Question(name, text, tokens, messages, _with(params, row))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def _with(params: SamplingParams, row: dict[str, Any]) -> SamplingParams:
    """The run's parameters, with those of the line in their place."""
    base = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    base["given"] = params.given | row.keys()
    return SamplingParams(**{**base, **{name: value for name, value in row.items() if value is not None}})
