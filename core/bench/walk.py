"""A finished run, walked through step by step: what followed from who got how many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.bench.limit import Sizes
from core.bench.measure import Run
from core.interfaces import Array

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # service of a prompt token and of a drawn one, as VTC weighs them


@dataclass(frozen=True)
class Walk:
    """Requests in the order of the load, launched steps in order, clients in the order of `clients`."""

    clients: list[str]
    admitted: list[float]  # when each request first got a seat
    recomputed: Array  # positions of each request that were computed again
    waiting: list[int]  # requests without a seat when each step was scheduled
    running: list[int]  # requests with one behind it
    queued: Array  # [steps, clients] bool: the client had a request without a seat when the step was scheduled
    service: Array  # [steps + 1, clients] what was served so far, weighted
    work: list[Work]  # of each step


@dataclass(frozen=True, slots=True)
class Work:
    """What a step had to do: nothing that was computed before, no padding."""

    tokens: int
    rows: int  # drawn
    reads: int  # cached positions read, those that all rows share once
    pairs: int  # (query, key) pairs that attend


def walk(run: Run) -> Walk:
    """Once per run; every metric that needs the order of events is read off the result."""
    names = [str(r.labels.get("client", "0")) for r in run.requests]
    clients = sorted(set(names))
    client = np.array([clients.index(name) for name in names])
    index = {request.id: i for i, request in enumerate(run.requests)}
    prompt = np.array([request.num_prompt for request in run.requests])
    sent = np.array([request.arrival for request in run.requests])
    order, at = np.argsort(sent, kind="stable").tolist(), 0
    reach = np.zeros(len(prompt), np.int64)  # positions known so far, computed or found
    recomputed, admitted = np.zeros(len(prompt), np.int64), [float("nan")] * len(prompt)
    waits, held, left = np.zeros(len(clients), np.int64), 0, list(run.load.outputs)
    waiting, running, queued, service, work = [], [], [], [np.zeros(len(clients))], []
    for step in run.steps:
        while at < len(order) and sent[order[at]] <= step.at:
            waits[client[order[at]]] += 1
            at += 1
        before = waits.copy()
        for number in step.evicted:
            waits[client[index[number]]] += 1
        for number in step.admitted:
            i = index[number]
            waits[client[i]] -= 1
            admitted[i] = step.at if admitted[i] != admitted[i] else admitted[i]
        held += len(step.admitted) - len(step.evicted)
        if step.launched:
            rows = np.array([index[number] for number in step.requests])
            ends, known = step.starts + step.counts, reach[rows]
            again = np.clip(np.minimum(ends, known) - step.starts, 0, None)
            recomputed[rows] += again
            reach[rows] = np.maximum(known, ends)
            read = np.minimum(ends, prompt[rows]) - np.minimum(known, prompt[rows])
            gained = INPUT_WEIGHT * np.clip(read, 0, None) + OUTPUT_WEIGHT * step.draws
            service.append(service[-1] + np.bincount(client[rows], gained, len(clients)))
            waiting.append(int(before.sum()))
            queued.append(before > 0)
            running.append(held)
            work.append(_work(step.starts + again, ends, step.draws, step.shared_blocks * run.block_size))
        for number, tokens in zip(*step.received, strict=True):
            left[index[number]] -= tokens
            held -= bool(tokens) and not left[index[number]]
    return Walk(
        clients=clients,
        admitted=admitted,
        recomputed=recomputed,
        waiting=waiting,
        running=running,
        queued=np.array(queued).reshape(-1, len(clients)),
        service=np.array(service),
        work=work,
    )


def _work(starts: Array, ends: Array, draws: Array, shared: int) -> Work:
    """starts: behind what is only computed again; a chunk that is nothing else has no share."""
    own = ends > starts
    starts, ends, wide = starts[own].astype(np.int64), ends[own].astype(np.int64), int(own.sum())
    return Work(
        tokens=int((ends - starts).sum()),
        rows=int(draws.sum()),
        reads=int(starts.sum()) - max(0, wide - 1) * shared,
        pairs=int((ends * (ends + 1) - starts * (starts + 1)).sum()) // 2,
    )


def flop(work: Work, sizes: Sizes) -> int:
    """Products of the layers and of the LM head, and attention."""
    return 2 * sizes.body * work.tokens + 2 * sizes.head * work.rows + sizes.pair_flop * work.pairs


def moved(work: Work, sizes: Sizes, width: int) -> int:
    """Bytes: weights once per step, cached positions read and new ones written once, logits written and read."""
    if not work.tokens:
        return 0
    weights = sizes.body + (sizes.head if work.rows else 0)
    return width * (weights + sizes.kv * (work.reads + work.tokens) + 2 * work.rows * sizes.vocab)
