"""Incremental detokenisation: the text that newly drawn tokens add.

    join(push(...), ..., flush()) == tokenizer.decode(all ids)

A character may be spread over several tokens; its text comes when it is complete, so no U+FFFD is streamed that a later
token would have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.text import Tokenizer

_WINDOW = 16  # tokens decoded again with every new one, at most, while the text is whole


class Detokenizer:
    """The text of one request, as it grows."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window: decoders that treat the first token apart need some context
        self._text = ""  # of the window: what was handed out

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._tokenizer is None or not ids:
            return ""
        start = len(self._ids)
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._text):
            return ""
        delta = self._advance(text)
        if delta and len(self._ids) > _WINDOW and start:
            self._ids = self._ids[start:]
            self._text = self._tokenizer.decode(self._ids)
        return delta

    def flush(self) -> str:
        """What is still held back, a broken character included. The request has ended."""
        return self._advance(self._tokenizer.decode(self._ids)) if self._tokenizer else ""

    def _advance(self, text: str) -> str:
        delta = text[len(self._text) :]
        self._text = text
        return delta
