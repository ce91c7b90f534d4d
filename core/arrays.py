"""The type of host arrays, for annotations, and a check of token ids. numpy is imported by those who compute only: every
command would wait for it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ForwardRef

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray
else:
    Array = ForwardRef("np.ndarray")  # `Array | None` works where annotations are evaluated, too


def all_below(tokens: list[int], bound: int) -> bool:
    """All in [0, bound). Twice as fast as min and max of the list, and a burst of prompts waits for it."""
    import numpy as np

    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max()) < bound
    except OverflowError:
        return False
