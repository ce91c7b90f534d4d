"""One short run, made by hand, whose metrics can be computed by hand.

time      100   101   102   103  103.5   104  104.5   107
request 0 |-- prompt --|- decode|  evicted         |-- again --|    client a, sent at 100, 8 in 3 out
request 1 sent         |-prompt-|decode|                            client b, sent at 100, 6 in 2 out, 4 found in the cache
request 2                                sent      |--prompt---|    client a, sent at 104, 5 in 1 out
"""

from __future__ import annotations

from typing import Any

import numpy as np

from core.bench.measure import Run, received
from core.bench.watch import StepTimes
from core.interfaces import Request, RequestMetrics, SamplingParams
from core.loads import Load


def request(number: int, prompt: int, output: int, **given: Any) -> Request:
    metrics = RequestMetrics(cached_tokens=given.pop("cached", 0), preemptions=given.pop("preemptions", 0))
    made = Request(number, [1] * prompt, SamplingParams(), prompt + output, metrics=metrics, **given)
    made.tokens += [2] * output
    made.finish_reason = "length"
    return made


def step(at: float, end: float, chunks: list[tuple[int, int, int]], parts: str = "0 0 0 0 0", **given: Any) -> StepTimes:
    """chunks: request, start, count; each of them draws one token, received when the step ends."""
    times = dict(zip(("schedule", "prepare", "launch", "wait", "commit"), map(float, parts.split()), strict=True))
    names, starts, counts = (list(column) for column in zip(*chunks, strict=True)) if chunks else ([], [], [])
    arrays = {"starts": starts, "counts": counts, "draws": [1] * len(chunks)}
    ints: Any = {name: np.array(values, np.int32) for name, values in arrays.items()}
    seen = names, [1] * len(names)
    launched = bool(chunks)
    return StepTimes(at, end, launched=launched, waited=launched, requests=names, received=seen, **times, **ints, **given)


def hand_run() -> Run:
    """Ids of requests are not their places in the load, and the clock does not begin at 0."""
    requests = [
        request(10, 8, 3, arrival=100.0, labels={"client": "a", "deadline": 106.0}, preemptions=1),
        request(11, 6, 2, arrival=100.0, labels={"client": "b", "deadline": 103.5}, cached=4),
        request(12, 5, 1, arrival=104.0, labels={"client": "a"}),
    ]
    steps = [
        step(100, 102, [(10, 0, 8)], ".1 .2 .3 1.2 .2", admitted=[10], kv=(8, 0, 2), gpu=1.5),
        step(102, 103, [(10, 8, 1), (11, 4, 2)], ".1 .1 .1 .6 .1", admitted=[11], shared_blocks=1, gpu=0.5),
        step(103, 103.5, [(11, 6, 1)], ".1 .1 .1 .1 .1", evicted=[10], kv=(6, 1, 3), gpu=0.25),
        step(103.5, 104, [], ".5 0 0 0 0"),  # the scheduler asked to wait
        step(104.5, 107, [(10, 4, 6), (12, 0, 5)], ".2 .3 .5 1 .5", admitted=[10, 12], kv=(5, 2, 3), gpu=2.0),
    ]
    return Run(
        load=Load(7, [[1] * 8, [1] * 6, [1] * 5], [3, 2, 1], 0, arrivals=[0.0, 0.0, 4.0]),
        start=100.0,
        seconds=7.0,
        requests=requests,
        received=received(requests, {10: 0, 11: 1, 12: 2}, steps),
        late=[0.0, 0.0, 0.5],
        steps=steps,
        counts={"evictions": 1, "steps": 4},
        block_size=4,
        num_blocks=10,
        overlap=0,
        padded_rows=5,
    )
