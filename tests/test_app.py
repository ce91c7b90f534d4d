"""`task=generate` from end to end on a tiny model: result.json, streams, prompt files, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.app import run_job
from core.config import compose

TINY = ["model=tiny-llama", "sampling.max_tokens=5", "sampling.ignore_eos=true", "max_model_len=96", "cpu_threads=1"]


def run(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    result = run_job(compose([*TINY, *overrides]), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result, default=str))
    return result


def test_result_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The promised keys; answers on stdout in the order of the prompts, all else on stderr."""
    result = run(tmp_path, "prompts=[first,second]", "seed=3")
    assert {"plugins", "settings", "environment", "seed", "outputs", "timings"} <= result.keys() and result["seed"] == 3
    assert {k: v["name"] for k, v in result["plugins"].items()} == {
        "scheduler": "fcfs",
        "kv_allocator": "block_hash",
        "attention": "sdpa",
        "arch": "llama",
        "sampler": "gumbel",
        "executor": "local",
    }
    assert all(v["version"] for v in result["plugins"].values())
    assert result["settings"]["sampling"]["max_tokens"] == 5 and result["environment"]["packages"]["torch"]
    for output in result["outputs"]:
        assert len(output["token_ids"]) == 5 and output["finish_reason"] == "length" and isinstance(output["text"], str)
    out, err = capsys.readouterr()
    assert out == "".join(f"> {o['prompt']}\n{o['text']}\n\n" for o in result["outputs"])
    assert "kv_allocator" in err and "scheduler" in err and "KV blocks" in err and "GiB" in err
    assert result["timings"]["prefill_tokens_per_s"] > 0 and result["timings"]["decode_tokens_per_s"] > 0
    assert [o["chat_template"] for o in result["outputs"]] == [False, False] and "chat template" not in err


def test_default_is_greedy_and_repeatable(tmp_path: Path) -> None:
    one, two = (run(tmp_path / name, "prompts=[abc]") for name in "ab")
    assert one["outputs"][0]["token_ids"] == two["outputs"][0]["token_ids"]


def test_text_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    result = run(tmp_path, f"prompts_file={tmp_path}/p.txt")
    assert [o["prompt"] for o in result["outputs"]] == ["one", "two"]


def test_json_lines(tmp_path: Path) -> None:
    """Per-line parameters; token ids as a prompt."""
    rows = [{"prompt": "abc", "max_tokens": 2}, {"prompt": [97, 98], "temperature": 1.0, "seed": 4}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = run(tmp_path, f"prompts_file={tmp_path}/p.jsonl")
    assert [len(o["token_ids"]) for o in result["outputs"]] == [2, 5]
    assert result["outputs"][1]["prompt_tokens"] == 2 and result["outputs"][1]["seed"] == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "b"', "p.jsonl line 2"),
        ("p.jsonl", '{"question": "a"}', '"prompt" .*or "messages"'),
        ("p.jsonl", '{"prompt": "a", "temprature": 1}', "unknown sampling parameter 'temprature'.*temperature"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be"),
        ("p.jsonl", '{"prompt": 5}', "text or a list of token ids, got 5"),
        ("p.jsonl", '{"messages": []}', "must be a list of objects"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "no chat template"),
        ("p.jsonl", '{"prompt": "a", "given": ["temperature"]}', "unknown sampling parameter 'given'"),
        ("p.jsonl", '{"prompt": "a", "stop_token_ids": 5}', "line 1: stop_token_ids must be a list"),
        ("p.csv", "a", "must end in .txt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Each names the line and what is wrong."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, f"prompts_file={tmp_path}/{name}")
    assert not (tmp_path / "result.json").exists()


def test_an_old_result_does_not_survive_a_failing_run(tmp_path: Path) -> None:
    run(tmp_path, "prompts=[a]")
    with pytest.raises(ValueError, match="the prompt is empty"):
        run(tmp_path, "prompts=['']")
    assert not (tmp_path / "result.json").exists()


def test_two_sources_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="were both given"):
        run(tmp_path, "prompts=[a]", "prompts_file=b.txt")


def test_missing_file_and_missing_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        run(tmp_path, "prompts_file=nowhere.txt")
    with pytest.raises(ValueError, match="no chat template"):
        run(tmp_path, "chat=on")


def test_a_bad_prompt_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt 1: the prompt has 200 tokens, max_model_len is 96"):
        run(tmp_path, f"prompts=[a,{'x' * 200}]")


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "core.run", *TINY, "prompts=[abc,d]", "hydra.run.dir=out", *overrides]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_stops_at_the_next_step(tmp_path: Path) -> None:
    """Exit code 130, result.json holds what was finished and what was drawn so far, no traceback."""
    child = start(tmp_path, "max_model_len=100000", "model.config.max_position_embeddings=100000", "sampling.max_tokens=90000")
    assert child.stdout and child.stderr
    assert child.stdout.readline() == "> abc\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err and "stopping" in err
    outputs = json.loads((tmp_path / "out/result.json").read_text())["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["abort", "abort"]


def test_metrics_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """inferlab_metrics adds numbers; one that raises is left out and named."""
    from core.hooks import Metric
    from core.interfaces import hookimpl

    class Good:
        @hookimpl
        def inferlab_metrics(self, result: Any) -> dict[str, Metric]:
            return {"answers": Metric(len(result["outputs"]), "1", "how many")}

    class Bad:
        @hookimpl
        def inferlab_metrics(self, result: Any) -> dict[str, Metric]:
            raise RuntimeError("no")

    composed = compose([*TINY, "prompts=[abc]"])
    manager = composed.registry.manager
    plugins = Good(), Bad()
    for plugin in plugins:
        manager.register(plugin)
    try:
        result = run_job(composed, tmp_path)
    finally:
        for plugin in plugins:
            manager.unregister(plugin)
    assert result["metrics"] == {"answers": {"value": 1, "unit": "1", "doc": "how many"}}
