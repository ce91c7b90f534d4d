"""Llama in plain PyTorch, whole in one file, with one thing to try: attention and MLP of a layer side by side.

As it is, the equations are Llama's (Touvron et al., 2023): any Llama checkpoint gives the tokens of arch=llama. With
arch.parallel=true both branches of a layer read the same input (GPT-J, Wang and Komatsuzaki, 2021); use random weights, or
weights that were trained so. This module is imported at every start of inferlab, so torch is imported where it is used.

T tokens, S rows drawn, H query heads, K KV heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.interfaces import (
    Attend,
    Component,
    DeviceContext,
    KVSpec,
    ModelArch,
    OneOf,
    Prologue,
    Weight,
    hookimpl,
    setting,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Settings:
    """Given as arch.NAME=VALUE."""

    parallel: bool = setting(False, "attention and MLP of a layer read the same input, instead of one after the other")


class MyPluginModel(ModelArch):
    """Weights are kept by the names that they have in a checkpoint."""

    def __init__(self, settings: Settings, context: DeviceContext) -> None:
        super().__init__(settings, context)
        c = context.config
        if c.get("attention_bias") or c.get("mlp_bias"):
            raise ValueError("arch=my-plugin has no biases, the checkpoint has (attention_bias, mlp_bias); use arch=llama")
        self.hidden, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.kv_heads = c.get("num_key_value_heads") or self.heads
        self.head_size = c.get("head_dim") or self.hidden // self.heads
        self.eps, self.tied = c.get("rms_norm_eps", 1e-6), c.get("tie_word_embeddings", False)
        self.kv_spec = KVSpec(c["num_hidden_layers"], self.heads, self.kv_heads, self.head_size, context.dtype)
        table = rope_table(c, self.head_size, context.limits.max_model_len).to(context.device)
        self.prologue = Prologue(None, None, self.eps, table)  # the core rotates q and k by it
        self.w: dict[str, Tensor] = {}

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        c, e, d = self.context.config, self.hidden, self.head_size
        layer = {
            "input_layernorm": (e,),
            "self_attn.q_proj": (self.heads * d, e),
            "self_attn.k_proj": (self.kv_heads * d, e),
            "self_attn.v_proj": (self.kv_heads * d, e),
            "self_attn.o_proj": (e, self.heads * d),
            "post_attention_layernorm": (e,),
            "mlp.gate_proj": (c["intermediate_size"], e),
            "mlp.up_proj": (c["intermediate_size"], e),
            "mlp.down_proj": (e, c["intermediate_size"]),
        }
        whole = {"model.embed_tokens": (c["vocab_size"], e), "model.norm": (e,)}
        whole |= {} if self.tied else {"lm_head": (c["vocab_size"], e)}
        whole |= {f"model.layers.{i}.{name}": shape for i in range(self.kv_spec.num_layers) for name, shape in layer.items()}
        return {f"{name}.weight": shape for name, shape in whole.items()}

    def load(self, tensors: Iterator[tuple[str, Weight]]) -> None:
        for name, tensor in tensors:
            self.w[name.removesuffix(".weight")] = tensor[:].to(self.context.device, self.context.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.w["model.embed_tokens"][tokens]
        for i in range(self.kv_spec.num_layers):
            attended = self.attention(i, self.norm(f"model.layers.{i}.input_layernorm", x), attend)
            middle = x if self.settings.parallel else x + attended
            changed = self.mlp(i, self.norm(f"model.layers.{i}.post_attention_layernorm", middle))
            x = x + attended + changed
        return self.norm("model.norm", x)

    def attention(self, layer: int, x: Tensor, attend: Attend) -> Tensor:
        """[T, E] -> [T, E]; which positions a token sees, and where keys are kept, is the business of `attend`."""
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(f"{name}.{part}_proj", x).unflatten(1, (-1, self.head_size)) for part in "qkv")
        return self.linear(f"{name}.o_proj", attend(layer, q, k, v, self.prologue).flatten(1))

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)), [T, E] -> [T, E]"""
        gate, up = (self.linear(f"model.layers.{layer}.mlp.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"model.layers.{layer}.mlp.down_proj", gate * gate.sigmoid() * up)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm, in float32."""
        scaled = x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled.to(x.dtype) * self.w[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name].T

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("model.embed_tokens" if self.tied else "lm_head", hidden)

    def from_gguf(self, name: str, tensor: Tensor) -> Tensor:
        """Files in GGUF keep the rows of q and k in interleaved pairs; here a head's first half turns with its second."""
        part = name.split(".")[-2]
        if part not in ("q_proj", "k_proj"):
            return tensor
        heads = self.heads if part == "q_proj" else self.kv_heads
        return tensor.reshape(heads, self.head_size // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def rope_table(config: Mapping[str, Any], head_size: int, length: int) -> Tensor:
    """[length, D] float32: cosines of D / 2 angles for each position, then their sines."""
    import torch

    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if kind == "llama3":  # slow waves are stretched by `factor`, fast ones kept, those between interpolated
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / rope["factor"]
    elif kind != "default":
        raise ValueError(f"arch=my-plugin knows the rope types default and llama3, the checkpoint has {kind!r}; use arch=llama")
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="arch",
        name="my-plugin",
        target="my_plugin:MyPluginModel",
        settings=Settings,
        summary="Llama in plain PyTorch; arch.parallel=true puts attention and MLP side by side",
        # A word of its own in config.json. Llama checkpoints stay with arch=llama unless arch=my-plugin is given.
        provides={"architectures": ("MyPluginForCausalLM",)},
        capabilities={"tensor_parallel_size": OneOf(1)},
        api=(1, 0),
    )
