"""From the resolved choice of every part to a running engine."""

from __future__ import annotations

import dataclasses
from typing import Any

from core.clock import Clock
from core.engine import Engine
from core.errors import did_you_mean
from core.interfaces import Executor, HostContext, SamplingParams
from core.observers import Observers
from core.plugins import Registry
from core.resolve import Choice, Resolved

CORE_PARAMETERS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in ("extra", "given"))


def build_engine(resolved: Resolved, registry: Registry, executor: Executor | None = None) -> Engine:
    """From the resolved choices, and an executor if there is one already, to an engine that is ready."""
    clock = Clock()
    return Engine(
        **build_parts(resolved, clock, executor),
        clock=clock,
        overlap=resolved.overlap,
        vocab_size=resolved.checkpoint.config["vocab_size"],
        eos=resolved.checkpoint.stop_token_ids,
        wants_history=bool(resolved.choices["sampler"].component.provides.get("wants_history")),
        observers=Observers(registry.manager),
    )


def build_parts(resolved: Resolved, clock: Clock, executor: Executor | None = None) -> dict[str, Any]:
    """Executor (model, attention, sampler, KV pool) unless there is one, then allocator, then scheduler."""
    executor = executor or resolved.build("executor", resolved)
    assert executor is not None
    try:
        context = HostContext(resolved.limits, resolved.block_size, executor.num_blocks, clock, resolved.seed)
        kv, scheduler = resolved.build("kv_allocator", context), resolved.build("scheduler", context)
    except BaseException:
        executor.close()
        raise
    return {"scheduler": scheduler, "kv": kv, "executor": executor, "context": context}


def check_params(params: SamplingParams, sampler: Choice) -> SamplingParams:
    """Parameters of the sampler's own become typed; those that it cannot honour are refused. Raises ValueError."""
    component = sampler.component
    extra = _own_parameters(params, component.name, component.request_settings)
    for key, constraint in component.capabilities.items():
        name = key.removeprefix("sampling.")
        if name == key or name not in params.given:
            continue
        value = extra.get(name, getattr(params, name, None))
        if not constraint.ok(value):
            raise ValueError(
                f"sampler={component.name} needs {name} to be {constraint}, got {value}; "
                f"leave {name} out, or choose another sampler"
            )
    return dataclasses.replace(params, extra=extra)


def _own_parameters(params: SamplingParams, sampler: str, settings: type | None) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(settings)] if settings else []
    for name in params.extra:
        if name not in names:
            hint = did_you_mean(name, [*CORE_PARAMETERS, *names])
            known = ", ".join((*CORE_PARAMETERS, *names))
            raise ValueError(f"unknown sampling parameter {name!r} for sampler={sampler}{hint} Known: {known}")
    if settings is None:
        return {}
    checked = settings(**params.extra)
    return {name: getattr(checked, name) for name in names}
