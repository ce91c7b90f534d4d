"""`task=bench`: loads, definitions of the latencies, the limit, and the task from end to end on a tiny model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from core.bench.limit import Machine, Pass, Sizes, limit_of, passes, seconds_of
from core.bench.measure import run_load
from core.bench.metrics import Received, medians, percentiles
from core.bench.profile import busy_seconds
from core.bench.task import run_job
from core.config import compose
from core.interfaces import Drawn, Limits, Sampled, SamplingParams, StepPlan
from core.loads import Load, LoadSettings, draw_load
from core.testing.fake import FakeExecutor, VirtualClock
from tests.fake import make_engine

ROOT = Path(__file__).parent.parent
SMALL = ("load.num_requests=3", "load.input_min=6", "load.input_max=20", "load.output_min=2", "load.output_max=6")
TINY = ("task=bench", "model=tiny-llama", "max_model_len=96", "cpu_threads=1", "bench.repeats=2", *SMALL)
CPU = torch.device("cpu")


def preset(name: str) -> LoadSettings:
    return compose(["task=bench", f"load={name}"]).config.load


def qwen(name: str) -> Sizes:
    return Sizes.of(yaml.safe_load((ROOT / f"conf/model/qwen3-{name}.yaml").read_text())["config"])


def test_offline_is_the_load_of_the_others() -> None:
    """Run 0 is drawn exactly as nano-vLLM's benchmark does it, so that numbers can be compared."""
    load = draw_load(preset("offline"), 0, 151_936)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    assert load.prompts == prompts and load.outputs == outputs
    assert (load.input_tokens, load.output_tokens) == (142_827, 133_966)


@pytest.mark.parametrize(
    ("name", "requests", "tokens_in", "tokens_out", "shared"),
    [
        ("single", 1, 512, 512, 0),
        ("batch16", 16, 512, 256, 0),
        ("shared_prefix", 256, 2112, 64, 2048),
        ("prefill", 256, 1024, 1, 0),
    ],
)
def test_presets(name: str, requests: int, tokens_in: int, tokens_out: int, shared: int) -> None:
    """Counts and lengths; the shared tokens and no more are the same in all prompts."""
    load = draw_load(preset(name), 0, 151_936)
    assert load.lengths == [(tokens_in, tokens_out)] * requests and load.shared == shared
    assert len({tuple(p[:shared]) for p in load.prompts}) == 1
    assert len({tuple(p[shared : shared + 8]) for p in load.prompts}) == requests


def test_every_run_has_its_own_prompts_inside_the_vocabulary() -> None:
    """The same prompts twice in one process would be found in the prefix cache."""
    settings = LoadSettings(num_requests=8, seed=3)
    first, again, second = (draw_load(settings, n, 100) for n in (0, 0, 1))
    assert first == again and first.seed == 3 and second.seed == 4
    assert first.prompts[0][:50] != second.prompts[0][:50]
    assert max(max(p) for p in first.prompts) == 99


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("load.input_min=2000", "load.input_min=2000 is more than load.input_max=1024"),
        ("load.num_requests=0", "load.num_requests must be >= 1"),
        ("load.num_request=1", "did you mean load.num_requests"),
        ("load=ofline", "offline"),
        ("bench.repeats=0", "bench.repeats must be a whole number >= 1, got 0"),
        ("bench.peer=sglang", "bench.peer must be vllm"),
        ("task=benchmark", "task must be generate or bench"),
    ],
)
def test_bad_settings(override: str, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        compose(["task=bench", override] if not override.startswith("task") else [override])


def test_profile_needs_the_task() -> None:
    with pytest.raises(ValueError, match="profile=true belongs to task=bench"):
        compose(["profile=true"])


def test_definitions_of_latencies() -> None:
    """TPOT is not defined for one token, and left out instead of counted as 0."""
    one, four = Received(1.0, [(3.0, 1)]), Received(1.0, [(2.0, 1), (4.0, 2), (5.5, 1)])
    assert (one.ttft, one.e2e, one.tpot, one.gaps) == (2.0, 2.0, None, [])
    assert (four.ttft, four.e2e, four.tpot, four.gaps) == (1.0, 4.5, 3.5 / 3, [2.0, 1.5])
    assert percentiles([1, 2, 3, 4, 5]) == {"mean": 3, "p50": 3, "p90": pytest.approx(4.6), "p99": pytest.approx(4.96)}
    assert percentiles([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_medians() -> None:
    """Number by number, whatever they are nested in; None stays None."""
    records = [{"a": x, "b": {"c": y}, "d": None, "name": "n"} for x, y in ((1, 9.0), (5, 7.0), (2, 8.0))]
    assert medians(records) == {"a": 2, "b": {"c": 8.0}, "d": None, "name": "n"}


class Scripted(FakeExecutor):
    """A launch takes 2 s of the host, the device another 10 s."""

    def launch(self, plan: StepPlan) -> Any:
        clock: Any = self.context.clock
        drawn = super().launch(plan)
        clock.now += 2
        return Late(drawn, clock, clock.now + 10)


class Late:
    def __init__(self, drawn: Drawn, clock: VirtualClock, ready: float) -> None:
        self.drawn, self.clock, self.ready = drawn, clock, ready

    def wait(self) -> Sampled:
        self.clock.wait(self.ready)
        return self.drawn.wait()


def scripted(overlap: int) -> dict[str, Any]:
    """Two requests, 4 tokens in and 3 out, and 8 in and 1 out; block size 4, so nothing is shared."""
    clock = VirtualClock()
    engine = make_engine(clock=clock, overlap=overlap)
    engine.executor = Scripted(engine.context)
    load = Load(7, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]], [3, 1], 0)
    return run_load(engine, load, [SamplingParams(max_tokens=n, temperature=0) for n in load.outputs], CPU)


def test_a_scripted_run() -> None:
    """Three steps of 12 s: both prompts, then two decodes."""
    record = scripted(0)
    assert record["seconds"] == 36 and record["output_tokens_per_s"] == 4 / 36 and record["seed"] == 7
    assert record["ttft_s"] == {"mean": 12, "p50": 12, "p90": 12, "p99": 12}
    assert record["tpot_s"] == {"mean": 12, "p50": 12, "p90": 12, "p99": 12}  # of the first request only
    assert record["e2e_s"]["mean"] == 24 and record["itl_s"]["mean"] == 12
    assert record["host_s"] == {"schedule": 0, "launch": 6, "wait": 30, "commit": 0}
    assert record["host_per_decode_step_us"]["launch"] == 2e6 and record["decode_steps"] == 2
    assert (record["steps"], record["prefill_tokens"], record["decode_tokens"]) == (3, 12, 2)
    assert (record["cached_tokens"], record["evictions"], record["gpu_busy_s"]) == (0, 0, None)


def test_overlap_hides_the_launch() -> None:
    """With one step in flight the next launch falls into the wait; every second is still charged once."""
    record = scripted(1)
    assert record["seconds"] < 36 and sum(record["host_s"].values()) == record["seconds"]
    assert record["host_s"]["launch"] == 6


def test_a_run_that_did_less_is_refused() -> None:
    """A request that ended early would make the numbers look better."""
    engine = make_engine(clock=VirtualClock(), max_len=8)
    load = Load(0, [[1, 2, 3, 4]], [20], 0)
    with pytest.raises(RuntimeError, match="request 0 of the load ended after 4 of 20 tokens"):
        run_load(engine, load, [SamplingParams(max_tokens=20, temperature=0)], CPU)
    assert isinstance(engine.executor, FakeExecutor)


def test_steps_of_the_limit() -> None:
    """Whole prompts as the budget allows, then decodes; a shared prefix is computed and read once."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=10, max_model_len=64)
    assert list(passes([(4, 2), (5, 1), (3, 1)], 0, limits)) == [
        Pass(tokens=9, rows=2, reads=9, pairs=10 + 15),
        Pass(tokens=3, rows=1, reads=3, pairs=6),
        Pass(tokens=1, rows=1, reads=4, pairs=5),
    ]
    assert list(passes([(6, 2), (6, 2)], 4, limits)) == [
        Pass(tokens=8, rows=2, reads=8, pairs=21 + 11),
        Pass(tokens=2, rows=2, reads=4 + 2 + 2, pairs=14),
    ]
    assert [step.tokens for step in passes([(25, 1)], 0, limits)] == [10, 10, 5]
    assert [step.rows for step in passes([(2, 3)] * 2, 0, Limits(1, 10, 64))] == [1] * 6


def test_the_roofline_by_hand() -> None:
    """One layer, hidden 4, 2 heads of 2 on 1 KV head, MLP 8, vocabulary 16, 2 bytes; 10 B/s and 1000 FLOP/s."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    sizes = Sizes.of(dict(zip(names, (4, 1, 2, 1, 8, 16), strict=True)))
    assert sizes == Sizes(body=4 * 8 + 16 + 96, head=64, vocab=16, kv=4, pair_flop=16)
    parts = seconds_of(Pass(tokens=1, rows=1, reads=9, pairs=10), sizes, Machine(10, 1000), 2)
    assert parts == {"attention": 4 * 10 * 2 / 10, "layers": 144 * 2 / 10, "head": 64 * 2 / 10, "sampling": 2 * 16 * 2 / 10}
    busy = seconds_of(Pass(tokens=1000, rows=0, reads=0, pairs=10**6), sizes, Machine(1e9, 1000), 2)
    assert busy == {"attention": 16 * 10**6 / 1000, "layers": 2 * 144 * 1000 / 1000, "head": 0, "sampling": 0}


@pytest.mark.parametrize(("model", "seconds"), [("0.6b", 3.72), ("8b", 10.6), ("14b", 16.6)])
def test_the_documented_limits(model: str, seconds: float) -> None:
    """Offline at 4.3 TB/s and 790 TFLOP/s: 36,000 tokens/s for 0.6B; 10.6 s for 8B, 16.6 s for 14B."""
    load, machine = draw_load(preset("offline"), 0, 151_936), Machine(4.3e12, 790e12)
    limit = limit_of(load.lengths, 0, Limits(512, 16_384, 4096), qwen(model), machine, 2)
    assert limit["seconds"] == pytest.approx(seconds, rel=4e-3) and limit["steps"] == 9 + 1023
    if model == "0.6b":
        assert limit["output_tokens_per_s"] == pytest.approx(36_000, rel=1e-3)
        assert limit["parts_s"]["attention"] / limit["seconds"] == pytest.approx(0.87, abs=0.005)


def test_time_at_work_counts_overlapping_kernels_once() -> None:
    def event(cat: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "ts": ts, "dur": dur}

    events = [event("kernel", 0, 10), event("gpu_memcpy", 5, 10), event("kernel", 20, 5), event("cpu_op", 0, 100)]
    assert busy_seconds(events) == pytest.approx(20e-6)
    assert busy_seconds([event("cpu_op", 0, 100)]) is None


def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both files with the promised keys, a table on stdout and nothing else there, a trace."""
    result = run_job(compose([*TINY, "profile=true", "bench.profile_steps=3"]), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result, default=str))
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert {"plugins", "settings", "environment", "seed"} <= bench.keys()
    assert bench["median"] == json.loads(json.dumps(result["bench"]["median"]))
    assert [r["seed"] for r in bench["repeats"]] == [0, 1] and bench["load"] == "offline"
    for record in bench["repeats"]:
        assert record["output_tokens_per_s"] == pytest.approx(record["output_tokens"] / record["seconds"])
        assert record["prefill_tokens"] + record["cached_tokens"] == record["input_tokens"]
        assert record["decode_tokens"] == record["output_tokens"] - record["requests"]
        assert sum(record["host_s"].values()) == pytest.approx(record["seconds"], rel=0.2)
        assert record["limit"]["fraction"] == pytest.approx(record["limit"]["seconds"] / record["seconds"])
        assert record["ttft_s"]["p50"] <= record["e2e_s"]["p50"] and record["evictions"] == 0
    assert bench["machine"]["bandwidth"] > 1e8 and bench["machine"]["flops"] > 1e8 and bench["memory"]["peak"] > 1 << 20
    assert "commit" in bench["environment"] and bench["plugins"]["attention"]["name"]
    assert bench["profile"]["steps"] == 3 and bench["profile"]["gpu_busy_s"] is None
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("load offline: 3 requests") and lines[2].split() == ["run", "0", "run", "1", "median"]
    assert any(line.startswith("output tokens/s") for line in lines) and not any("GPU" in line for line in lines)


def test_a_shared_prefix_is_found(tmp_path: Path) -> None:
    """Within a run the prefix is computed once; no run finds the one before it, because the cache was emptied."""
    shared = ("load=shared_prefix", *SMALL, "load.shared=32", "load.input_min=4", "load.input_max=4", "bench.warmup=2")
    result = run_job(compose([*TINY, *shared]), tmp_path)
    assert result["bench"]["load"] == "shared_prefix"
    assert [r["cached_tokens"] for r in result["bench"]["repeats"]] == [2 * 32] * 2


def test_a_load_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a request of 92 \+ 6 tokens, the engine takes 96; raise max_model_len"):
        run_job(compose([*TINY, "load.input_min=82", "load.input_max=82", "load.shared=10", "load.output_min=6"]), tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_sampling_settings_apply(tmp_path: Path) -> None:
    """sampler=greedy refuses the default temperature of 0.6, and runs with 0."""
    with pytest.raises(ValueError, match=r"sampler=greedy needs temperature to be 0, got 0\.6"):
        run_job(compose([*TINY, "sampler=greedy"]), tmp_path)
    assert run_job(compose([*TINY, "sampler=greedy", "sampling.temperature=0"]), tmp_path)["bench"]["median"]["steps"] > 1


def test_no_peer_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the engine is built; a package that only brings vllm's kernels does not count."""
    for module in (None, ModuleType("vllm")):
        monkeypatch.setitem(sys.modules, "vllm", module)
        with pytest.raises(ValueError, match=r"bench.peer=vllm: vllm cannot be used here .*pip install vllm"):
            run_job(compose([*TINY, "bench.peer=vllm", "model.path=nowhere/at-all/x"]), tmp_path)


class FakeVLLM(ModuleType):
    """What is used of vllm, with a record of what was asked."""

    __version__ = "0.0.fake"

    def __init__(self, short: int = 0) -> None:
        super().__init__("vllm")
        calls = self.calls = []

        class LLM:
            def __init__(self, **settings: Any) -> None:
                calls.append(("LLM", settings))

            def reset_prefix_cache(self) -> None:
                calls.append(("reset", {}))

            def generate(self, prompts: list[dict], params: list[Any], use_tqdm: bool) -> list[Any]:
                calls.append(("generate", {"prompts": prompts, "params": params}))
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * (p.max_tokens - short))]) for p in params]

        self.LLM, self.SamplingParams = LLM, SimpleNamespace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory without weights."""
    (tmp_path / "model").mkdir()
    config = yaml.safe_load((ROOT / "conf/model/tiny-llama.yaml").read_text())["config"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def test_a_peer_beside_ours(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same prompts in turn, each run with an empty prefix cache; half of the memory for each."""
    fake = FakeVLLM()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    overrides = [*TINY, "bench.peer=vllm", f"model.path={folder}", "gpu_memory_utilization=0.8"]
    bench = run_job(compose(overrides), tmp_path)["bench"]
    assert [name for name, _ in fake.calls] == ["LLM", *["reset", "generate"] * 3]
    settings = fake.calls[0][1]
    assert settings["model"] == str(folder) and settings["max_model_len"] == 96 and settings["enable_prefix_caching"]
    assert settings["gpu_memory_utilization"] == 0.4 and settings["skip_tokenizer_init"]
    load, asked = draw_load(compose(overrides).config.load, 0, 264), fake.calls[4][1]
    assert [p["prompt_token_ids"] for p in asked["prompts"]] == load.prompts
    assert [(p.temperature, p.max_tokens, p.ignore_eos) for p in asked["params"]] == [(0.6, n, True) for n in load.outputs]
    assert bench["peer"] == {"name": "vllm", "version": "0.0.fake", "share": 0.4}
    assert all(r["peer"]["speedup"] == r["peer"]["seconds"] / r["seconds"] for r in bench["repeats"])
    assert "peer: output tokens/s" in capsys.readouterr().out


def test_a_peer_that_did_less(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", FakeVLLM(short=1))
    with pytest.raises(RuntimeError, match="vllm drew"):
        run_job(compose([*TINY, "bench.peer=vllm", f"model.path={folder}"]), tmp_path)


def test_a_peer_needs_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", FakeVLLM())
    with pytest.raises(ValueError, match=r"reads the model from a directory.*make_checkpoint"):
        run_job(compose([*TINY, "bench.peer=vllm"]), tmp_path)
