"""Qwen3, dense: Llama's equations with an RMSNorm on each query and key head before the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from plugins.models.common.decoder import Decoder


class Qwen3(Decoder):
    """Every model whose config.json says Qwen3ForCausalLM."""

    qk_norm: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128}
