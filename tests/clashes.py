"""Every kind of component against every key of a capability: declarations, and what the resolver says of them. Loads no torch.

One composition serves all pairs: a component is put into the registry and into its slot, and all is resolved again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from core.capabilities import AtLeast, Constraint, Includes, OneOf
from core.checkpoint import Checkpoint
from core.config import Composed, compose
from core.interfaces import Component, KVSettings, NoSettings
from core.plugins import Found
from core.plugins.checks import KINDS
from core.resolve import CapabilityError, Resolved, resolve

GIVEN = (
    *("task=bench", "device=cpu", "load=offline", "kv_allocator.block_size=16", "graphs=off", "overlap=0"),
    *("sampling.temperature=0.5", "attention=sdpa", "tensor_parallel_size=1"),
)
KEYS: dict[str, tuple[Constraint, Constraint]] = {  # key -> what this run does not fulfil, and what it does
    "block_size": (OneOf(48), OneOf(16)),
    "dtype": (OneOf("float16"), OneOf("float32")),
    "device": (OneOf("cuda"), OneOf("cpu")),
    "head_size": (OneOf(128), OneOf(16)),
    "graphs": (OneOf(True), OneOf(False)),
    "overlap": (OneOf(1), OneOf(0)),
    "tensor_parallel_size": (AtLeast(2), OneOf(1)),
    "max_model_len": (AtLeast(5000), AtLeast(4000)),
    "max_num_seqs": (AtLeast(50_000), AtLeast(8)),
    "max_num_batched_tokens": (AtLeast(500_000), AtLeast(8)),
    "load.labels": (Includes("shoe_size"), Includes("client")),
    "model.hidden_size": (OneOf(7), OneOf(64)),
    "sampling.temperature": (OneOf(1.0), OneOf(0.5)),
    "scheduler": (OneOf("mixed"), OneOf("fcfs")),
    "kv_allocator": (OneOf("paged"), OneOf("block_hash")),
    "attention": (OneOf("reference"), OneOf("sdpa")),
    "arch": (OneOf("qwen3"), OneOf("llama")),
    "sampler": (OneOf("greedy"), OneOf("gumbel")),
    "executor": (OneOf("workers"), OneOf("local")),
    "scheduler.lookahead": (OneOf(True), OneOf(None)),
    "kv_allocator.prefix_cache": (OneOf("never"), OneOf(True)),
    "attention.window": (OneOf(True), OneOf(None)),
    "arch.experts": (OneOf(True), OneOf(None)),
    "sampler.grammar": (OneOf(True), OneOf(None)),
    "executor.remote": (OneOf(True), OneOf(None)),
}
OPEN = {"block_size": (OneOf(48), OneOf(32)), "overlap": (OneOf(1), OneOf(0)), "graphs": (OneOf(True), OneOf(False))}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8192}


class NoWeights:
    """A source that must not be asked."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"weights were touched: {name}")


def pairs() -> Iterator[tuple[str, str]]:
    """(kind, key): all of them but what a component would say of its own slot."""
    return ((kind, key) for kind in KINDS for key in KEYS if key.partition(".")[0] != kind)


@lru_cache
def composed(*overrides: str) -> Composed:
    return compose([*overrides])


def resolved(base: Composed, declared: Mapping[str, Mapping[str, Constraint]], **chosen: str) -> Resolved:
    """With a component `acme` in every slot of `declared`. chosen: options of other slots."""
    components, choices = dict(base.registry.components), dict(base.choices) | chosen
    for kind, capabilities in declared.items():
        settings = KVSettings if kind == "kv_allocator" else NoSettings
        component = Component(kind, "acme", "acme:Acme", settings, capabilities=capabilities)
        components[kind, "acme"] = Found(component, "acme", "acme", "1.0", "wheel")
        choices[kind] = chosen.get(kind, "acme")
    checkpoint: Any = Checkpoint(CONFIG, "LlamaForCausalLM", False, "fake", NoWeights())  # type: ignore[arg-type]
    return resolve(replace(base, choices=choices), checkpoint, replace(base.registry, components=components))


def reasons(base: Composed, declared: Mapping[str, Mapping[str, Constraint]], **chosen: str) -> list[str]:
    """Why this cannot run; nothing if it can."""
    try:
        resolved(base, declared, **chosen)
    except CapabilityError as error:
        return error.reasons
    return []


def refusals() -> Iterator[tuple[str, str, list[str], list[str]]]:
    """(kind, key, reasons where it is not fulfilled, reasons where it is)."""
    base = composed(*GIVEN)
    for kind, key in pairs():
        no, yes = KEYS[key]
        yield kind, key, reasons(base, {kind: {key: no}}), reasons(base, {kind: {key: yes}})
