"""What `benchmarks.gpu.tensor_parallel` runs in processes of their own: the last line of their output is JSON.

python -m benchmarks.gpu.tensor_parallel_parts serve REPEATS LOADS OVERRIDE...    greedy tokens, then the loads
python -m benchmarks.gpu.tensor_parallel_parts judge FILE_A FILE_B OVERRIDE...   where tokens part, and by how much
python -m benchmarks.gpu.tensor_parallel_parts kill OVERRIDE...             a worker dies in a step
python -m benchmarks.gpu.tensor_parallel_parts reduce RANKS DEVICE COUNT BYTES...    seconds of one all-reduce
python -m benchmarks.gpu.tensor_parallel_parts plan RANKS ROWS...    microseconds of a decode step's message
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

NEW_TOKENS = 48
TIMED = ("output_tokens_per_s", "seconds", "tpot_s", "host_per_decode_step_us", "exposed_host_gap_per_step_us", "decode_steps")


def prompts(vocab: int, longest: int, count: int = 32) -> list[list[int]]:
    """Lengths from a few tokens up to beyond a block of any size; a third of them begin alike."""
    rng = random.Random(0)
    draw = min(vocab, 10_000)
    shared = [rng.randrange(draw) for _ in range(longest // 2)]
    fresh = [[rng.randrange(draw) for _ in range(rng.randint(3, longest))] for _ in range(count)]
    return [shared + tokens[: longest // 4] if i % 3 == 0 else tokens for i, tokens in enumerate(fresh)]


def serve(repeats: int, loads: Sequence[str], overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One engine: greedy tokens, then every load `repeats` times after one run that warms up; all that is known so far."""
    from core.bench.task import Bench
    from core.config import compose
    from core.llm import SamplingParams
    from core.resolve import decide, describe

    composed = [compose([*overrides, "task=bench", f"load={load}"]) for load in loads]
    bench = Bench(composed[0], decide(composed[0]))
    with bench.llm as llm:
        vocab, longest = llm.resolved.checkpoint.config["vocab_size"], llm.resolved.limits.max_model_len // 4
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts(vocab, longest), params, use_tqdm=False)
        found: dict[str, Any] = {"summary": describe(llm.resolved)[0], "report": dict(llm.engine.executor.report())}
        found |= {"vocab": vocab, "longest": longest, "loads": {}}
        found["tokens"] = [" ".join(map(str, output.token_ids)) for output in outputs]
        for load, one in zip(loads, composed, strict=True):
            bench.config = one.config
            bench.run(repeats)
            for number in range(repeats):
                record = bench.run(number)
                found["loads"].setdefault(load, []).append({key: record.get(key) for key in TIMED})
                yield found


def judge(a: Path, b: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Tokens of two runs; float32 and everything plain on one GPU says whether the margin was wide where they part."""
    from core.llm import LLM
    from tests.gpu.margins import compare

    first, second = (json.loads(path.read_text()) for path in (a, b))
    wanted, got = ([[int(n) for n in line.split()] for line in run["tokens"]] for run in (first, second))
    model, *rest = overrides
    plain = ["dtype=float32", "attention=sdpa", "graphs=off", "fusion=off", "num_kv_blocks=8", "max_num_seqs=1"]
    with LLM(model.removeprefix("model="), overrides=[*rest, *plain]) as llm:
        found = compare(llm, prompts(first["vocab"], first["longest"]), wanted, got)
    return {**asdict(found), "of": sum(map(len, wanted))}


def kill(overrides: Sequence[str]) -> dict[str, Any]:
    """SIGKILL to the last worker while all requests are running; seconds until the engine says so and until it is closed."""
    from core.llm import LLM, SamplingParams

    model, *rest = overrides
    llm = LLM(model.removeprefix("model="), overrides=rest)
    vocab, longest = llm.resolved.checkpoint.config["vocab_size"], llm.resolved.limits.max_model_len // 4
    for tokens in prompts(vocab, longest, 8):
        llm.add_request(tokens, SamplingParams(temperature=0, max_tokens=2 * longest, ignore_eos=True))
    for _ in range(12):
        llm.step()
    workers = children()
    assert workers, "the engine has no worker processes"
    os.kill(workers[-1], signal.SIGKILL)
    started, said = time.perf_counter(), ""
    try:
        while time.perf_counter() - started < 60 and not llm.is_finished():
            llm.step()
    except Exception as error:  # whatever it is: its words are the result
        said = f"{type(error).__name__}: {error}"
    reported = time.perf_counter() - started
    llm.close()
    llm.close()
    closed, left = time.perf_counter() - started, [pid for pid in workers if alive(pid)]
    return {"reported_s": reported, "closed_s": closed, "said": said, "workers": len(workers), "left": left}


def children() -> list[int]:
    """Ranks that this process has started, in that order; not the helpers of Python and torch."""
    found = []
    for folder in Path(f"/proc/{os.getpid()}/task").iterdir():
        found += [int(pid) for pid in (folder / "children").read_text().split()]
    return sorted(pid for pid in found if b"plugins.executors" in Path(f"/proc/{pid}/cmdline").read_bytes())


def alive(pid: int) -> bool:
    """Running, not only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def reduce_rank(rank: int, size: int, meeting: str, kind: str, count: int, sizes: Sequence[int], out: str) -> None:
    """Seconds of one of `count` all-reduces in a row, on a GPU captured as the engine does it; or why there are none."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    found: dict[str, dict[int, Any]] = {}
    for way, build in {backend: library, **({"one_shot": one_shot} if kind == "cuda" else {})}.items():
        for amount in sizes:
            x = torch.zeros(amount // 2, dtype=torch.bfloat16, device=device)
            try:
                found.setdefault(way, {})[amount] = timed(repeated(build(x), count), device) / count
            except RuntimeError as error:  # alike on every rank: this machine cannot do it
                found.setdefault(way, {})[amount] = str(error).splitlines()[0]
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def library(x: Any) -> Callable[[], Any]:
    """By gloo or NCCL, in place."""
    import torch.distributed as dist

    return lambda: dist.all_reduce(x)


def one_shot(x: Any) -> Callable[[], Any]:
    """Every rank reads what all others have and adds it up itself; a copy to where they can read it comes first."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    shared = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, dist.group.WORLD)
    name = dist.group.WORLD.group_name
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(shared.copy_(x), "sum", name)


def repeated(once: Callable[[], Any], count: int) -> Callable[[], Any]:
    return lambda: [once() for _ in range(count)]


def timed(run: Callable[[], Any], device: Any) -> float:
    """Median seconds; on a GPU of a captured graph."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    wait()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        run = graph.replay
    times = []
    for _ in range(8):
        dist.barrier()
        wait()
        started = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def reduce(size: int, kind: str, count: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Way -> bytes -> seconds of one all-reduce."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        arguments = (size, f"{folder}/meeting", kind, count, sizes, out)
        mp.spawn(reduce_rank, args=arguments, nprocs=size)  # type: ignore[attr-defined]
        return {"ranks": size, "count": count, "seconds": json.loads(Path(out).read_text())}


def main(argv: Sequence[str]) -> int:
    part, *given = argv
    if part == "serve":
        steps = serve(int(given[0]), given[1].split(","), given[2:])
    elif part == "judge":
        steps = [judge(Path(given[0]), Path(given[1]), given[2:])]
    elif part == "kill":
        steps = [kill(given)]
    elif part == "plan":
        from benchmarks.tensor_parallel import message

        steps = [{"rows": [message(int(n), int(given[0]), 2000) for n in given[1:]]}]
    else:
        steps = [reduce(int(given[0]), given[1], int(given[2]), [int(n) for n in given[3:]])]
    for found in steps:
        print(json.dumps(found, default=str), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
