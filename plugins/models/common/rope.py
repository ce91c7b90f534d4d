"""Tables of the rotary embedding: float32, one per configuration, shared by all layers, no part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DEFAULT_THETA = 10000.0


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """type, theta and the numbers of the type, wherever config.json keeps them.

    transformers 5 writes one dict `rope_parameters`; before it, `rope_theta` stood alone and `rope_scaling` held the rest.
    """
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"rope_parameters differ by layer type ({', '.join(found)}); one set for all layers is supported")
    found["type"] = found.pop("rope_type", None) or found.get("type") or "default"
    found["theta"] = float(found.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA)
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1 (every element of a head turns), got {partial!r}")
    return found


def rope_table(config: Mapping[str, Any], head_size: int, length: int, device: torch.device) -> Tensor:
    """[length, D] float32: cosines of the D / 2 frequencies at each position, then their sines."""
    settings = rope_settings(config)
    if settings["type"] not in FREQUENCIES:
        raise ValueError(f"rope type {settings['type']!r} is not known; known: {', '.join(FREQUENCIES)}")
    if head_size % 2:
        raise ValueError(f"head_dim must be even, since rotary embedding turns pairs, got {head_size}")
    frequencies = FREQUENCIES[settings["type"]](settings, config, head_size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).to(device)


def _default(settings: Mapping[str, Any], config: Mapping[str, Any], head_size: int) -> Tensor:
    return 1.0 / (settings["theta"] ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))


def _llama3(settings: Mapping[str, Any], config: Mapping[str, Any], head_size: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wanted = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in wanted if key not in settings]:
        raise ValueError(f"rope type llama3 needs {', '.join(wanted)} in rope_parameters; missing: {', '.join(missing)}")
    factor, low, high = (settings[key] for key in wanted)
    known = settings.get("original_max_position_embeddings") or config["max_position_embeddings"]
    frequencies = _default(settings, config, head_size)
    turns = known * frequencies / (2 * math.pi)  # over the length the model was first trained on
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor


FREQUENCIES = {"default": _default, "llama3": _llama3}
