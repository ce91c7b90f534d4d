"""load.kv_share: a KV pool that is too small for a load, by a known measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from core.config import Composed
from core.loads import draw_load
from core.resolve import Resolved


def shrunk(composed: Composed, resolved: Resolved) -> Resolved:
    """The pool holds `load.kv_share` of what the requests of a run would hold at their longest, as many as may be resident; at
    least its longest request. The same for all runs. ValueError where the pool's size is given otherwise."""
    share = composed.config.load.kv_share
    if share is None:
        return resolved
    for name, given in (("num_kv_blocks", resolved.num_kv_blocks), ("kv_memory", resolved.kv_memory)):
        if given is not None:
            raise ValueError(
                f"load.kv_share={share} and {name}={given} both size the KV cache: leave {name} out, or load.kv_share=null"
            )
    settings, bench = composed.config.load, composed.config.bench
    tokenizer = resolved.checkpoint.tokenizer() if settings.content == "text" else None
    encode, vocab = tokenizer.encode if tokenizer else None, resolved.checkpoint.config["vocab_size"]
    runs = [draw_load(settings, number, vocab, encode).lengths for number in range(bench.repeats + bench.warmup)]
    whole, longest = (max(column) for column in zip(*(held(run, resolved) for run in runs), strict=True))
    count = max(longest, math.ceil(share * whole))
    note = f"num_kv_blocks is {count}: load.kv_share={share} of the {whole} blocks that the requests hold when all are longest"
    return replace(resolved, num_kv_blocks=count, notes=(*resolved.notes, note))


def held(lengths: Sequence[tuple[int, int]], resolved: Resolved) -> tuple[int, int]:
    """(blocks of all that may be resident, the largest first; blocks of the largest)."""
    blocks = sorted((-(-(prompt + output) // resolved.block_size) for prompt, output in lengths), reverse=True)
    return sum(blocks[: resolved.limits.max_num_seqs]), blocks[0]
