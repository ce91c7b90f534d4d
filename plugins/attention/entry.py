"""Declares the attention backends. Light: imports no torch.

`provides["auto_rank"]`: with attention=auto the highest rank wins among those whose capabilities accept the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.interfaces import Component, MultipleOf, OneOf, hookimpl

FLASH_PACKAGES = ("flash_attn_interface", "vllm.vllm_flash_attn", "flash_attn", "flash_attn.cute")


@hookimpl
def inferlab_components() -> Iterable[Component]:
    """reference, sdpa and flash."""
    yield Component(
        kind="attention",
        name="reference",
        target="plugins.attention.reference:Reference",
        summary="plain PyTorch, one chunk at a time: the definition that the others are tested against",
        capabilities={"graphs": OneOf(False)},
        prefers={"block_size": (16,)},
        provides={"auto_rank": 0},
    )
    yield Component(
        kind="attention",
        name="sdpa",
        target="plugins.attention.sdpa:Sdpa",
        summary="batched matmul and PyTorch's scaled_dot_product_attention: fast on a CPU, right on any device",
        capabilities={"graphs": OneOf(False)},
        prefers={"block_size": (16,)},
        provides={"auto_rank": 10},
    )
    yield Component(
        kind="attention",
        name="flash",
        target="plugins.attention.flash:Flash",
        summary="FlashAttention on NVIDIA GPUs",
        requires=(FLASH_PACKAGES,),
        install="pip install 'inferlab[flash]'",
        capabilities={
            "device": OneOf("cuda"),
            "dtype": OneOf("bfloat16", "float16"),
            "block_size": MultipleOf(256),
        },
        prefers={"block_size": (256,)},
        provides={"auto_rank": 20},
        probe="plugins.attention.flash_probe:probe",
    )
