"""Which component fills each slot, and with which values: decided once, before anything heavy is loaded.

Explicit values are never changed; `auto` ones come from intersecting what the chosen components declare. Everything that
cannot work is reported at once. The result is picklable: worker processes use it as it is and look for no plugins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core import limits as sizes
from core import machine, shares
from core.capabilities import SLOTS, Includes
from core.checkpoint import Checkpoint, open_checkpoint
from core.config import Composed, given_count
from core.errors import did_you_mean
from core.facts import asked_for, settled
from core.interfaces import Component, Constraint, Probe
from core.negotiate import Fact, Part, Ways, negotiate, show
from core.plugins import Found, Registry
from core.plugins.checks import KINDS
from core.plugins.loading import find, missing, run_probe
from core.resolved import Choice, Resolved, describe
from core.vocabulary import loads_that

__all__ = ["CapabilityError", "Choice", "Resolved", "decide", "describe", "resolve"]


class CapabilityError(ValueError):
    """The chosen components cannot run together, with this model, or on this machine."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(
            "this configuration cannot run:\n" + "\n".join(f"- {r}" for r in reasons) if reasons[1:] else reasons[0]
        )


def decide(composed: Composed, checkpoint: Checkpoint | None = None) -> Resolved:
    """Open the model's files (unless given) and resolve: everything that can refuse a run before torch is imported.

    Raises ValueError for a model that cannot be opened, else as `resolve`.
    """
    checkpoint = checkpoint or open_checkpoint(composed.config.model, seed=composed.config.seed)
    if checkpoint.folder and any(key.startswith("model.config") for key in composed.explicit):
        raise ValueError(
            f"model.config has no effect beside {checkpoint.folder}/config.json: change that file, or leave it out"
        )
    return resolve(composed, checkpoint, composed.registry)


def resolve(composed: Composed, checkpoint: Checkpoint, registry: Registry) -> Resolved:
    """Raises CapabilityError with all reasons, each with what is wanted, what was given by whom, and the way out."""
    return _Resolver(composed, checkpoint, registry).resolved()


@dataclass(frozen=True)
class _Candidate:
    """One way to fill every slot."""

    found: Mapping[str, Found]
    probes: Mapping[str, Probe]
    values: Mapping[str, Any]
    reasons: list[str]


class _Resolver:
    def __init__(self, composed: Composed, checkpoint: Checkpoint, registry: Registry) -> None:
        self.composed, self.config, self.checkpoint, self.registry = composed, composed.config, checkpoint, registry
        self.absent, self.device = "", self.config.device
        try:
            self.device = machine.pick(self.config.device)
        except ValueError as error:  # with all other reasons
            self.absent = str(error)
        self.on_cpu = self.device == "cpu"
        self.limits, self.notes, self.reasons = sizes.limits(composed, checkpoint.config, self.on_cpu)
        self.reasons = [*filter(None, [self.absent]), *self.reasons]
        self.facts = settled(composed, checkpoint, self.device, self.limits)
        self.asked = {key for found in registry.components.values() for key in found.component.capabilities}

    def resolved(self) -> Resolved:
        if self.config.graphs == "on" and self.on_cpu:
            self.reasons.append(f"graphs=on needs a GPU, got device cpu ({self.facts['device'].source}); way out: graphs=auto")
        if self.config.fusion == "on" and (self.on_cpu or find("triton") is None):
            lacks = (
                f"a GPU, got device cpu ({self.facts['device'].source})" if self.on_cpu else "triton, which is not installed"
            )
            self.reasons.append(f"fusion=on needs {lacks}; way out: fusion=auto")
        best = self._best()
        if reasons := [*self.reasons, *best.reasons]:
            raise CapabilityError(reasons)
        values, config = {**{k: f.value for k, f in self.facts.items()}, **best.values}, self.config
        return Resolved(
            choices={kind: self._choice(kind, best, values["block_size"]) for kind in KINDS},
            limits=self.limits,
            device=self.device,
            dtype=values["dtype"],
            block_size=values["block_size"],
            num_kv_blocks=given_count(config.num_kv_blocks),
            kv_memory=given_count(config.kv_memory),
            gpu_memory_utilization=config.gpu_memory_utilization,
            tensor_parallel_size=config.tensor_parallel_size,
            overlap=values["overlap"],
            graphs=values["graphs"],
            compile=bool(config.compile),
            fused=self._fused(),
            seed=config.seed,
            cpu_threads=given_count(config.cpu_threads) or machine.default_threads(),
            checkpoint=self.checkpoint,
            notes=tuple(self.notes),
            registry=self.registry,
        )

    def _fused(self) -> bool:
        """Triton comes with torch where torch has a GPU, so auto finds it there; without it the plain path is as right."""
        wanted = self.config.fusion
        return wanted == "on" or (
            wanted == "auto" and not self.on_cpu and not self.config.compile and find("triton") is not None
        )

    def _best(self) -> _Candidate:
        """The first way to fill the slots that has no reason against it, else the one with the fewest."""
        options = [self._options(kind) for kind in KINDS]
        candidates: list[_Candidate] = []
        for found in itertools.product(*options):
            candidates.append(self._candidate({f.component.kind: f for f in found}))
            if not candidates[-1].reasons:
                return candidates[-1]
        return min(candidates, key=lambda c: len(c.reasons))

    def _options(self, kind: str) -> list[Found]:
        """One option where it is named; where it is auto all that may be picked, best first."""
        name = self.composed.choices[kind]
        if name != "auto":
            return [self.registry.find(kind, name)]
        if kind == "arch":
            return [self._arch()]
        ranked = [f for f in self.registry.options(kind) if kind != "attention" or "auto_rank" in f.component.provides]
        if not ranked:
            return [self.registry.find(kind, name)]  # raises, and says what there is
        return sorted(ranked, key=lambda f: _rank(f.component))

    def _arch(self) -> Found:
        key = "gguf_architectures" if self.checkpoint.is_gguf else "architectures"
        word, options = self.checkpoint.architecture, self.registry.options("arch")
        found = [f for f in options if word in f.component.provides.get(key, ())]
        if len(found) == 1:
            return found[0]
        if found:
            raise CapabilityError(
                [f"{' and '.join(f'arch={f.component.name} ({f})' for f in found)} both offer {word}: choose one"]
            )
        known = [a for f in options for a in f.component.provides.get(key, ())]
        failed = "".join(f"\nplugin {plugin} could not be loaded: {why}" for plugin, why in self.registry.failed.items())
        raise CapabilityError(
            [
                f"no plugin offers the architecture {word!r} of {self.checkpoint.name}{did_you_mean(word, known)} Known: "
                f"{', '.join(known) or 'none'}; install a plugin for it, or force one of equal equations with arch=NAME{failed}"
            ]
        )

    def _candidate(self, found: Mapping[str, Found]) -> _Candidate:
        reasons, probes, parts = [], {}, []
        for kind, item in found.items():
            lacking = [f"{kind}={item.component.name} needs {text}" for text in missing(item.component)]
            reasons += [f"{text}; {item.component.install}".rstrip("; ") for text in lacking]
            capabilities = dict(item.component.capabilities)
            if item.component.probe and not lacking and self._device_fits(item.component):
                probes[kind] = run_probe(item.component, self._settings(kind, item))
                capabilities |= probes[kind].capabilities or {}
                reasons += [f"{kind}={item.component.name}: {probes[kind].problem}"] if probes[kind].problem else []
            parts.append(Part(item, capabilities))
        defaults = {"block_size": 16, "overlap": int(not self.on_cpu), "graphs": not self.on_cpu}
        facts = self._with_slots(found, {key for part in parts for key in part.capabilities})
        values, refused = negotiate(parts, facts, defaults, self._ways(found))
        return _Candidate(found, probes, values, [*refused, *reasons, *self._unshared(found["arch"].component)])

    def _unshared(self, arch: Component) -> list[str]:
        ranks, model = self.facts["tensor_parallel_size"], self.checkpoint
        return shares.refusal(arch.provides.get("shares", {}), model.config, ranks.value, ranks.source, model.name)

    def _with_slots(self, found: Mapping[str, Found], keys: set[str]) -> dict[str, Fact]:
        sources = {kind: self._source(kind) for kind in found}
        return self.facts | asked_for(keys | self.asked, found, sources, self.checkpoint.config)

    def _source(self, kind: str) -> str:
        """Who chose this slot's option."""
        return "auto" if self.composed.choices[kind] == "auto" else self.composed.where(kind)

    def _settings(self, kind: str, found: Found) -> Any:
        """Given for the option that is named; an option that auto picked has its defaults."""
        return found.component.settings() if self.composed.choices[kind] == "auto" else getattr(self.config, kind)

    def _device_fits(self, component: Component) -> bool:
        """A probe may import what only works on its own device."""
        wanted = component.capabilities.get("device")
        return not self.absent and (wanted is None or wanted.ok(self.facts["device"].value))

    def _ways(self, found: Mapping[str, Found]) -> Ways:
        """Other options, of the slot that is asked about and of the one that asks, under which a refusal would not stand."""

        def ways(part: Part, key: str, want: Constraint, got: Fact) -> list[str]:
            owner, _, name = key.partition(".")
            ours = self._others(
                part.found.component.kind, found, lambda c: key not in c.capabilities or c.capabilities[key].ok(got.value)
            )
            if owner == "load":
                return [*self._loads(want), *ours]
            if owner not in SLOTS:
                return ours
            theirs = self._others(owner, found, lambda c: want.ok(c.provides.get(name) if name else c.name))
            return [*theirs, *ours]

        return ways

    def _models_arch(self, present: Component, accepts: Callable[[Component], bool]) -> list[str]:
        """arch=auto, where another one was forced and the model's own would do."""
        with contextlib.suppress(CapabilityError):
            own = self._arch().component
            return ["arch=auto"] if own.name != present.name and accepts(own) else []
        return []

    def _loads(self, want: Constraint) -> list[str]:
        """Loads whose requests carry these labels; where load.labels is given, that is what to change."""
        fitting = loads_that(want.ok)[:3]
        if fitting and isinstance(want, Includes) and "load.labels" in self.composed.sources:
            return [f"load.labels=[{','.join(want.values)}]"]
        return [f"load={load}" for load in fitting]

    def _others(self, kind: str, found: Mapping[str, Found], accepts: Callable[[Component], bool]) -> list[str]:
        """The first three options of a slot but its present one: those that accept everything else too, if there are any."""
        if kind == "arch":
            return self._models_arch(found[kind].component, accepts)
        others = [f for f in self.registry.options(kind) if f.component.name != found[kind].component.name]
        others = [f for f in others if "serves_only" not in f.component.provides]
        others = [f for f in others if not missing(f.component) and accepts(f.component)]
        fitting = [f for f in others if self._fits(f, {**found, kind: f})]
        return [f"{kind}={f.component.name}" for f in sorted(fitting or others, key=lambda f: _rank(f.component))][:3]

    def _fits(self, found: Found, all_found: Mapping[str, Found]) -> bool:
        facts = self._with_slots(all_found, set())
        return all(want.ok(facts[key].value) for key, want in found.component.capabilities.items() if key in facts)

    def _choice(self, kind: str, best: _Candidate, block_size: int) -> Choice:
        found, settings = best.found[kind], self._settings(kind, best.found[kind])
        if kind == "kv_allocator":
            settings = dataclasses.replace(settings, block_size=block_size)
        probe = best.probes.get(kind, Probe())
        return Choice(
            found.component, settings, found.distribution, found.version, probe.provider, probe.version, self._why(kind, found)
        )

    def _why(self, kind: str, found: Found) -> str:
        if self.composed.choices[kind] != "auto":
            return self.composed.sources.get(kind, "default")
        if kind == "arch":
            return f"auto: the model says {self.checkpoint.architecture}"
        keys = [k for k in ("device", "dtype", "tensor_parallel_size") if k in found.component.capabilities] or ["device"]
        reason = found.component.provides.get("auto_reason")
        accepted = "auto: the best that accepts " + ", ".join(f"{k} {show(self.facts[k].value)}" for k in keys)
        return f"{accepted} ({reason})" if reason else accepted


def _rank(component: Component) -> int:
    return -component.provides.get("auto_rank", 0)
