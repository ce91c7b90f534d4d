"""Every metric of `task=bench` on the run of tests/hand_run.py, against values computed by hand from docs/metrics.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.bench.fairness import jain, service_gap
from core.bench.limit import Machine, Sizes
from core.bench.measure import Run, device_times
from core.bench.summary import flat_metrics, of_pools, of_values
from core.bench.values import Hardware, Slo, queue_lengths, scalars
from core.bench.walk import Work, walk
from tests.hand_run import hand_run

SIZES = Sizes(body=144, head=64, vocab=16, kv=4, pair_flop=16)
HARDWARE = Hardware(Machine(bandwidth=1000, flops=10_000), SIZES, width=2)
NO_SLO = Slo()


@pytest.fixture
def run() -> Run:
    return hand_run()


PERCENTILES = {
    "ttft_ms": (2000, 3000, 3000),
    "tpot_ms": (500, 2500),  # (7 - 2) / 2 and (3.5 - 3) / 1; a single token has none
    "itl_ms": (500, 1000, 4000),
    "e2e_ms": (3000, 3500, 7000),
    "normalised_ms": (3500 / 2, 7000 / 3, 3000),
    "send_late_ms": (0, 0, 500),
    "step_ms": (500, 1000, 2000, 2500),
}


@pytest.mark.parametrize("name", PERCENTILES)
def test_percentiles(run: Run, name: str) -> None:
    """Linear between neighbours: p90 of n values lies at place 0.9 (n - 1) of the sorted ones."""
    found = flat_metrics([run], [walk(run)], NO_SLO, None)
    values = PERCENTILES[name]
    for percent in (50, 90, 99):
        place = percent / 100 * (len(values) - 1)
        below, share = int(place), place - int(place)
        expected = values[below] + share * (values[min(below + 1, len(values) - 1)] - values[below])
        assert found[f"{name}_p{percent}"]["value"] == pytest.approx(expected) and found[f"{name}_p{percent}"]["unit"] == "ms"
        assert found[f"{name}_p{percent}"]["low"] <= expected + 1e-9 and found[f"{name}_p{percent}"]["high"] >= expected - 1e-9


SCALARS = {
    "duration_s": 7,
    "throughput_tok_s": 6 / 7,
    "total_tok_s": (19 + 6) / 7,
    "throughput_req_s": 3 / 7,
    "deadline_attainment": 1 / 2,  # 107 > 106; 103.5 is in time; the third has none
    "hit_rate": 4 / 19,  # what request 0 found when it came back is no hit
    "kv_use": (1.5 * 2 + 3.5 * 4) / 5 / 10,  # from the first look on: 2 blocks until 103.5, then 4
    "kv_evictable": 3.5 * 1 / 5 / 10,
    "preemptions": 1,
    "recomputed_tokens": 5,  # 9 positions were computed; 4 to 8 again
    "steps": 4,
    "padded_rows": 5,
    "step_schedule_us": 0.5 / 4 * 1e6,  # without the half second in which there was nothing to do
    "step_prepare_us": 0.7 / 4 * 1e6,
    "step_launch_us": 1.0 / 4 * 1e6,
    "step_wait_us": 2.9 / 4 * 1e6,
    "step_commit_us": 0.9 / 4 * 1e6,
    "step_gpu_us": 4.25 / 4 * 1e6,
    "exposed_gap_us": (6 - 4.25) / 4 * 1e6,
    # tokens 8 + 3 + 1 + 6 (5 computed again are left out), draws 6, pairs 36 + (9 + 11) + 7 + (10 + 15)
    "mfu": (2 * 144 * 18 + 2 * 64 * 6 + 16 * 88) / (7 * 10_000),
    # weights 208 a step; positions read 0, 8 + 4 - 4 shared, 6, 9 and written 8, 3, 1, 6; logits of 1, 2, 1, 2 rows twice
    "mbu": 2 * (4 * 208 + 4 * (0 + 8 + 6 + 9 + 18) + 2 * 16 * 6) / (7 * 1000),
    "service_gap_tokens": 8 + 2,  # both wait for the first step, which serves a alone
    "jain": (17 + 16) ** 2 / (2 * (17**2 + 16**2)),  # a: 17 tokens in 7 s; b: 8 in 3.5 s
    "queue_half_way": 1,  # request 1 waits from 100 to 102, the second quarter is 101 to 102
    "queue_at_end": 0,
    "saturated": 0,
}


def test_numbers_of_a_run(run: Run) -> None:
    """All of them, and no other."""
    found = {name: value for name, (value, _) in scalars(run, walk(run), NO_SLO, HARDWARE).items()}
    assert found == pytest.approx(SCALARS)


def test_the_gap_of_a_record(run: Run) -> None:
    """As in the metrics: half a second in which nothing was to be done is no gap of the host."""
    record = device_times(run.steps)
    assert record["gpu_busy_s"] == pytest.approx(4.25) and record["exposed_host_gap_s"] == pytest.approx(6 - 4.25)
    assert record["exposed_host_gap_per_step_us"] == pytest.approx((6 - 4.25) / 4 * 1e6)


def test_what_is_not_defined_is_left_out(run: Run) -> None:
    """No SLO, deadline, GPU, captured graphs, look at the pool or open loop: no number of it, instead of 0."""
    bare = replace(
        run,
        load=replace(run.load, arrivals=()),
        steps=[replace(s, kv=None, gpu=None) for s in run.steps],
        requests=[replace(r, labels={}) for r in run.requests],
        padded_rows=None,
    )
    for made, r in zip(bare.requests, run.requests, strict=True):
        made.num_prompt = r.num_prompt
    gone = {"deadline_attainment", "kv_use", "kv_evictable", "padded_rows", "step_gpu_us", "exposed_gap_us", "mfu", "mbu"}
    gone |= {"queue_half_way", "queue_at_end", "saturated"}
    assert scalars(bare, walk(bare), NO_SLO).keys() == SCALARS.keys() - gone


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=3000), 3),  # a bound may be reached
        (Slo(ttft_ms=2999), 1),
        (Slo(tpot_ms=1000), 2),  # a single token has no TPOT to be late with
        (Slo(ttft_ms=2999, tpot_ms=1000), 0),
        (Slo(e2e_ms=3500), 2),
        (Slo(e2e_ms=1), 0),
    ],
)
def test_goodput(run: Run, slo: Slo, good: int) -> None:
    """A request is good if it meets all bounds; a bound of 1 ms that nobody meets is 0, not left out."""
    found = scalars(run, walk(run), slo)
    assert found["goodput_req_s"] == (good / 7, "req/s") and found["attainment"] == (good / 3, "")


def test_the_walk(run: Run) -> None:
    """Queue and seats of each step, service of each client, necessary work."""
    walked = walk(run)
    assert walked.clients == ["a", "b"] and walked.admitted == [100, 102, 104.5]
    assert (walked.waiting, walked.running) == ([2, 1, 0, 2], [1, 2, 1, 2])
    assert walked.service.tolist() == [[0, 0], [10, 0], [12, 8], [12, 10], [21, 10]]
    assert walked.queued.tolist() == [[True, True], [False, True], [False, False], [True, False]]
    assert walked.work == [Work(8, 1, 0, 36), Work(3, 2, 8, 20), Work(1, 1, 6, 7), Work(6, 2, 9, 25)]


def test_utilisation_is_of_all_ranks(run: Run) -> None:
    found = scalars(run, walk(run), NO_SLO, replace(HARDWARE, ranks=4))
    assert found["mfu"][0] == pytest.approx(SCALARS["mfu"] / 4) and found["mbu"][0] == pytest.approx(SCALARS["mbu"] / 4)


def test_fairness_by_hand() -> None:
    """Only time in which both wait counts, each stretch of it alone; a lead gained before it is not held against anyone."""
    service = np.array([[0, 0], [5, 0], [5, 3], [50, 3], [50, 9], [50, 11]])
    queued = np.array([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]], bool)
    assert service_gap(service, queued) == 8  # leads 0, 5, 2, then (alone) 47, then 47, 41, 39
    assert service_gap(service, np.array([[1, 0]] * 5, bool)) == 0
    assert service_gap(service[:, :1], queued[:, :1]) == 0
    assert (jain([2, 2, 2]), jain([1, 0, 0, 0]), jain([1, 3]), jain([0, 0])) == (1, 0.25, 0.8, None)


def test_saturation_by_hand(run: Run) -> None:
    """A request each second, a seat every third: 2 wait on average from 2 to 4 s, 4.5 from 6 to 8 s."""
    sent = [float(i) for i in range(9)]
    assert queue_lengths(sent, [3 * at for at in sent]) == (2, 4.5)
    assert queue_lengths(sent, sent) == (0, 0) and queue_lengths([1, 1], [5, 9]) == (0, 0)
    walked = walk(run)
    late = replace(walked, admitted=[100, 100, 104])
    for made, arrival in zip(run.requests, (100.0, 100.0, 104.0), strict=True):
        made.arrival = arrival
    assert scalars(run, late, NO_SLO)["saturated"] == (0, "")
    several = replace(run, requests=run.requests * 3, received=run.received * 3)
    for made, growing in zip(several.requests[:3], (100.0, 103.0, 104.0), strict=True):
        made.arrival = growing
    grown = replace(walked, admitted=[100, 104, 105] * 3)
    assert scalars(several, grown, NO_SLO)["saturated"] == (1, "")


def test_the_interval_of_a_number_of_whole_runs() -> None:
    """The bootstrap of a median covers the true one in about 95 % of 400 seeded samples of 9 runs; one run has no interval."""
    rng, hits = np.random.default_rng(5), 0
    for _ in range(400):
        found = of_values([{"x": (value, "s")} for value in rng.lognormal(0, 0.5, 9)])["x"]
        assert found["low"] <= found["value"] <= found["high"]
        hits += found["low"] <= 1 <= found["high"]
    assert 0.91 <= hits / 400 <= 0.99
    assert of_values([{"x": (3.0, "s")}]) == {"x": {"value": 3.0, "unit": "s", "low": None, "high": None}}
    assert of_values([{"x": (v, "s")} for v in (9.0, 1.0, 2.0)])["x"]["value"] == 2.0


def test_the_interval_of_a_percentile() -> None:
    """Runs differ by a factor of their own, requests within them too: the interval of p50 holds both. 40 samples of 5 runs."""
    rng, hits, narrow = np.random.default_rng(6), 0, 0
    for _ in range(40):
        runs = [[[value] for value in factor * rng.lognormal(0, 0.5, 40)] for factor in rng.lognormal(0, 0.2, 5)]
        found = of_pools([{"x": (pools, "ms")} for pools in runs])["x_p50"]
        hits += found["low"] <= 1 <= found["high"]
        pooled = np.concatenate([np.ravel(pools) for pools in runs])
        width = 1.96 * 1.2533 * float(np.std(np.log(pooled))) / len(pooled) ** 0.5  # as if all requests were independent
        narrow += np.median(pooled) * np.exp(-width) <= 1 <= np.median(pooled) * np.exp(width)
    assert hits >= 34 and narrow < hits


def test_gaps_of_a_request_are_drawn_together() -> None:
    """One request in ten has slow gaps, 50 of them: the interval of p90 says that it might not have been there."""
    pools = [[100.0] * 50] + [[1.0] * 50 for _ in range(9)]
    found = of_pools([{"itl_ms": (pools, "ms")}])
    assert found["itl_ms_p90"]["low"] == 1.0 and found["itl_ms_p90"]["high"] == 100.0
    assert found["itl_ms_p50"]["value"] == found["itl_ms_p50"]["high"] == 1.0
