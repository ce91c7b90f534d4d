"""The sizes of a decoder, read from config.json's words; what would change results unseen is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class DecoderSizes:
    """What the layers of a decoder are made from."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], max_len: int) -> DecoderSizes:
        """ValueError if something is missing or not supported."""
        if missing := [key for key in REQUIRED if config.get(key) is None]:
            raise ValueError(f"the model's configuration lacks {', '.join(missing)}")
        refuse_unsupported(config, max_len)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if not config.get("head_dim") and hidden % heads:
            raise ValueError(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}); give head_dim")
        return cls(
            vocab=config["vocab_size"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_size=config.get("head_dim") or hidden // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )


def refuse_unsupported(config: Mapping[str, Any], max_len: int) -> None:
    """ValueError for settings under which these equations would give other results than the checkpoint's own."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {act!r} is not supported by this architecture, only silu")
    if method := config.get("quantization_config"):
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
        raise ValueError(f"quantized checkpoints ({name}) are not supported; take the unquantized one, or a GGUF file")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < max_len and _slides(config):
        raise ValueError(
            f"sliding_window={window} is not supported below max_model_len ({max_len}); set max_model_len={window} or less"
        )


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether any layer uses the window."""
    if kinds := config.get("layer_types"):
        return any(kind != "full_attention" for kind in kinds)
    return config.get("max_window_layers", 0) < config["num_hidden_layers"]
