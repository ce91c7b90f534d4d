"""Llama: the shared decoder as it is, with optional biases."""

from __future__ import annotations

from torch import Tensor

from plugins.models.common.decoder import Decoder


class Llama(Decoder):
    """Llama 2 and 3, and every model whose config.json says LlamaForCausalLM."""

    def from_gguf(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of q and k back from GGUF's interleaved pairs to half-split ones, head by head."""
        heads = {"q_proj": self.sizes.heads, "k_proj": self.sizes.kv_heads}
        parts = name.split(".")
        if len(parts) < 2 or parts[-2] not in heads:
            return tensor
        pairs = tensor.reshape(heads[parts[-2]], self.sizes.head_size // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)
