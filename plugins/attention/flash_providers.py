"""The packages that FlashAttention comes in, behind one vocabulary. Light: torch and the packages are imported when used.

Signatures differ by package and version; everything else of the backend is the same. The cache of a layer is two tensors
[blocks, block_size, K, D]. t tokens and n chunks of a share, H query heads, K KV heads, D head size, M blocks of a row.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from core.interfaces import Constraint, KVSpec, MultipleOf, OneOf

if TYPE_CHECKING:
    from torch import Tensor

SPLIT_TOKENS = 512  # queries up to which FA3 may split the KV of prompts: its float32 partial results take t * H * D * splits


@dataclass(frozen=True)
class UpTo(MultipleOf):
    """A multiple of `n`, at most `most`."""

    most: int

    def ok(self, value: Any) -> bool:
        return super().ok(value) and value <= self.most

    def __str__(self) -> str:
        return f"{super().__str__()}, at most {self.most}"


@dataclass(slots=True)
class Share:
    """Neighbouring chunks that go to the device in one call; bounds are known on the host."""

    cu_q: Tensor  # [n + 1] int32, from 0
    kv_lens: Tensor  # [n] int32
    table: Tensor  # [n, M] int32
    tokens: int  # t
    max_q: int
    max_kv: int
    extra: Any = None  # what the provider's plan computed for all layers


class Provider(ABC):
    """One package. `decode` gets chunks of one token, `prefill` all others; both see a cache that holds the new tokens."""

    name: ClassVar[str]  # the module, and the word for attention.provider
    label: ClassVar[str]
    marker: ClassVar[str]  # the module that tells this package from others of the same name
    distributions: ClassVar[tuple[str, ...]]
    gpus: ClassVar[tuple[int, ...]]  # major compute capabilities
    tried: ClassVar[bool] = False  # the GPU tests of this repository ran with it
    block_sizes: ClassVar[Constraint]
    head_sizes: ClassVar[Constraint] = UpTo(8, 256)
    whole_blocks_from: ClassVar[int | None] = None
    """Block size from which prompts load whole blocks: what lies behind a chunk's last value then meets a weight of 0, which
    NaN survives (https://github.com/Dao-AILab/flash-attention/issues/2374)."""

    def __init__(self, spec: KVSpec, block_size: int) -> None:
        self.spec, self.block_size = spec, block_size
        self.module = self.load()

    @classmethod
    def load(cls) -> Any:
        """Import the package; any exception means that it cannot be used."""
        return importlib.import_module(cls.name)

    @classmethod
    def capabilities(cls) -> dict[str, Constraint]:
        """What replaces the component's declaration."""
        return {
            "dtype": OneOf("bfloat16", "float16"),
            "block_size": cls.block_sizes,
            "head_size": cls.head_sizes,
        }

    def plan_decode(self, share: Share, former: Any) -> Any:
        """Once per step, without waiting for the device: share.extra. `former` is what it answered for the same captured
        batch, to be refreshed in place, else None."""
        return None

    def plan_prefill(self, share: Share) -> Any:
        """Once per step, without waiting for the device: share.extra."""
        return None

    @abstractmethod
    def decode(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        """[n, H, D] -> the same."""

    @abstractmethod
    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        """[t, H, D] -> the same; token i of a chunk sees all positions up to its own."""


class Fa3(Provider):
    """What both packages of FlashAttention-3 share: the tile scheduler's plan is made once per step, not per layer."""

    label = "FlashAttention-3"
    gpus = (9,)
    block_sizes = MultipleOf(16)
    whole_blocks_from = 64

    def bound(self, share: Share) -> int:
        """The largest KV length that the kernel assumes; plan and call must agree on it."""
        return share.max_kv

    def splits(self, share: Share) -> int:
        """0: as many as the package finds good, 1: none; the same in plan and call."""
        return 0 if share.max_q == 1 or share.tokens <= SPLIT_TOKENS else 1

    def plan_decode(self, share: Share, former: Tensor | None) -> Tensor:
        metadata = self.plan_prefill(share)
        return metadata if former is None else former.copy_(metadata)

    def plan_prefill(self, share: Share) -> Tensor:
        spec = self.spec
        return self.module.get_scheduler_metadata(
            batch_size=len(share.kv_lens),
            max_seqlen_q=share.max_q,
            max_seqlen_k=self.bound(share),
            num_heads_q=spec.num_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            cache_seqlens=share.kv_lens,
            qkv_dtype=spec.dtype,
            cu_seqlens_q=share.cu_q,
            page_size=self.block_size,
            causal=True,
            num_splits=self.splits(share),
        )

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        return self.prefill(q, keys, values, share)


class FlashAttn3(Fa3):
    """FlashAttention-3 from its own repository, folder hopper/."""

    name = marker = "flash_attn_interface"
    distributions = ("flash_attn_3", "flash_attn_interface", "flashattn_hopper")

    def bound(self, share: Share) -> int:
        return share.table.shape[1] * self.block_size  # the call below takes none and assumes this

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        return self.module.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=share.kv_lens,
            page_table=share.table,
            cu_seqlens_q=share.cu_q,
            max_seqlen_q=share.max_q,
            softmax_scale=self.spec.scale,
            causal=True,
            scheduler_metadata=share.extra,
            num_splits=self.splits(share),
        )


class Vllm(Fa3):
    """FlashAttention-3 as built into the wheel of vllm."""

    name = "vllm.vllm_flash_attn"
    marker = "vllm.vllm_flash_attn._vllm_fa3_C"
    distributions = ("vllm",)
    tried = True

    @classmethod
    def load(cls) -> Any:
        module = super().load()
        if not getattr(module, "FA3_AVAILABLE", True):
            raise ImportError(getattr(module.flash_attn_interface, "FA3_UNAVAILABLE_REASON", "no FlashAttention-3 in it"))
        return module

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        return self.module.flash_attn_varlen_func(
            q,
            keys,
            values,
            max_seqlen_q=share.max_q,
            cu_seqlens_q=share.cu_q,
            max_seqlen_k=self.bound(share),
            seqused_k=share.kv_lens,
            softmax_scale=self.spec.scale,
            causal=True,
            block_table=share.table,
            scheduler_metadata=share.extra,
            num_splits=self.splits(share),
            fa_version=3,
        )


class FlashAttn2(Provider):
    """FlashAttention-2."""

    name, label = "flash_attn", "FlashAttention-2"
    marker = "flash_attn.flash_attn_interface"
    distributions = ("flash_attn",)
    gpus = (8, 9, 10, 11, 12)
    block_sizes = MultipleOf(256)

    def plan_prefill(self, share: Share) -> Tensor:
        """[n + 1] int32: the varlen call takes cumulative lengths."""
        total = share.kv_lens.new_zeros(len(share.kv_lens) + 1)
        total[1:] = share.kv_lens.cumsum(0)
        return total

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        return self.module.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=share.kv_lens,
            block_table=share.table,
            softmax_scale=self.spec.scale,
            causal=True,
        )[:, 0]

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        return self.module.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=share.cu_q,
            cu_seqlens_k=share.extra,
            max_seqlen_q=share.max_q,
            max_seqlen_k=share.max_kv,
            softmax_scale=self.spec.scale,
            causal=True,
            block_table=share.table,
        )


class FlashAttn4(Provider):
    """FlashAttention-4 for prompts. On Hopper it refuses to split KV, so decodes take the project's own kernel."""

    name, label = "flash_attn.cute", "FlashAttention-4 for prompts, the project's own Triton kernel for decodes"
    marker = "flash_attn.cute.interface"
    distributions = ("flash-attn-4",)
    gpus = (9, 10, 11)
    block_sizes = MultipleOf(16)
    head_sizes = OneOf(64, 96, 128)
    whole_blocks_from = 64

    def plan_decode(self, share: Share, former: Any) -> Any:
        """(how the work is cut, where its parts wait)"""
        import torch

        from plugins.attention.kernels.decode import Scratch, shape_for

        if former is not None:
            return former
        spec, device = self.spec, share.kv_lens.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        pairs = share.tokens * spec.num_kv_heads
        shape = shape_for(pairs, spec.head_size, spec.dtype.itemsize, share.max_kv, processors)
        return shape, Scratch.make(share.tokens, shape.splits, spec, device)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        from plugins.attention.kernels.decode import decode

        out = q.new_empty(q.shape)
        heads_first = keys.transpose(1, 2), values.transpose(1, 2)
        decode(q, *heads_first, share.table, share.kv_lens, out, self.spec.scale, *share.extra)
        return out

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, share: Share) -> Tensor:
        out, _ = self.module.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=share.cu_q,
            max_seqlen_q=share.max_q,
            max_seqlen_k=share.max_kv,
            seqused_k=share.kv_lens,
            page_table=share.table,
            softmax_scale=self.spec.scale,
            causal=True,
        )
        return out
