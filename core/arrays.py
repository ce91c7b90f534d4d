"""The type of host arrays, for annotations only: numpy is not imported, since every command would wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ForwardRef

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray
else:
    Array = ForwardRef("np.ndarray")  # `Array | None` works where annotations are evaluated, too
