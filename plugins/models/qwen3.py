"""Qwen3, dense: Llama's equations with an RMSNorm on each query and key head before the rotary embedding."""

from __future__ import annotations

from plugins.models.common.decoder import Decoder


class Qwen3(Decoder):
    """Every model whose config.json says Qwen3ForCausalLM."""

    qk_norm = True
    defaults = {"head_dim": 128}
