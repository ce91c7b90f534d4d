"""Architectures with one defect each: the template of `plugins new`, changed in one place. T tokens, E hidden size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Attend, DeviceContext
from core.plugins.templates.arch import MyPluginModel, Settings
from tests.broken_kit.defect import Defect

LLAMA = {"architectures": ("LlamaForCausalLM",)}


class Plain(MyPluginModel):
    """Right. Its defects need no settings."""

    def __init__(self, settings: Any, context: DeviceContext) -> None:
        super().__init__(Settings(), context)


class IgnoresPositions(Plain):
    """All tokens are rotated as the first one is."""

    def attention(self, layer: int, x: Tensor, attend: Attend) -> Tensor:
        prologue = self.prologue
        table = prologue.cos_sin[:1].expand(prologue.cos_sin.shape)
        self.prologue = replace(prologue, cos_sin=table)
        try:
            return super().attention(layer, x, attend)
        finally:
            self.prologue = prologue


class ForgetsTheActivation(Plain):
    """The gate is not activated."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"model.layers.{layer}.mlp.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"model.layers.{layer}.mlp.down_proj", gate * up)


class NormsInHalf(Plain):
    """RMSNorm is computed in the model's type, and its result is rounded to fewer bits."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        rough = (x / 8).to(torch.float8_e4m3fn).to(x.dtype) * 8 if x.dtype == torch.bfloat16 else x
        return super().norm(name, rough)


class MixesRequests(Plain):
    """All tokens of a step have a part in each other's norm."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x.float() * (x.float().square().mean() + self.eps).rsqrt()
        return scaled.to(x.dtype) * self.w[name]


class SaysOtherHeads(Plain):
    """`kv_spec` says other KV heads than its calls have."""

    def __init__(self, settings: Any, context: DeviceContext) -> None:
        super().__init__(settings, context)
        self.kv_spec = replace(self.kv_spec, num_kv_heads=self.heads)


class OneLayerTwice(Plain):
    """The second layer uses the cache of the first."""

    def attention(self, layer: int, x: Tensor, attend: Attend) -> Tensor:
        return super().attention(layer, x, lambda _, *qkv: attend(0, *qkv))


class AnswersInFloat32(Plain):
    """Logits of a model in bfloat16 are float32."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).float()


class NamesOtherTensors(Plain):
    """Names of its own for tensors of the checkpoint."""

    def weights(self) -> dict[str, tuple[int, ...]]:
        return {name.replace("q_proj", "query"): shape for name, shape in super().weights().items()}

    def attention(self, layer: int, x: Tensor, attend: Attend) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        self.w[f"{name}.q_proj"] = self.w[f"{name}.query"]
        return super().attention(layer, x, attend)


class OrphanedModel(Plain):
    """Does not say whose models it runs."""


def broken(target: type, *caught: str, says: str, **more: Any) -> Defect:
    return Defect(target, tuple(f"test_{name}" for name in caught), says, "arch", **{"provides": LLAMA, **more})


DEFECTS = [
    broken(
        IgnoresPositions,
        "logits_are_those_of_transformers",
        says=r"LlamaForCausalLM, 7 tokens: logits of row \d+ are off by",
    ),
    broken(
        ForgetsTheActivation,
        "logits_are_those_of_transformers",
        says=r"LlamaForCausalLM, \d+ tokens: logits of row \d+ are off by",
    ),
    broken(NormsInHalf, "half_precision_stays_close", says=r"relative error of bfloat16: 0\.\d+"),
    broken(
        MixesRequests,
        "requests_of_a_step_do_not_meet",
        "chunks_equal_the_whole",
        says=r"request a among \['a'.*\]: logits of row \d+ are off by",
    ),
    broken(
        SaysOtherHeads,
        "kv_spec_says_what_attention_sees",
        says=r"of the calls: \{\(6, 2, 16\)\}, kv_spec says \{\(6, 6, 16\)\}",
    ),
    broken(OneLayerTwice, "kv_spec_says_what_attention_sees", says=r"attend was called for layers \[0, 0\]"),
    broken(AnswersInFloat32, "half_precision_stays_close", says=r"logits of a model in bfloat16 are torch\.float32"),
    broken(
        NamesOtherTensors,
        "logits_are_those_of_transformers",
        says=r"weights\(\) names tensors that a checkpoint lacks: \['model\.layers\.0\.self_attn\.query\.weight'",
    ),
    broken(OrphanedModel, "it_says_whose_models_it_runs", says=r"provides=\{\"architectures\": .*\} is missing", provides={}),
]
