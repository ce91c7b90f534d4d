"""Tensor parallelism on gloo: plans of any size, a rank that dies is named, nothing stays behind, restart, torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core import device
from core.config import compose
from core.interfaces import SamplingParams, StepPlan
from core.llm import LLM
from core.parallel import ExecutorLost, Group
from core.resolve import decide
from core.runner import Runner
from plugins.attention.sdpa import Sdpa
from plugins.executors import wire
from tests.real import TINY

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = TINY
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8, 7]]


def test_a_rank_killed_in_a_step_is_named() -> None:
    """B56: while it computes; the error comes within 5 seconds with the requests that it cost, and no process stays."""
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        child, killed = llm.engine.executor.ranks.all[0].child, []  # type: ignore[attr-defined]

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(child.pid, signal.SIGKILL)

        timer = threading.Timer(0.5, kill)
        timer.start()
        with pytest.raises(ExecutorLost, match=r"rank 1 of 2 .* SIGKILL.*lost: 0, 1, 2, 3"):
            llm.generate([[1, 2, 3]] * 200, SamplingParams(max_tokens=90, ignore_eos=True))
        assert time.monotonic() - killed[0] < 5 and child.poll() == -signal.SIGKILL
    llm.close()


def test_a_rank_that_raises_says_why() -> None:
    """Its traceback is among its last words; the rank that it leaves alone in a sum reports it."""
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        wire.send(llm.engine.executor.ranks.all[0].connection, wire.PLAN, b"no plan")  # type: ignore[attr-defined]
        with pytest.raises(ExecutorLost, match=r"(?s)rank 1 of 2 .* exit code 1.*ValueError"):
            llm.generate(PROMPTS, PARAMS)


def test_the_smallest_pool_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """B52: ranks that find different free memory agree on the minimum, before anything is allocated. Ranks are threads here."""
    free = {"rank 0": 3 << 20, "rank 1": 1 << 20}
    monkeypatch.setattr(device, "available_memory", lambda: free[threading.current_thread().name])
    monkeypatch.setattr(Sdpa, "allocate", lambda self, spec, blocks, size: allocated.append(blocks))
    resolved = decide(compose(["model=tiny-llama", "tensor_parallel_size=2", "device=cpu", "attention=sdpa", "cpu_threads=1"]))
    store, runners, allocated = dist.HashStore(), {}, []  # pyright: ignore[reportPrivateImportUsage]

    def work(rank: int) -> None:
        group = Group(store, rank, 2, torch.device("cpu"), neighbours=2, address="127.0.0.1")
        runners[rank] = Runner(resolved, group)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counts = [runners[rank].num_blocks for rank in range(2)]
    block = runners[1].sizing.block_bytes
    assert counts == [(1 << 20) // 4 // 2 // block - 1] * 2 and allocated == [counts[0] + 1] * 2
    assert [runners[rank].sizing.kv for rank in range(2)] == [(counts[0] + 1) * block] * 2


def test_a_taken_port_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """B54: torch's default port is taken and even asked for; the ranks meet at a free one, beside another engine."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else holds it: as good
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
            assert len(llm.generate(PROMPTS, PARAMS)[0].token_ids) == 6


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
    llm = LLM("tiny-llama", tensor_parallel_size=4 if sys.argv[1] == "load" else 2, num_kv_blocks=64, max_model_len=96)
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


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_ctrl_c_and_a_killed_parent_leave_nothing(number: signal.Signals) -> None:
    """The whole process group gets Ctrl-C, as from a terminal; a SIGKILL goes to the parent alone."""
    child, before = run("wait"), set(os.listdir("/dev/shm"))
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith("pids"), child.communicate()[1]
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 1 and not gone(pids)
    os.killpg(child.pid, number) if number == signal.SIGINT else os.kill(child.pid, number)
    child.communicate(timeout=30)
    deadline = time.monotonic() + 15
    while not gone(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pids) and set(os.listdir("/dev/shm")) <= before


AGENTS = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-port", "29511"]
COMMAND = ["-m", "core.run", "model=tiny-llama", "device=cpu", "max_model_len=96", "num_kv_blocks=64", "sampling.max_tokens=8"]


def agents(places: list[list[str]], address: str, folder: Path) -> list[Any]:
    """Token ids that two agents of torchrun generate, each started with the words before it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*AGENTS, "--master-addr", address]
    ranks = [*COMMAND, "tensor_parallel_size=2"]
    logs = [(folder / f"{n}.log").open("w+") for n in (0, 1)]
    children = [
        subprocess.Popen(
            [*place, sys.executable, *words, "--node-rank", str(n), *ranks, f"hydra.run.dir={folder / str(n)}"],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        for n, (place, log) in enumerate(zip(places, logs, strict=True))
    ]
    codes = [child.wait(timeout=120) for child in children]
    for log in logs:
        log.close()
    assert codes == [0, 0], [(folder / f"{n}.log").read_text()[-2000:] for n in (0, 1)]
    return [o["token_ids"] for o in json.loads((folder / "0/result.json").read_text())["outputs"]]


@pytest.fixture
def alone(tmp_path: Path) -> list[Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *COMMAND, f"hydra.run.dir={tmp_path / 'one'}"]
    subprocess.run(command, env=env, cwd=tmp_path, check=True, capture_output=True)
    return [o["token_ids"] for o in json.loads((tmp_path / "one/result.json").read_text())["outputs"]]


@pytest.mark.nightly
def test_two_agents_on_loopback(tmp_path: Path, alone: list[Any]) -> None:
    """torchrun with two nodes on one machine: the tokens of one rank."""
    assert agents([[], []], "127.0.0.1", tmp_path) == alone


@pytest.mark.nightly
def test_two_machines(tmp_path: Path, alone: list[Any]) -> None:
    """Two network namespaces joined by a veth pair: nothing but the wire between them."""
    if not shutil.which("ip") or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here (they need root and iproute2)")
    machines = [subprocess.Popen(["unshare", "-n", "sleep", "300"]) for _ in range(2)]
    try:
        time.sleep(0.5)  # until both are in their own
        pids = [str(machine.pid) for machine in machines]
        subprocess.run(
            ["ip", "link", "add", "ve0", "netns", pids[0], "type", "veth", "peer", "ve1", "netns", pids[1]], check=True
        )
        into = [["nsenter", "-t", pid, "-n"] for pid in pids]
        for n, enter in enumerate(into):
            for words in (f"addr add 10.77.0.{n + 1}/24 dev ve{n}", f"link set ve{n} up", "link set lo up"):
                subprocess.run([*enter, "ip", *words.split()], check=True)
        assert agents(into, "10.77.0.1", tmp_path) == alone
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
