"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Stats:
    """Counted since the engine was built. Equality of tokens cannot see waste; these can."""

    steps: int = 0
    tokens: int = 0  # computed positions
    decode_tokens: int = 0  # of these, in chunks of one that draw
    cached_tokens: int = 0  # prompt positions found in the cache at first admission
    evictions: int = 0
    surplus: int = 0  # drawn after the request had ended
    drafted: int = 0
    accepted: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
