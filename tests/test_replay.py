"""Recorded schedules: what was recorded is done again, step by step, whatever takes how long; what does not fit says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.bench.measure import Run, measure
from core.bench.records import write_lines
from core.bench.schedule import Recorder, most_residents, schedule_lines
from core.bench.task import run_job
from core.cli import main
from core.config import compose
from core.interfaces import HostContext, SamplingParams, StepPlan
from core.loads import Load, LoadSettings, draw_load
from core.testing.fake import VOCAB, FakeEngine, FakeExecutor, VirtualClock
from plugins.schedulers.entry import ReplaySettings
from plugins.schedulers.recording import RecordingError, read_recording
from plugins.schedulers.replay import Replay, ReplayError, probe
from tests.fake import make_engine

CPU = torch.device("cpu")
SHORT = LoadSettings(num_requests=10, input_min=1, input_max=20, output_min=1, output_max=12)
LOADS = {
    "at once": SHORT,
    "poisson": replace(SHORT, arrival="poisson", rate=3.0),
    "closed loop": replace(SHORT, arrival="closed_loop", concurrency=3),
    "turns": replace(SHORT, arrival="poisson", rate=2.0, turns=2, think_s=0.3, input_max=8, output_max=6),
    "shared": replace(SHORT, shared=12, groups=2, input_max=8),
}
TINY = (
    *("task=bench", "model=tiny-llama", "max_model_len=96", "cpu_threads=1", "load.num_requests=3", "load.input_min=6"),
    *("load.input_max=20", "load.output_min=2", "load.output_max=6", "bench.repeats=2"),
)


class Slow(FakeExecutor):
    """A step takes `seconds`, and a tenth more per token."""

    seconds = 0.1

    def launch(self, plan: StepPlan) -> Any:
        clock: Any = self.context.clock
        clock.now += self.seconds * (1 + len(plan.tokens) / 10)
        return super().launch(plan)


def engine_with(scheduler: Any, seconds: float = 0.1, **limits: Any) -> FakeEngine:
    engine = make_engine(scheduler, clock=VirtualClock(), **{"blocks": 60, "slots": 4, "budget": 12, **limits})
    engine.executor = Slow(engine.context)
    engine.executor.seconds = seconds
    return engine


def run(engine: FakeEngine, load: Load, recorder: Recorder | None = None) -> Run:
    params = [SamplingParams(max_tokens=n, temperature=0) for n in load.outputs]
    return measure(engine, load, params, CPU, None, recorder)


def load_of(settings: LoadSettings, number: int = 0) -> Load:
    return draw_load(settings, number, VOCAB)


def record(file: Path, engine: FakeEngine, *loads: Load) -> list[Run]:
    """Runs of an engine, left as a recording."""
    pairs = [(run(engine, load, recorder), recorder) for load in loads for recorder in [Recorder()]]
    write_lines(file, (line for pair in pairs for line in schedule_lines(*pair, {"scheduler": "some"})))
    return [done for done, _ in pairs]


def replaying(file: Path) -> Callable[[Any, HostContext], Replay]:
    return lambda _, context: Replay(ReplaySettings(str(file)), context)


def plans(engine: FakeEngine) -> list[list[list[int]]]:
    return [[p.starts.tolist(), p.counts.tolist(), p.draws.tolist()] for p in engine.executor.plans]


def operations(file: Path) -> list[Any]:
    return [line["ops"] for line in map(json.loads, file.read_text().splitlines()) if "ops" in line]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("scheduler", ["fcfs", "mixed"])
@pytest.mark.parametrize("name", LOADS)
def test_the_same_steps_again(tmp_path: Path, name: str, scheduler: str, overlap: int) -> None:
    """Every step has the chunks that were recorded, of the same requests, when the executor is slower or much faster; a
    recording of the replay is the recording. Small pools, so that requests give way."""
    load, file = load_of(LOADS[name]), tmp_path / "schedule.jsonl"
    limits: dict[str, Any] = {"overlap": overlap, "blocks": 14 if name in ("at once", "closed loop") else 30}
    first = engine_with(scheduler, **limits)
    (done,) = record(file, first, load)
    assert done.counts["evictions"] or name != "at once"
    for seconds in (0.001, 0.3):
        again = engine_with(replaying(file), seconds, **limits)
        record(tmp_path / "again.jsonl", again, load)
        assert plans(again) == plans(first)
        assert operations(tmp_path / "again.jsonl") == operations(file)


@pytest.mark.parametrize("name", ["poisson", "closed loop"])
def test_a_seat_that_was_free(tmp_path: Path, name: str) -> None:
    """Recorded with nothing in flight, because nobody was there; the replay is slow, and the next one comes earlier than the
    seat is free. The step waits for that instead of failing."""
    load, file = load_of(LOADS[name]), tmp_path / "schedule.jsonl"
    first = engine_with("mixed", 0.005, overlap=1, slots=1)
    record(file, first, load)
    again = engine_with(replaying(file), 0.5, overlap=1, slots=1)
    run(again, load)
    assert plans(again) == plans(first)


def test_several_runs(tmp_path: Path) -> None:
    """Each run of a benchmark has its own steps; the same run twice in one engine is fine."""
    loads, file = [load_of(SHORT, n) for n in (2, 0, 1)], tmp_path / "schedule.jsonl"
    first = engine_with("fcfs", allocator="paged")
    record(file, first, *loads)
    again = engine_with(replaying(file), allocator="paged")
    for load in [*loads, loads[2]]:
        run(again, load)
    steps = len(first.executor.plans)
    assert plans(again)[:steps] == plans(first) and len(plans(again)) > steps


def test_a_fast_executor_waits_for_arrivals(tmp_path: Path) -> None:
    """The plans hold requests that come later: the replay takes as long as they take to come, and not longer."""
    load, file = load_of(LOADS["poisson"]), tmp_path / "schedule.jsonl"
    record(file, engine_with("mixed"), load)
    done = run(engine_with(replaying(file), 0.0), load)
    arrivals = [at for at in load.arrivals if at is not None]
    assert max(arrivals) <= done.seconds < max(arrivals) + 0.01 and max(done.late) < 0.002


MISFITS: dict[str, tuple[LoadSettings, dict[str, Any], str]] = {
    "other requests": (replace(SHORT, input_max=21), {}, "request 0 has .* tokens in .* in the recording: other requests"),
    "other outputs": (replace(SHORT, output_max=13), {}, "in the recording: other requests"),
    "other arrivals": (replace(LOADS["poisson"], rate=2.0), {}, "request 1 arrives after .* other arrivals"),
    "arrivals instead of none": (
        replace(LOADS["poisson"], rate=0.3),
        {},
        r"request \d has not come: other arrivals, or fewer requests",
    ),
    "fewer requests": (replace(SHORT, num_requests=9), {}, "in the recording: other requests|request 9 has not come"),
    "more requests": (replace(LOADS["closed loop"], num_requests=11), {}, "other requests"),
    "no hits": (
        LOADS["shared"],
        {"allocator": "paged"},
        r"request \d+ finds 0 of its tokens cached, 12 in the recording",
    ),
    "other hits": (LOADS["shared"], {"block_size": 5}, r"finds 10 of its tokens cached, 12 in the recording"),
    "a smaller pool": (SHORT, {"blocks": 9}, r"request \d+ gets 0 of \d+ tokens: not enough blocks"),
    "a smaller budget": (SHORT, {"budget": 10}, r"request \d+ gets \d+ of \d+ tokens: not enough tokens"),
    "fewer seats": (SHORT, {"slots": 3}, r"request \d+ gets 0 of \d+ tokens: not enough slots"),
    "another run": (replace(SHORT, seed=5), {}, "holds the runs 0 of its load and not run 5: load.seed, bench.repeats"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit(tmp_path: Path, name: str) -> None:
    """Said at the first step that is not as recorded, with what differs; nothing stalls."""
    settings, limits, text = MISFITS[name]
    file = tmp_path / "schedule.jsonl"
    recorded = {
        "other arrivals": LOADS["poisson"],
        "more requests": LOADS["closed loop"],
        "no hits": settings,
        "other hits": settings,
    }
    record(file, engine_with("mixed", blocks=30), load_of(recorded.get(name, SHORT)))
    engine = engine_with(replaying(file), **{"blocks": 30, **limits})
    load = load_of(settings)
    if name == "fewer requests":
        load = replace(load_of(SHORT), prompts=load_of(SHORT).prompts[:9], outputs=load_of(SHORT).outputs[:9], labels=())
    with pytest.raises(ReplayError, match=text):
        run(engine, load)
    assert engine.clock() < 100


def test_a_recording_that_ends_too_early(tmp_path: Path) -> None:
    """Whole by its own account, but requests go on."""
    file = tmp_path / "schedule.jsonl"
    record(file, engine_with("fcfs"), load_of(SHORT))
    head, *steps = file.read_text().splitlines()
    cut = json.dumps({**json.loads(head), "steps": 5})
    file.write_text("\n".join([cut, *steps[:5]]) + "\n")
    with pytest.raises(ReplayError, match="step 5 of 5: it ends here, and 9 requests go on"):
        run(engine_with(replaying(file)), load_of(SHORT))


def test_most_residents() -> None:
    """A seat is held until the step of the last token, and not while one has given way."""
    assert most_residents([[[0, 0, 4, 4], [1, 0, 2, 2]], [[0, 4, 1, 0], [2, 0, 2, 2]]], [2, 1, 1], [4, 2, 2]) == 2
    assert most_residents([[[0, 0, 4, 4]], [[0], [1, 0, 2, 2]], [[0, 0, 5, 0]]], [2, 1], [4, 2]) == 1


def test_bad_files(tmp_path: Path) -> None:
    """Named with the line; a file that was cut short is not followed to its end first."""
    file = tmp_path / "schedule.jsonl"
    record(file, engine_with("fcfs"), load_of(SHORT))
    lines = file.read_text().splitlines()
    for content, text in (
        (lines[:4], r"was cut short: 3 of the \d+ steps of run 0"),
        ([lines[0].replace('"format":1', '"format":2')], "line 1 .*its format is 2, this version reads 1"),
        (
            [lines[0], '{"run":0,"in_flight":0,"ops":[[1,2]]}'],
            "line 2 is no line .*an operation has 1 or 4 numbers",
        ),
        ([lines[0], lines[1][:-3]], "line 2 is no line of a schedule"),
        (["[]"], "line 1 is no line of a schedule"),
        ([], "holds no run"),
    ):
        file.write_text("\n".join(content))
        with pytest.raises(RecordingError, match=text):
            read_recording(str(file))
    with pytest.raises(RecordingError, match="nowhere: no such file"):
        read_recording("nowhere")


def test_what_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    """No file, no recording, or too little room for its steps: refused with all other reasons."""
    file = tmp_path / "schedule.jsonl"
    record(file, engine_with("mixed"), load_of(SHORT))
    found = probe(ReplaySettings(str(file))).capabilities
    assert found and found["max_num_batched_tokens"].n == 12 and found["max_num_seqs"].n == 4  # type: ignore[union-attr]
    for overrides, text in (
        (["scheduler=replay"], "scheduler=replay: scheduler.file=FILE is missing"),
        (["scheduler=replay", "scheduler.file=nowhere"], "scheduler.file=nowhere: no such file"),
        (["scheduler=replay", f"scheduler.file={file}", "max_num_seqs=3"], "needs max_num_seqs to be at least 4, got 3"),
        (["scheduler=replay", f"scheduler.file={file}", "overlap=1"], "needs overlap to be 0, got 1"),
    ):
        with pytest.raises(ValueError, match=text):
            run_job(compose([*TINY, *overrides]), tmp_path / "out")


def test_two_backends_under_the_same_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From end to end: recorded with one, replayed with the other, in every run the same steps and tokens."""
    greedy = [*TINY, "sampler=greedy", "sampling.temperature=0", "bench.record_schedule=true", "load.num_requests=5"]
    for name in "abc":
        (tmp_path / name).mkdir()
    first = run_job(compose([*greedy, "scheduler=mixed", "attention=sdpa"]), tmp_path / "a")
    file = tmp_path / "a/schedule.jsonl"
    follow = ["scheduler=replay", f"scheduler.file={file}", "attention=reference"]
    again = run_job(compose([*greedy, *follow]), tmp_path / "b")
    assert [json.loads(line)["run"] for line in file.read_text().splitlines() if "format" in line] == [2, 0, 1]
    counts = ("steps", "prefill_tokens", "decode_tokens", "cached_tokens", "evictions")
    for one, other in zip(first["bench"]["repeats"], again["bench"]["repeats"], strict=True):
        assert [one[name] for name in counts] == [other[name] for name in counts]
    assert (tmp_path / "a/tokens.json").read_text() == (tmp_path / "b/tokens.json").read_text()
    with pytest.raises(ReplayError, match="holds the runs 2, 0, 1 of its load and not run 3"):
        run_job(compose([*greedy, *follow, "bench.repeats=3"]), tmp_path / "c")
    assert not (tmp_path / "c/result.json").exists()


def test_only_for_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """task=generate has no requests that a recording knows: one line, exit 1."""
    file = tmp_path / "schedule.jsonl"
    record(file, engine_with("fcfs"), load_of(SHORT))
    monkeypatch.chdir(tmp_path)

    assert main(["model=tiny-llama", "scheduler=replay", f"scheduler.file={file}", "hydra.run.dir=out"]) == 1
    assert "error: scheduler=replay follows the requests of a load: it works with task=bench" in capsys.readouterr().err
