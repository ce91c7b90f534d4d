"""Incremental detokenisation: the text that newly drawn tokens add.

    join(push(...), ..., flush()) == tokenizer.decode(all ids)

A character may be spread over several tokens. Its text comes when it is complete, so what was streamed never changes. With stop
strings all of it is the text before the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.stop_strings import StopStrings

if TYPE_CHECKING:
    from core.text import Tokenizer

_BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_LONGEST = 4  # tokens that one character can take, as it has at most four bytes
_WINDOW = 16  # ids decoded again with every push


class Detokenizer:
    """The text of one request, as it grows."""

    #    given up        handed out         held back
    # |--------------|------------------|--------------|
    #                ^ ids[0]     ids[clean]       ids[-1]

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._strings = StopStrings(stop)
        self._ids: list[int] = []  # some of what was handed out stays: decoders treat the first token apart
        self._handed = ""  # text of `_ids` that was handed out
        self._clean = 0
        self._waiting = 0  # tokens since nothing was held back

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._strings.push("".join(self._push(token) for token in ids)) if self._tokenizer else ""

    def ends(self, token: int) -> bool:
        """Push a token; whether the text holds a stop string now."""
        self.push((token,))
        return self._strings.found

    def _push(self, token: int) -> str:
        assert self._tokenizer is not None
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        self._waiting += 1
        patient = self._waiting < _LONGEST
        # One unfinished character is one U+FFFD, or one per byte with decoders that fall back to bytes.
        ready = text.rstrip(_BROKEN) if patient else text.removesuffix(_BROKEN)
        if patient and not ready.startswith(self._handed):
            return ""
        delta = self._hand_out(ready)
        if ready == text:
            self._waiting = 0
        if delta and ready == text:
            self._trim()
        return delta

    def flush(self) -> str:
        """What is still held back, a broken character included. The request has ended."""
        last = self._hand_out(self._tokenizer.decode(self._ids)) if self._tokenizer else ""
        return self._strings.push(last) + self._strings.flush()

    def _hand_out(self, text: str) -> str:
        delta = text[len(self._handed) :]
        self._handed = max(self._handed, text, key=len)
        return delta

    def _trim(self) -> None:
        """All is handed out: forget old ids, up to where the text was whole before."""
        assert self._tokenizer is not None
        if len(self._ids) > _WINDOW and self._clean:
            del self._ids[: self._clean]
            self._handed = self._tokenizer.decode(self._ids)
        self._clean = len(self._ids)
