"""The metrics of one run, by name. The name ends with the unit where there is one. Definitions: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from core.bench.fairness import jain, service_gap
from core.bench.limit import Machine, Sizes
from core.bench.measure import Run, exposed_gap
from core.bench.metrics import Received
from core.bench.walk import Walk, flop, moved
from core.interfaces import Request

Values = dict[str, tuple[float, str]]  # name -> value, unit
Pools = dict[str, tuple[list[list[float]], str]]  # name -> values of each request, unit
QUEUE_SLACK = 1.0  # requests by which a queue must be longer before it is said to grow


@dataclass(frozen=True)
class Slo:
    """What a request must meet to count as good; None: not asked for. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> bool:
        return any(bound is not None for bound in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def met(self, seen: Received) -> bool:
        """All bounds hold; TPOT is not asked of a single token."""
        values = ((seen.ttft, self.ttft_ms), (seen.tpot, self.tpot_ms), (seen.e2e, self.e2e_ms))
        return all(bound is None or value is None or value * 1e3 <= bound for value, bound in values)


@dataclass(frozen=True)
class Hardware:
    """What MFU and MBU are shares of."""

    machine: Machine  # of one rank
    sizes: Sizes
    width: int  # bytes per number
    ranks: int = 1


def distributions(run: Run) -> Pools:
    """One list per request: a single number, or none, or (gaps between tokens) many."""
    seen = run.received
    return {
        "ttft_ms": ([[r.ttft * 1e3] for r in seen], "ms"),
        "tpot_ms": ([[r.tpot * 1e3] if r.tpot is not None else [] for r in seen], "ms"),
        "itl_ms": ([[gap * 1e3 for gap in r.gaps] for r in seen], "ms"),
        "e2e_ms": ([[r.e2e * 1e3] for r in seen], "ms"),
        "normalised_ms": ([[r.normalised * 1e3] for r in seen], "ms"),
        "send_late_ms": ([[late * 1e3] for late in run.late], "ms"),
        "step_ms": ([[(step.end - step.at) * 1e3] for step in run.steps if step.launched], "ms"),
    }


def scalars(run: Run, walked: Walk, slo: Slo, hardware: Hardware | None = None) -> Values:
    """Numbers of the whole run; what is not defined for it is left out."""
    return {
        **_rates(run),
        **_good(run, slo),
        **_cache(run),
        **_waste(run, walked),
        **_steps(run),
        **(_utilisation(run, walked, hardware) if hardware else {}),
        **_fairness(run, walked),
        **_saturation(run, walked),
    }


def _rates(run: Run) -> Values:
    load, seconds = run.load, run.seconds
    return {
        "duration_s": (seconds, "s"),
        "throughput_tok_s": (load.output_tokens / seconds, "tok/s"),
        "total_tok_s": ((load.input_tokens + load.output_tokens) / seconds, "tok/s"),
        "throughput_req_s": (len(run.requests) / seconds, "req/s"),
    }


def _good(run: Run, slo: Slo) -> Values:
    found: Values = {}
    if slo.given:
        good = sum(map(slo.met, run.received))
        found["goodput_req_s"] = good / run.seconds, "req/s"
        found["attainment"] = good / len(run.requests), ""
    bounds = [(seen, request.labels["deadline"]) for seen, request in _pairs(run) if "deadline" in request.labels]
    if bounds:
        found["deadline_attainment"] = sum(seen.events[-1][0] <= bound for seen, bound in bounds) / len(bounds), ""
    return found


def _pairs(run: Run) -> Iterator[tuple[Received, Request]]:
    return zip(run.received, run.requests, strict=True)


def _cache(run: Run) -> Values:
    """Use of the pool, weighted with time; hits weighted with tokens."""
    hits = sum(request.metrics.cached_tokens for request in run.requests)
    found: Values = {"hit_rate": (hits / sum(request.num_prompt for request in run.requests), "")}
    samples = [(step.end, *step.kv) for step in run.steps if step.kv is not None]
    total = evictable = weight = 0.0
    until = [*(at for at, *_ in samples[1:]), run.start + run.seconds]
    for (at, _, reusable, held), end in zip(samples, until, strict=False):
        weight += end - at
        total += (held + reusable) * (end - at)
        evictable += reusable * (end - at)
    if weight > 0:
        found["kv_use"] = total / weight / run.num_blocks, ""
        found["kv_evictable"] = evictable / weight / run.num_blocks, ""
    return found


def _waste(run: Run, walked: Walk) -> Values:
    found: Values = {
        "preemptions": (run.counts["evictions"], ""),
        "recomputed_tokens": (int(walked.recomputed.sum()), "tokens"),
        "steps": (run.counts["steps"], ""),
    }
    return found | ({} if run.padded_rows is None else {"padded_rows": (run.padded_rows, "rows")})


def _steps(run: Run) -> Values:
    """Mean microseconds per launched step."""
    working = [step for step in run.steps if step.worked]
    launched = [step for step in working if step.launched]
    count = len(launched)
    found: Values = {
        f"step_{part}_us": (sum(getattr(step, part) for step in working) / count * 1e6, "us")
        for part in ("schedule", "prepare", "launch", "wait", "commit")
    }
    spans = [step.gpu for step in launched if step.gpu is not None]
    if spans:
        found["step_gpu_us"] = sum(spans) / len(spans) * 1e6, "us"
        found["exposed_gap_us"] = exposed_gap(run.steps) / count * 1e6, "us"
    return found


def _utilisation(run: Run, walked: Walk, hardware: Hardware) -> Values:
    machine, sizes = hardware.machine, hardware.sizes
    flops = sum(flop(work, sizes) for work in walked.work)
    bytes_ = sum(moved(work, sizes, hardware.width) for work in walked.work)
    return {
        "mfu": (flops / (run.seconds * machine.flops * hardware.ranks), ""),
        "mbu": (bytes_ / (run.seconds * machine.bandwidth * hardware.ranks), ""),
    }


def _fairness(run: Run, walked: Walk) -> Values:
    found: Values = {"service_gap_tokens": (service_gap(walked.service, walked.queued), "tokens")}
    index = jain(list(client_rates(run).values()))
    return found | ({} if index is None else {"jain": (index, "")})


def client_rates(run: Run) -> Mapping[str, float]:
    """Prompt and output tokens per second of each client, between its first request and its last answer."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for seen, request in _pairs(run):
        name = str(request.labels.get("client", "0"))
        first[name] = min(first.get(name, seen.sent), seen.sent)
        last[name] = max(last.get(name, seen.sent), seen.events[-1][0])
        tokens[name] = tokens.get(name, 0) + request.num_prompt + seen.tokens
    return {name: count / (last[name] - first[name]) for name, count in tokens.items() if last[name] > first[name]}


def _saturation(run: Run, walked: Walk) -> Values:
    """Open loop only: is the queue longer at the end of the arrivals than half-way?"""
    if not run.load.open_loop:
        return {}
    half, end = queue_lengths([r.arrival for r in run.requests], walked.admitted)
    return {
        "queue_half_way": (half, "requests"),
        "queue_at_end": (end, "requests"),
        "saturated": (float(end > half + QUEUE_SLACK), ""),
    }


def queue_lengths(sent: Sequence[float], admitted: Sequence[float]) -> tuple[float, float]:
    """Mean number of requests that waited for a seat, in the second and in the fourth quarter of the time of arrivals."""
    start, span = min(sent), max(sent) - min(sent)
    if not span:
        return 0.0, 0.0

    def mean(low: float, high: float) -> float:
        a, b = start + low * span, start + high * span
        return sum(max(0.0, min(b, seat) - max(a, came)) for came, seat in zip(sent, admitted, strict=True)) / (b - a)

    return mean(0.25, 0.5), mean(0.75, 1.0)
