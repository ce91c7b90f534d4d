"""`task=bench`: build the engine, run the load, write bench.json and result.json, print the table."""

from __future__ import annotations

import gc
import logging
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from core import device
from core.bench.ceilings import ceilings
from core.bench.limit import Machine, Sizes, limit_of
from core.bench.measure import Run, measure
from core.bench.metrics import medians
from core.bench.peer import VLLMPeer, import_vllm
from core.bench.pool import shrunk
from core.bench.profile import Tracer
from core.bench.records import write_lines, write_records
from core.bench.report import table
from core.bench.schedule import SCHEDULE, Recorder, schedule_lines
from core.bench.summary import flat_metrics
from core.bench.values import Hardware, Slo
from core.bench.walk import walk
from core.build import check_params
from core.config import Composed
from core.environment import environment, plugin_metrics
from core.files import write_json
from core.interfaces import PROJECT, SamplingParams
from core.llm import LLM
from core.loads import Load, draw_load
from core.resolve import Resolved, decide, describe
from core.sweep.tokens import write_tokens

log = logging.getLogger(PROJECT)
TEMPERATURE = 0.6  # where sampling.temperature is not given
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes


class Bench:
    """An engine and the loads that it runs. Runs are numbered: each number has prompts of its own."""

    def __init__(self, composed: Composed, resolved: Resolved) -> None:
        self.config = composed.config
        self.llm = LLM.from_composed(composed, resolved)
        self.resolved, self.where = self.llm.resolved, torch.device(self.llm.resolved.device)
        self.schedules: list[tuple[Run, Recorder]] = []  # of every run, where they are wanted

    def load(self, number: int) -> tuple[Load, list[SamplingParams]]:
        """Run `number`'s requests, checked; ValueError if one of them does not fit into the engine's limits."""
        encode = self.llm.tokenizer.encode if self.llm.tokenizer else None
        load = draw_load(self.config.load, number, self.resolved.checkpoint.config["vocab_size"], encode)
        params = [self._params(n) for n in load.outputs]
        for tokens, (length, _), p in zip(load.prompts, load.lengths, params, strict=True):
            limit = self.llm.engine.limit_of([0] * (length - len(tokens)) + tokens, p)
            if limit < length + p.max_tokens:
                raise ValueError(
                    f"the load has a request of {length} + {p.max_tokens} tokens, the engine takes {limit}; raise "
                    "max_model_len (or num_kv_blocks), or lower load.input_max, load.output_max or load.shared"
                )
        return load, params

    def run(self, number: int) -> dict[str, Any]:
        """One run with an empty prefix cache; its record."""
        return self.measure(number).record()

    def measure(self, number: int, tracer: Tracer | None = None) -> Run:
        """One run with an empty prefix cache."""
        load, params = self.load(number)
        self.llm.engine.kv.forget(None)
        gc.collect()
        recorder = Recorder() if self.config.bench.record_schedule else None
        run = measure(self.llm.engine, load, params, self.where, tracer.on_step if tracer else None, recorder)
        if recorder:
            self.schedules.append((run, recorder))
        return run

    def hardware(self, machine: Machine) -> Hardware:
        """What the shares of the limit refer to. machine: one device."""
        resolved = self.resolved
        sizes = Sizes.of(resolved.checkpoint.config)
        return Hardware(machine, sizes, WIDTHS[resolved.dtype], resolved.tensor_parallel_size)

    def limit(self, load: Load, machine: Machine) -> dict[str, Any]:
        """The least time that a load can take, if all of it is there at once."""
        hardware = self.hardware(machine)
        return limit_of(load.lengths, load.shared, self.resolved.limits, hardware.sizes, machine, hardware.width)

    def _params(self, tokens: int) -> SamplingParams:
        given = self.config.sampling
        params = replace(given.params(), max_tokens=tokens, ignore_eos=True, stop=(), stop_token_ids=())
        if given.temperature is None:
            params = replace(params, temperature=TEMPERATURE, given=params.given | {"temperature"})
        return check_params(params, self.resolved.choices["sampler"])


def run_job(composed: Composed, run_dir: Path, resolved: Resolved | None = None) -> dict[str, Any]:
    """Run the task; what result.json holds. bench.json holds the benchmark alone, with what it was run on."""
    for name in ("bench.json", "result.json", SCHEDULE):  # a failing run must not be taken for an older one
        (run_dir / name).unlink(missing_ok=True)
    started, share = time.perf_counter(), composed.config.gpu_memory_utilization / 2
    if composed.config.bench.peer:
        import_vllm()
        composed = replace(composed, config=replace(composed.config, gpu_memory_utilization=share))
        resolved = replace(resolved or decide(composed), gpu_memory_utilization=share)
    bench = Bench(composed, shrunk(composed, resolved or decide(composed)))
    with bench.llm as llm:
        start = time.perf_counter() - started
        summary, choices = describe(llm.resolved)
        print(summary, file=sys.stderr)
        report = {name: fact for name, fact in llm.engine.executor.report().items() if name != "padded_rows"}
        peer = VLLMPeer(llm.resolved, share) if composed.config.bench.peer else None
        runs, repeats = _repeats(bench, peer)
        trace = _traced(bench, run_dir) if composed.config.profile else None
        failed = llm.engine.observers.report()
        memory, stats = device.peak_memory(bench.where), llm.engine.stats.as_dict()
    machine = ceilings(bench.where)
    for run, record in zip(runs, repeats, strict=True):
        record["limit"] = None
        if run.load.at_once and not run.load.split:
            limit = bench.limit(run.load, machine)
            record["limit"] = {**limit, "fraction": limit["seconds"] / record["seconds"]}
    walks, slo = [walk(run) for run in runs], _slo(composed)
    if composed.config.bench.records:
        write_records(run_dir, runs, walks, slo)
    if bench.schedules:
        made_with = {kind: choices[kind]["name"] for kind in ("scheduler", "kv_allocator")}
        made_with["load"] = composed.load
        write_lines(run_dir / SCHEDULE, (line for pair in bench.schedules for line in schedule_lines(*pair, made_with)))
    head = {
        "plugins": choices,
        "settings": composed.raw,
        "environment": environment(bench.resolved.device),
        "seed": composed.config.seed,
    }
    found = {
        "load": composed.load,
        "model": bench.resolved.checkpoint.name,
        "dtype": bench.resolved.dtype,
        "device": head["environment"].get("gpu", bench.resolved.device),
        "repeats": repeats,
        "median": medians(repeats),
        "metrics": flat_metrics(runs, walks, slo, bench.hardware(machine)),
        "machine": asdict(machine),
        "memory": memory,
        "start": {"start_s": start, **report},
        "peer": {"name": "vllm", "version": peer.version, "share": share} if peer else None,
        "profile": trace,
    }
    result = {**head, "bench": found, "engine": stats, "failed_observers": failed}
    result["metrics"] = plugin_metrics(composed.registry, result)
    write_tokens(run_dir, [run.requests for run in runs])
    write_json(run_dir / "bench.json", {**head, **found})
    write_json(run_dir / "result.json", result)
    print(table(found))
    log.info("%s", run_dir / "bench.json")
    return result


def _slo(composed: Composed) -> Slo:
    settings = composed.config.bench
    return Slo(settings.slo_ttft_ms, settings.slo_tpot_ms, settings.slo_e2e_ms)


def _repeats(bench: Bench, peer: VLLMPeer | None) -> tuple[list[Run], list[dict[str, Any]]]:
    """Warm-up, then the timed runs; a peer takes its turn after each of ours, with the same prompts."""
    settings, runs, records = bench.config.bench, [], []
    numbers = [*range(settings.repeats, settings.repeats + settings.warmup), *range(settings.repeats)]
    for at, number in enumerate(tqdm(numbers, desc="runs", disable=not sys.stderr.isatty())):
        run = bench.measure(number)
        record = run.record()
        if peer:
            theirs = peer.run_load(*bench.load(number))
            record["peer"] = {**theirs, "speedup": theirs["seconds"] / record["seconds"]}
        if at >= settings.warmup:
            runs.append(run)
            records.append(record)
    return runs, records


def _traced(bench: Bench, run_dir: Path) -> dict[str, Any]:
    settings = bench.config.bench
    tracer = Tracer(settings.profile_steps)
    bench.measure(settings.repeats + settings.warmup, tracer)
    return tracer.finish(run_dir / "trace.json")
