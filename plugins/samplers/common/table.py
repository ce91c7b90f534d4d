"""What a sampler keeps per slot: rows written on the host, and the same rows on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Array

WORDS = 8  # of 32 bits per slot: four floats, the seed (low half first), the slot's own number, one that is unused
INVERSE, SEED, SLOT = 0, 4, 6


class SlotTable:
    """`floats` [slots, 4] and `seeds` [slots] are host views of the rows; `tensor` [slots, WORDS] int32 is the device's."""

    def __init__(self, slots: int, floats: tuple[float, float, float, float], device: torch.device) -> None:
        self._host = np.zeros((slots, WORDS), np.int32)
        self.floats, self.seeds = self._host.view(np.float32)[:, :SEED], self._host.view(np.int64)[:, SEED // 2]
        self.floats[:], self._host[:, SLOT] = floats, np.arange(slots)
        self.tensor = torch.from_numpy(self._host).to(device)  # on a CPU the same memory
        self._changed: dict[int, None] = {}

    def change(self, slot: int) -> None:
        """The host's row is another one now."""
        self._changed[slot] = None

    def flush(self) -> None:
        """Send the changed rows, if any; waits for nothing."""
        if self._changed and not on_host(self.tensor):
            rows = staged(self._host[list(self._changed)]).to(self.tensor.device, non_blocking=True)
            self.tensor.index_copy_(0, rows[:, SLOT].long(), rows)
        self._changed.clear()


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [S, WORDS] of a table -> floats [S, 4] and seeds [S]."""
    return rows.view(torch.float32)[:, :SEED], rows.view(torch.int64)[:, SEED // 2]


def on_host(tensor: Tensor) -> bool:
    """It shares its memory with numpy."""
    return tensor.device.type == "cpu"


def staged(array: Array) -> Tensor:
    """A copy in pinned memory. A fresh one each time: torch hands its memory out again only after the copy that reads it."""
    return torch.from_numpy(array).pin_memory()
