"""What is settled before the slots are filled: the machine, the model, the limits, and everything given explicitly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from core import limits as sizes
from core.capabilities import SLOTS
from core.checkpoint import Checkpoint
from core.config import Composed
from core.interfaces import Limits
from core.loads import filled_labels
from core.negotiate import Fact
from core.plugins import Found


def settled(composed: Composed, checkpoint: Checkpoint, device: str, limits: Limits) -> dict[str, Fact]:
    """Key of a capability -> its value. device: "cpu", or kind:index."""
    config, where, kind = composed.config, composed.where, device.partition(":")[0]
    on_cpu = kind == "cpu"
    dtype = config.dtype if config.dtype != "auto" else ("float32" if on_cpu else checkpoint.dtype)
    why = "default on a CPU" if on_cpu else "of the checkpoint"
    chosen = "device=auto finds no other here" if config.device == "auto" and on_cpu else f"device={config.device}"
    facts = {
        "device": Fact(kind, chosen),
        "dtype": Fact(dtype, why if config.dtype == "auto" else where("dtype")),
        "tensor_parallel_size": Fact(config.tensor_parallel_size, where("tensor_parallel_size")),
        **{name: Fact(getattr(limits, name), where(name)) for name in Limits.__slots__},
    }
    if size := sizes.head_size(checkpoint.config):
        facts["head_size"] = Fact(size, "of the model")
    if config.overlap != "auto":
        facts["overlap"] = Fact(config.overlap, where("overlap"))
    if config.graphs != "auto":
        facts["graphs"] = Fact(config.graphs == "on", where("enforce_eager" if config.enforce_eager else "graphs"))
    if (block_size := config.kv_allocator.block_size) != "auto":
        facts["block_size"] = Fact(block_size, where("kv_allocator.block_size"))
    if config.task == "bench":
        source = "load.labels" if "load.labels" in composed.sources else "load"
        facts["load.labels"] = Fact(tuple(sorted(filled_labels(config.load))), f"load={composed.load}, {where(source)}")
    given = config.sampling.params().given
    values = {**{name: getattr(config.sampling, name, None) for name in given}, **config.sampling.theirs}
    return facts | {f"sampling.{name}": Fact(values[name], where(f"sampling.{name}")) for name in given}


def asked_for(
    keys: Iterable[str], found: Mapping[str, Found], reasons: Mapping[str, str], model: Mapping[str, Any]
) -> dict[str, Fact]:
    """Those of `keys` that are about what fills a slot or about a word of the model's config. reasons: why each was chosen."""
    facts = {}
    for key in keys:
        owner, _, name = key.partition(".")
        if owner == "model" and name:
            facts[key] = Fact(model.get(name), "of the model")
        elif owner in SLOTS:
            component = found[owner].component
            facts[key] = (
                Fact(component.provides.get(name), f"{owner}={component.name}, {reasons[owner]}")
                if name
                else Fact(component.name, reasons[owner])
            )
    return facts
