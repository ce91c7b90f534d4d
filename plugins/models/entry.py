"""Entry module of the built-in architectures. Light: the models themselves are imported when chosen."""

from __future__ import annotations

from collections.abc import Iterable

from core.interfaces import Component, hookimpl


@hookimpl
def inferlab_components() -> Iterable[Component]:
    """The architectures that come with inferlab."""
    yield Component(
        kind="arch",
        name="llama",
        target="plugins.models.llama:Llama",
        provides={"architectures": ("LlamaForCausalLM",), "gguf_architectures": ("llama",)},
        summary="Llama 2 and 3, SmolLM2 and others of the same equations",
    )
    yield Component(
        kind="arch",
        name="qwen3",
        target="plugins.models.qwen3:Qwen3",
        provides={"architectures": ("Qwen3ForCausalLM",), "gguf_architectures": ("qwen3",)},
        summary="Qwen3, dense: Llama with RMSNorm on every query and key head",
    )
