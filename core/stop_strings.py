"""Stop strings: where a growing text ends, whatever pieces it comes in.

The match that is complete first ends the text, the longest one if several are complete with the same character. So the answer
depends on the text alone, not on how tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Hands text on up to the first match. What may yet become one is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty string matches everywhere"
        self._stop = sorted(stop, key=len, reverse=True)
        self._begun = {text[:n] for text in stop for n in range(1, len(text))}  # what a match may begin with
        self._held = ""  # the longest end of the text that is one of these
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is now certain to stay; "" behind a match."""
        sure = []
        for character in "" if self.found else text:
            self._held += character
            match = next((end for end in self._stop if self._held.endswith(end)), None)
            if match is not None:
                sure.append(self._held.removesuffix(match))
                self._held, self.found = "", True
                break
            while self._held and self._held not in self._begun:
                sure.append(self._held[0])
                self._held = self._held[1:]
        return "".join(sure)

    def flush(self) -> str:
        """What is still held back. No text follows."""
        held, self._held = self._held, ""
        return held


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to its first match; all of it if there is none."""
    strings = StopStrings(stop)
    return strings.push(text) + strings.flush() if stop else text
