"""The scripts of benchmarks/gpu on a CPU: checkpoints that load, tables that add up, processes that may be refused."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu.ablation import SLACK, Worker, markdown, pool, rows, run_group
from benchmarks.gpu.make_checkpoint import shapes_of, shards, write
from benchmarks.gpu.startup import start
from benchmarks.metrics_overhead import compare
from benchmarks.same_code import pair, run
from core.config import compose
from core.llm import LLM, SamplingParams
from tests.report_sweeps import make_sweep, noisy

LOAD = ("load.num_requests=2", "load.input_min=4", "load.input_max=4", "load.output_min=3", "load.output_max=3")
RANKS = "1,2"
SETTINGS = ["model=tiny-llama", "max_model_len=96", "cpu_threads=1", *LOAD]


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_a_checkpoint_that_loads(tmp_path: Path, preset: str) -> None:
    """Sharded with an index; tied and untied heads; the numbers are what was promised, and the seed fixes them."""
    config = compose([f"model={preset}"]).config.model.config
    size = write(config, tmp_path / "a", seed=0, limit=100_000)
    write(config, tmp_path / "b", seed=0, limit=10**9)
    whole = load_file(tmp_path / "b/model.safetensors")
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == size == sum(2 * t.numel() for t in whole.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "a" / file)[name], whole[name]), name
    matrix = whole["model.layers.0.mlp.down_proj.weight"].float()
    assert matrix.std() == pytest.approx(0.02, rel=0.05) and (whole["model.norm.weight"] == 1).all()
    with LLM(str(tmp_path / "a"), max_model_len=96, cpu_threads=1, device="cpu") as llm:
        output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert len(output.token_ids) == 3


def test_shards_of_a_real_model() -> None:
    """No tensor is lost or split; qwen3-8b has 8.19 billion parameters."""
    shapes = shapes_of(compose(["model=qwen3-8b"]).config.model.config)
    groups = list(shards(shapes, 4 * 10**9))
    assert [name for group in groups for name in group] == list(shapes) and 5 <= len(groups) <= 8
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(8.19e9, rel=1e-3)


def result(reason: str = "", *seconds: float) -> dict[str, Any]:
    runs = [
        {
            "seconds": s,
            "output_tokens_per_s": 100 / s,
            "host_per_decode_step_us": {"launch": 50.0},
            "memory": {"peak": 2**30},
        }
        for s in seconds
    ]
    return {"reason": reason, "runs": runs}


def test_the_table_of_an_ablation() -> None:
    """Medians against the baseline of the same group; a refused variant says why, and no table cell is broken by it."""
    found = rows(
        [
            {"baseline": result("", 2, 4, 3), "graphs": result("", 6, 5, 7), "flash": result("no GPU | here")},
            {"baseline": result("", 2), "greedy": result("died", 1.0)},
        ]
    )
    assert [row.get("change") for row in found] == [0, 1, None, 0, None]
    lines = markdown(found).splitlines()
    assert lines[2].startswith("| baseline, group 1 | 33 | 3.000 (2.000 to 4.000) |  | 50 | 1.00 |")
    assert lines[3].startswith("| graphs=off | 17 | 6.000 (5.000 to 7.000) | +100.0% | 50 | 1.00 |")
    assert lines[4].startswith("| attention=flash | n/a: no GPU / here |") and "n/a: died" in lines[6]
    assert len({line.count("|") for line in lines}) == 1


def test_the_pool_of_an_ablation() -> None:
    """What all requests hold when they are longest, and room for their last blocks."""
    assert pool(SETTINGS, [0, 1]) == 2 * (4 + 2) + 2 * SLACK


def test_a_refused_variant_says_why(tmp_path: Path) -> None:
    """The process ends with the engine's own message; later runs are not asked of it."""
    worker = Worker("flash", [*SETTINGS, "task=bench", "device=cpu", "attention=flash"], 64, tmp_path / "log")
    assert worker.facts is None and "attention=flash needs device" in worker.reason
    assert worker.ask(0) is None
    worker.close()
    assert worker.process.returncode == 1


def test_the_cost_of_metrics() -> None:
    """Both ways do the same work, in turn; what is said is a ratio. How large it is depends on the machine."""
    found = compare(["cpu_threads=1", *SETTINGS[:2], *LOAD], rounds=2, record=True)
    assert [run.keys() for run in found["seconds"]] == [{"on", "off", "off again"}] * 2
    assert all(seconds > 0 for run in found["seconds"] for seconds in run.values())
    for name in ("cost", "control", "cpu_time_cost", "cpu_time_control"):
        assert -1 < found[name]["low"] <= found[name]["median"] <= found[name]["high"], name


@pytest.mark.nightly
def test_an_ablation(tmp_path: Path) -> None:
    """Two processes in turn; the refused one leaves the other alone."""
    args = argparse.Namespace(overrides=[*SETTINGS, "device=cpu"], repeats=2)
    group = run_group(["baseline", "flash"], args, tmp_path)
    assert len(group["baseline"]["runs"]) == 2 and not group["flash"]["runs"] and group["flash"]["reason"]
    assert [r["seed"] for r in group["baseline"]["runs"]] == [0, 1]


@pytest.mark.nightly
def test_a_start(tmp_path: Path) -> None:
    """Every event is seen, in order."""
    seen = start(["model=tiny-llama", "max_model_len=96", "device=cpu"], tmp_path)
    times = [seen[name] for name in ("imported", "built", "first_token", "ready", "exited")]
    assert times == sorted(times) and seen["report"]["num_blocks"] > 0


def test_ways_to_gather_draw_the_same(tmp_path: Path) -> None:
    """Two ranks, a vocabulary that they share unevenly: the script itself compares the ids of every way."""
    from benchmarks.tensor_parallel_gather import WAYS, main

    sizes = ["--ranks", "2", "--rows", "1,5", "--vocab", "1001", "--repeats", "1"]
    assert main([*sizes, "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["rows"], row["rows_are"]) for row in found] == [(1, "greedy"), (1, "hot"), (5, "greedy"), (5, "hot")]
    assert found[2]["winners"]["bytes"] == 5 * 16 and found[2]["all_gather"]["bytes"] == 5 * 501 * 4
    assert all(row[way]["us"] > 0 for row in found for way in WAYS)


@pytest.mark.nightly
def test_ways_to_add_up_are_equal() -> None:
    """Three ranks; the script itself compares both ways with the sum."""
    from benchmarks.tensor_parallel_reduce import measure

    (found,) = measure(3, [5], 12, 1)
    assert (found["bytes"], found["ranks"]) == (240, 3) and found["all_reduce_us"] > 0 < found["one_shot_us"]


def row_of_ranks(**kill: Any) -> dict[str, Any]:
    def served(rate: float) -> dict[str, Any]:
        records = [{"output_tokens_per_s": rate}]
        return {"loads": {"single": records, "offline": records}}

    ways = {"nccl": {"10240": 10e-6, "2621440": 2e-5}, "one_shot": {"10240": 5e-6, "2621440": "no | room"}}
    parts = {
        "serve 1": served(100.0),
        "serve 2": served(150.0),
        "judge 2": {"compared": 90, "parted": 1, "wrong": ["request 3"], "of": 100},
        "reduce 2": {"count": 81, "seconds": ways},
        "plan 2": {"rows": [{"pack": {"median_us": 20.0}, "send": {"median_us": 30.0}}]},
        "kill 2": {"reported_s": 1.0, "closed_s": 2.0, "said": "dead", "workers": 1, "left": []}
        | {"mib_before": [5], "mib_after": [6], **kill},
    }
    return {"model": "m", "parts": parts, "failed": {}}


def test_the_tables_of_ranks() -> None:
    """Side by side with the first number of ranks; shares of one request's step; what is missing is a dash and said."""
    from benchmarks.gpu.tensor_parallel import markdown, problems

    row = row_of_ranks()
    lines = markdown([row]).splitlines()
    assert lines[2:4] == [
        "| m | 1 | 100 | 100.0 | 1.00 | - |",
        "| m | 2 | 150 | 150.0 | 1.50 | 90 of 100, 1, 1 |",
    ]
    assert lines[7] == "| m | 2 | 6667 | 81 | 10.0 | 12% | 5.0 | 50.0 | 0.8% |"
    assert "reported after 1.00 s" in lines[-1] and "before [5] and after [6]" in lines[-1]
    assert problems([row]) == ["m on 2 ranks: request 3"]
    few = row_of_ranks()
    few["parts"]["judge 2"] |= {"compared": 49, "wrong": []}
    assert problems([few]) == ["m on 2 ranks: only 49 of 100 tokens could be compared"]
    for kill, text in (({"reported_s": 6.0}, "after 6.0 s"), ({"said": ""}, "reported"), ({"left": [7]}, "[7] are still")):
        assert text in problems([row_of_ranks(**kill)])[1]
    assert problems([row_of_ranks(mib_after=[900])])[1] == "m: GPU 0 is not free"
    row["parts"]["reduce 2"]["seconds"]["one_shot"]["10240"] = "no | way"
    assert "| 10.0 | 12% | no / way | 50.0 |" in markdown([row])
    del row["parts"]["serve 1"]["loads"]["offline"], row["parts"]["reduce 2"], row["parts"]["judge 2"]
    row["failed"] = {"serve 1": "stopped after 9 s", "judge 2": "no time left"}
    lines = markdown([row]).splitlines()
    assert lines[2:4] == ["| m | 1 | - | 100.0 | 1.00 | - |", "| m | 2 | 150 | 150.0 | 1.50 | - |"]
    assert lines[7] == "| m | 2 | 6667 | - | - | - | - | 50.0 | 0.8% |"
    assert problems([row]) == ["m: serve 1: stopped after 9 s", "m: judge 2: no time left"]


def test_a_part_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it printed until its limit is kept; the processes that it started end with it."""
    import subprocess

    from benchmarks.gpu import tensor_parallel

    code = "import json, subprocess, time; child = subprocess.Popen(['sleep', '99']); "
    code += "print(json.dumps({'pid': child.pid}), flush=True); time.sleep(99)"
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: popen([command[0], "-c", code], **how))
    with pytest.raises(tensor_parallel.Failed, match="stopped after 1 s") as caught:
        tensor_parallel.run("any", [], 1.0)
    assert caught.value.found is not None
    stat = Path(f"/proc/{caught.value.found['pid']}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("a process of the stopped part is still running")


@pytest.mark.nightly
def test_time_of_an_all_reduce() -> None:
    """Two ranks on a CPU."""
    from benchmarks.gpu.tensor_parallel_parts import reduce

    found = reduce(2, "cpu", 3, [2048, 4096])["seconds"]["gloo"]
    assert list(found) == ["2048", "4096"] and all(seconds > 0 for seconds in found.values())


@pytest.mark.nightly
def test_ranks_side_by_side(tmp_path: Path) -> None:
    """The whole script on a CPU: without time, from the start, only what is missing; wrong tokens are found."""
    from benchmarks.gpu.tensor_parallel import main
    from benchmarks.gpu.tensor_parallel_parts import judge

    sizes = ["load.input_min=4", "load.input_max=4", "load.output_min=8", "load.output_max=8"]
    given = ["--models", "tiny-qwen3", "--ranks", RANKS, "--device", "cpu", "--repeats", "1", "--loads", "single"]
    limits = ["max_model_len=96", "cpu_threads=1", "max_num_batched_tokens=256"]
    out = tmp_path / "found.json"
    command = [*given, *limits, *sizes, "--out", str(out)]
    assert main([*command, "--limit", "1"]) == 1
    row = json.loads(out.read_text())["rows"][0]
    assert not row["parts"] and set(row["failed"].values()) == {"no time left"}
    assert main(command) == 0
    record = json.loads(out.read_text())
    row = record["rows"][0]
    assert list(row["parts"]) == ["serve 1", "serve 2", "judge 2", "kill 2", "reduce 2", "plan 2"] and not row["failed"]
    assert "SIGKILL" in row["parts"]["kill 2"]["said"] and row["parts"]["judge 2"]["of"] == 32 * 48
    assert [step["bytes"] for step in row["parts"]["plan 2"]["rows"]] == [144, 5424]
    del row["parts"]["plan 2"]
    row["parts"]["serve 1"]["summary"] = "kept"
    out.write_text(json.dumps(record))
    assert main(command) == 0
    again = json.loads(out.read_text())["rows"][0]["parts"]
    assert again["serve 1"]["summary"] == "kept" and "plan 2" in again

    serve = row["parts"]["serve 1"]
    files = [tmp_path / name for name in ("a", "b")]
    files[0].write_text(json.dumps(serve))
    first, *rest = serve["tokens"][5].split()
    serve["tokens"][5] = " ".join([str((int(first) + 1) % serve["vocab"]), *rest])
    files[1].write_text(json.dumps(serve))
    found = judge(files[0], files[1], ["model=tiny-qwen3", "device=cpu", *limits])
    assert found["parted"] == 1 and found["compared"] == 31 * 48
    assert found["wrong"] and found["wrong"][0].startswith("request 5, token 0: ")


def test_pairs_of_sweeps(tmp_path: Path) -> None:
    """A sweep equals itself; half the speed is no noise, and what differs is told with its size."""
    make_sweep(tmp_path / "a", noisy(0))
    make_sweep(tmp_path / "b", noisy(1, effects={"mixed": 2.0}))
    same, other = pair(tmp_path / "a", tmp_path / "a"), pair(tmp_path / "a", tmp_path / "b")
    assert same["equal"] and same["real"] == [] and same["largest_share"] == 0
    assert not other["equal"] and other["largest_share"] > 0.4 and same["comparisons"] == other["comparisons"] > 3
    slower = {name for _, name, _, _ in other["real"]}
    assert slower == {f"scheduler=mixed kv_allocator={name}" for name in ("block_hash", "paged")}


@pytest.mark.nightly
def test_two_real_sweeps(tmp_path: Path) -> None:
    """Of one cell and two repeats: the script compares what it ran, and says which sweep failed."""
    tiny = ["model=tiny-llama", "max_model_len=96", "scheduler=fcfs", "overlap=0", "sweep.repeats=2", *LOAD]
    found = run(tmp_path, 2, tiny)
    assert len(found["pairs"]) == 1 and found["pairs"][0]["sweeps"] == ["sweep0", "sweep1"]
    with pytest.raises(RuntimeError, match=r"sweep0 failed"):
        run(tmp_path / "bad", 2, [*tiny, "max_model_len=1"])
