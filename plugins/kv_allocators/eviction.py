"""Which reusable block gives its room away first: an object of its own, so that an allocator can be given another order."""

from __future__ import annotations


class LeastRecentlyOffered:
    """First offered, first reused. A dict keeps insertion order, so every operation is O(1)."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def offer(self, block: int) -> None:
        """Nobody holds it any more; its content stays findable."""
        self._order[block] = None

    def withdraw(self, block: int) -> None:
        """It is held again, or has lost its content."""
        del self._order[block]

    def pop(self) -> int:
        """The block whose content is given up."""
        block = next(iter(self._order))
        del self._order[block]
        return block

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order
