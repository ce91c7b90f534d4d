"""Tensor parallelism on gloo: several ranks draw one rank's tokens; plans of any size; a killed rank is named."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from core.interfaces import SamplingParams, StepPlan
from core.llm import LLM
from plugins.executors import wire
from tests.real import TINY

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = TINY
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8, 7]]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_draw_the_tokens_of_one(size: int) -> None:
    """tiny-llama has two KV heads, so four ranks keep copies."""
    with LLM("tiny-llama", **SETTINGS) as llm:
        want = [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]
    with LLM("tiny-llama", tensor_parallel_size=size, **SETTINGS) as llm:
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
        children = [p.child for p in llm.engine.executor.processes.all]  # type: ignore[attr-defined]
        assert len(children) == size - 1
    llm.close()
    assert [child.returncode for child in children] == [0] * (size - 1)


def test_a_killed_rank_is_named() -> None:
    """B56: between two steps; the error comes within 5 seconds and no process stays."""
    with LLM("tiny-llama", tensor_parallel_size=2, **SETTINGS) as llm:
        llm.add_request([1, 2, 3], PARAMS)
        llm.step()
        child = llm.engine.executor.processes.all[0].child  # type: ignore[attr-defined]
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
