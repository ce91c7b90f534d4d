"""inferlab and transformers on the same CPU, the same model, the same prompts, in one process, interleaved.

    python -m benchmarks.cpu_generate [--repeats 3] [--out benchmarks/results/cpu_generate.json]

Load: 32 requests, prompts of 16 to 128 tokens, outputs of 16 to 192, greedy, EOS ignored, fresh prompts in each repeat.
transformers runs them in static batches (of 8, 16 and 32; each until its longest output is done); only wanted tokens count.
Single stream: one request, 64 tokens in, 128 out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from core.llm import LLM, SamplingParams
from core.machine import default_threads
from tests.smollm2_reference import load

Load = list[tuple[list[int], int]]
VOCAB = 49_000


def make_load(seed: int, count: int = 32) -> Load:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 128))] for _ in range(count)]
    return [(prompt, rng.randint(16, 192)) for prompt in prompts]


def run_inferlab(llm: LLM, load: Load) -> int:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in load]
    outputs = llm.generate([p for p, _ in load], params, use_tqdm=False)
    return sum(len(o.token_ids) for o in outputs)


@torch.inference_mode()
def run_transformers(model: Any, load: Load, batch: int) -> int:
    done = 0
    for at in range(0, len(load), batch):
        part = load[at : at + batch]
        width = max(len(p) for p, _ in part)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
        longest = max(n for _, n in part)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=0
        )
        assert out.shape[1] == width + longest
        done += sum(n for _, n in part)
    return done


def timed(run: Callable[[], int]) -> float:
    """Tokens per second."""
    started = time.perf_counter()
    count = run()
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_generate.json"))
    args = parser.parse_args()
    llm = LLM("smollm2", max_model_len=512, max_num_seqs=32)
    model, _ = load()
    model.generation_config.eos_token_id = None
    one = [(make_load(99, 1)[0][0][:1] * 64, 16)]
    run_inferlab(llm, one)
    run_transformers(model, one, 1)
    rates: dict[str, list[float]] = {}
    for repeat in tqdm(range(args.repeats), desc="repeats"):
        many, single = make_load(repeat), [([random.Random(repeat).randrange(VOCAB) for _ in range(64)], 128)]
        rows: dict[str, Callable[[], int]] = {"inferlab": partial(run_inferlab, llm, many)}
        for batch in (8, 16, 32):
            rows[f"transformers batch {batch}"] = partial(run_transformers, model, many, batch)
        rows["inferlab single"] = partial(run_inferlab, llm, single)
        rows["transformers single"] = partial(run_transformers, model, single, 1)
        for name, run in rows.items():
            rates.setdefault(name, []).append(timed(run))
            tqdm.write(f"{name}: {rates[name][-1]:.1f} tok/s", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(medians[f"transformers batch {b}"] for b in (8, 16, 32))
    record = {
        "command": "python -m benchmarks.cpu_generate",
        "machine": {"cpu": _cpu(), "threads": default_threads(), "torch": torch.__version__},
        "transformers": transformers.__version__,
        "tokens_per_s": rates,
        "median": medians,
        "ratio_batch": medians["inferlab"] / best,
        "ratio_single": medians["inferlab single"] / medians["transformers single"],
        "plugins": {kind: c.component.name for kind, c in llm.resolved.choices.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'':24}{'median tok/s':>14}")
    for name, value in medians.items():
        print(f"{name:24}{value:14.1f}")
    print(f"batch: {record['ratio_batch']:.2f} x, single stream: {record['ratio_single']:.2f} x")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.open() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
