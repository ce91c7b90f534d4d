"""Declares the attention backends. Light: imports no torch.

`provides["auto_rank"]`: with attention=auto the highest rank wins among those whose capabilities accept the configuration.
Ranks follow what was measured (benchmarks/results/); `provides["auto_reason"]` says it in a few words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.interfaces import Component, MultipleOf, OneOf, hookimpl, setting

FLASH_PACKAGES = ("flash_attn_interface", "vllm.vllm_flash_attn", "flash_attn", "flash_attn.cute")


@dataclass
class FlashSettings:
    """Options of attention=flash."""

    provider: str = setting("auto", "the package that does the work; a named one runs or fails; auto: the first one that can")

    def __post_init__(self) -> None:
        if self.provider not in ("auto", *FLASH_PACKAGES):
            raise ValueError(f"attention.provider must be auto or {' or '.join(FLASH_PACKAGES)}, got {self.provider!r}")


@hookimpl
def inferlab_components() -> Iterable[Component]:
    """reference, sdpa, flash and triton."""
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
        provides={"auto_rank": 10, "auto_reason": "5 times as fast as reference on a CPU"},
    )
    yield Component(
        kind="attention",
        name="flash",
        target="plugins.attention.flash:Flash",
        settings=FlashSettings,
        summary="FlashAttention on NVIDIA GPUs: 3, 2, or 4 (for prompts; decodes then run the project's own Triton kernel)",
        requires=(FLASH_PACKAGES,),
        install="pip install 'inferlab[flash]'",
        capabilities={
            "device": OneOf("cuda"),
            "dtype": OneOf("bfloat16", "float16"),
            "block_size": MultipleOf(256),
        },
        prefers={"block_size": (256,)},
        provides={"auto_rank": 20, "auto_reason": "on an H200 nearly as fast as triton, far ahead of sdpa"},
        probe="plugins.attention.flash_probe:probe",
    )
    yield Component(
        kind="attention",
        name="triton",
        target="plugins.attention.triton:Triton",
        summary="the project's own Triton kernels on NVIDIA GPUs; a prefix that all requests share is read once",
        requires=("triton",),
        install="pip install 'inferlab[triton]'",
        capabilities={
            "device": OneOf("cuda"),
            "dtype": OneOf("bfloat16", "float16", "float32"),
            "head_size": OneOf(*range(16, 257, 16)),
        },
        prefers={"block_size": (256,)},
        provides={
            "auto_rank": 30,
            "auto_reason": "on an H200 decodes read KV at 4.3 TB/s, with FlashAttention-3 at 3.8",
        },
    )
