"""Tensor parallelism on gloo: several ranks draw one rank's tokens; plans of any size; a killed rank is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.interfaces import SamplingParams, StepPlan
from core.llm import LLM
from core.parallel import ExecutorLost
from plugins.executors import wire
from tests.real import TINY

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = TINY
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8, 7]]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_draw_the_tokens_of_one(size: int) -> None:
    """tiny-llama has two KV heads, so four ranks keep copies."""
    with LLM("tiny-llama", **SETTINGS) as llm:
        want = [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]
    with LLM("tiny-llama", tensor_parallel_size=size, **SETTINGS) as llm:
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
        children = [p.child for p in llm.engine.executor.ranks.all]  # type: ignore[attr-defined]
        assert len(children) == size - 1
    llm.close()
    assert [child.returncode for child in children] == [0] * (size - 1)


def test_a_killed_rank_is_named() -> None:
    """B56: between two steps; the error comes within 5 seconds and no process stays."""
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        llm.add_request([1, 2, 3], PARAMS)
        llm.step()
        child = llm.engine.executor.ranks.all[0].child  # type: ignore[attr-defined]
        os.kill(child.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ChildProcessError, match=r"rank 1 of 2 .* SIGKILL"):
            llm.generate(PROMPTS, PARAMS)
        assert time.monotonic() - started < 5 and child.poll() is not None


def test_a_plan_of_four_megabytes() -> None:
    """B55: no fixed limit; every field arrives."""
    ints = np.arange(1_000_000, dtype=np.int32)
    rows = ints[:6].reshape(-1, 3)
    pairs = ints[:4].reshape(-1, 2)
    masks = np.array([[1, 2], [3, 4]], np.uint8)
    plan = StepPlan(ints[:2], ints[:2], ints[:2], ints[:2], ints, rows, pairs, pairs, ints[:9], (PARAMS,), ints[:2], masks, 3)
    one, other = socket.socketpair()
    with one, other:
        thread = threading.Thread(target=wire.send, args=(one, wire.PLAN, wire.pack(plan)))
        thread.start()
        kind, message = wire.receive(other)
        thread.join()
        got = wire.unpack(message)
        assert kind == wire.PLAN and len(message) > 4_000_000 and got.params == plan.params and got.shared_blocks == 3
        for name in (*wire._INTS, "masks"):
            assert np.array_equal(getattr(got, name), getattr(plan, name)), name
        one.close()
        with pytest.raises(EOFError):
            wire.receive(other)


def gone(pids: list[int]) -> bool:
    """None of these processes exists; a zombie counts as one that does."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def steps_until(llm: LLM, done: Callable[[], bool]) -> None:
    while not done():
        llm.step()


def test_restart_goes_on_where_the_ranks_died() -> None:
    """Unfinished requests keep their tokens, draw the rest, and are those of an undisturbed run; one ends before."""
    with LLM("tiny-llama", **SETTINGS) as llm:
        want = [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        numbers = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
        steps_until(llm, lambda: any(len(r.tokens) > r.num_prompt + 1 for r in llm.engine.live.values()))
        os.kill(llm.engine.executor.ranks.all[0].child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(ExecutorLost, match="SIGKILL") as lost:
            steps_until(llm, lambda: False)  # which step notices is a race
        number, *_ = lost.value.requests
        assert number in numbers and f"lost: {number}" in str(lost.value)
        with pytest.raises(ExecutorLost):
            llm.step()
        llm.restart()
        results = {}
        while not llm.is_finished():
            results |= {o.request_id: o for o in llm.step()}
        assert [results[n].token_ids for n in numbers] == want
        assert llm.engine.kv.audit()[2] == 0
    with pytest.raises(ValueError, match="closed"):
        llm.restart()


FAULTS = """
import os, signal, sys, threading, time
import plugins.executors.processes as processes
from core.llm import LLM
made, send = [], processes.Processes.send
def noting(self, kind, message):
    made[:] = [p.child.pid for p in self.all]
    send(self, kind, message)
    if kind == processes.BUILD and sys.argv[1] == "load":
        os.kill(made[-1], signal.SIGKILL)
processes.Processes.send = noting
started = time.monotonic()
try:
    llm = LLM("tiny-llama", tensor_parallel_size=4, num_kv_blocks=64, max_model_len=96)
    llm.generate([[1, 2, 3]] * 8, None)
    print("pids", *made, flush=True)
    threading.Event().wait(60)
finally:
    print("made", *made, flush=True)
"""


def run(word: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", FAULTS, word], env=env, start_new_session=True, **pipes)  # type: ignore


def test_a_rank_killed_while_loading() -> None:
    """B56: the start fails with its name, and no process stays."""
    child = run("load")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 1 and "rank 3 of 4" in err and "SIGKILL" in err, err
    assert len(out.split()) == 4 and gone([int(pid) for pid in out.split()[1:]])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_parent_leave_nothing(number: signal.Signals) -> None:
    """The whole process group gets Ctrl-C, as from a terminal; a SIGKILL goes to the parent alone."""
    child, before = run("wait"), set(os.listdir("/dev/shm"))
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith("pids"), child.communicate()[1]
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 3 and not gone(pids)
    os.killpg(child.pid, number) if number == signal.SIGINT else os.kill(child.pid, number)
    child.communicate(timeout=30)
    deadline = time.monotonic() + 15
    while not gone(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pids) and set(os.listdir("/dev/shm")) <= before
