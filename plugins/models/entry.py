"""Entry module of the built-in architectures. Light: the models themselves are imported when chosen."""

from __future__ import annotations

from collections.abc import Iterable

from core.interfaces import Component, hookimpl

# How the layers of plugins/models/common share a model out over ranks: core/shares.py has the words.
SHARES = {
    "num_attention_heads": "even",
    "num_key_value_heads": "copied",
    "intermediate_size": "even",
    "vocab_size": "padded",
}


@hookimpl
def inferlab_components() -> Iterable[Component]:
    """The architectures that come with inferlab."""
    yield Component(
        kind="arch",
        name="llama",
        target="plugins.models.llama:Llama",
        provides={"architectures": ("LlamaForCausalLM",), "gguf_architectures": ("llama",), "shares": SHARES},
        summary="Llama 2 and 3, SmolLM2 and others of the same equations",
    )
    yield Component(
        kind="arch",
        name="qwen3",
        target="plugins.models.qwen3:Qwen3",
        provides={"architectures": ("Qwen3ForCausalLM",), "gguf_architectures": ("qwen3",), "shares": SHARES},
        summary="Qwen3, dense: Llama with RMSNorm on every query and key head",
    )
