"""Executes plans on one rank: block table and last tokens by slot, model, attention, sampler.

Nothing here depends on a phase, a scheduler or an allocator. Tokens that the host does not know yet are taken from
`last_token`, where the step before left them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core import device
from core.batch import Layout, lay_out, update_table
from core.graphs import DecodeGraphs
from core.interfaces import (
    ON_DEVICE,
    AttentionBackend,
    Batch,
    DeviceContext,
    Drawn,
    KVSpec,
    ModelArch,
    Prologue,
    Rows,
    Sampled,
    Sampler,
    StepPlan,
)
from core.parallel import Group, Solo
from core.prologue import apply_prologue
from core.resolve import Resolved
from core.sizing import Sizing, size_pool
from core.weights import load_weights


class Runner:
    """Built once per rank; `launch` in the order of the plans."""

    def __init__(self, resolved: Resolved, parallel: Solo | Group | None = None) -> None:
        """parallel: the group of the executor, of which this is one rank; None: the only rank."""
        started = time.perf_counter()
        self.resolved, self.parallel = resolved, parallel or Solo()
        self.device = self.parallel.device if isinstance(self.parallel, Group) else torch.device(resolved.device)
        device.use(self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, resolved.cpu_threads // self.parallel.neighbours))
        limits, self.block_size = resolved.limits, resolved.block_size
        self.model: ModelArch = resolved.build("arch", self._context(None))
        load_weights(self.model, resolved.checkpoint, pulse=self.parallel.check)
        context = self._context(self.model.kv_spec)
        self.attention: AttentionBackend = resolved.build("attention", context)
        self.sampler: Sampler = resolved.build("sampler", context)
        self.prologue = torch.compile(apply_prologue, dynamic=True) if resolved.compile else apply_prologue
        loaded = time.perf_counter()
        shape = limits.max_num_seqs + 1, -(-limits.max_model_len // self.block_size)
        self.table = np.zeros(shape, np.int32)
        self.table_on_device = torch.from_numpy(self.table).to(self.device)  # on a CPU the same memory
        self.last_token = torch.zeros(shape[0], dtype=torch.int64, device=self.device)
        self.sizing: Sizing = size_pool(self)
        self.num_blocks = self.sizing.num_blocks
        self.attention.allocate(self.model.kv_spec, self.num_blocks + 1, self.block_size)
        sized = time.perf_counter()
        self.graphs = self._captured() if resolved.graphs else None
        ready = time.perf_counter()
        self.seconds = {"load": loaded - started, "warm_up": sized - loaded, "graphs": ready - sized}

    def _context(self, spec: KVSpec | None) -> DeviceContext:
        resolved = self.resolved
        return DeviceContext(
            limits=resolved.limits,
            device=self.device,
            dtype=getattr(torch, resolved.dtype),
            config=resolved.checkpoint.config,
            vocab_size=resolved.checkpoint.config["vocab_size"],
            parallel=self.parallel,
            block_size=self.block_size,
            spec=spec,
            compile=resolved.compile,
            fused=resolved.fused,
        )

    @torch.inference_mode()
    def _captured(self) -> DecodeGraphs:
        before = device.memory(self.device)["used"]
        depth = self.resolved.overlap + 1
        parts = self.attention, self.sampler, self.table_on_device, self.last_token
        graphs = DecodeGraphs(self.forward, *parts, self.block_size, depth)
        graphs.warm_up()
        device.synchronize(self.device)
        self.sizing = replace(self.sizing, graphs=device.memory(self.device)["used"] - before)
        return graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Drawn:
        device.use(self.device)  # another engine of this process may have another one
        if len(plan.moves):
            self.attention.move(plan.moves)
        update_table(self.table, plan.new_blocks)
        at = 0
        for (slot, known), params in zip(plan.admitted.tolist(), plan.params, strict=True):
            self.sampler.admit(slot, params, plan.history[at : at + known])
            at += known
        if self.graphs is not None and self.graphs.fits(plan):
            return device.to_host(*self.graphs.run(plan, self.table))
        batch, rows = self._to_device(plan, lay_out(plan, self.table, self.block_size))
        return device.to_host(self.run(batch, rows))

    def run(self, batch: Batch, rows: Rows) -> Sampled:
        """One step that was not captured."""
        return self.forward(batch, rows, self.attention.plan(batch))

    def forward(self, batch: Batch, rows: Rows, state: Any) -> Sampled:
        """One pass; what is drawn stays on the device as the next step's input."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prologue: Prologue) -> Tensor:
            if not self.attention.fuses_prologue:
                q, k = self.prologue(q, k, batch.positions, prologue)
            return self.attention.forward(layer, q, k, v, batch, state, prologue)

        hidden = self.model.forward(batch.tokens, batch.positions, attend)
        if not len(batch.last):
            return Sampled(batch.last)
        if len(batch.last) != len(batch.tokens):
            hidden = hidden[batch.last]
        drawn = self.sampler.sample(self.model.logits(hidden), rows)
        self.last_token[rows.slots] = drawn.tokens.clamp(min=0)
        return drawn

    def _to_device(self, plan: StepPlan, layout: Layout) -> tuple[Batch, Rows]:
        names = ("tokens", "positions", "kv_slots", "last", "rows", "draw_positions", "token_slots", "cu_q", "kv_lens")
        arrays = {name: getattr(layout, name) for name in names} | {"block_table": layout.block_table}
        if self.device.type != "cpu" and len(plan.new_blocks):
            slots, columns, _ = plan.new_blocks.T.astype(np.int64)
            arrays |= {"changed": slots * self.table.shape[1] + columns, "blocks": self.table[slots, columns]}
        t = device.to_device(arrays, self.device)
        if "changed" in t:  # equal entries carry equal values: all are what the host table holds
            self.table_on_device.view(-1).scatter_(0, t["changed"], t["blocks"])
        tokens = t["tokens"]
        if (plan.tokens == ON_DEVICE).any():
            tokens = torch.where(tokens == ON_DEVICE, self.last_token[t["token_slots"]], tokens)
        batch = Batch(
            tokens=tokens,
            positions=t["positions"],
            cu_q=t["cu_q"],
            kv_lens=t["kv_lens"],
            block_table=t["block_table"],
            kv_slots=t["kv_slots"],
            last=t["last"],
            max_q=layout.max_q,
            max_kv=layout.max_kv,
            num_decodes=int(np.cumprod(plan.counts == 1).sum()),
            shared_blocks=plan.shared_blocks,
        )
        rows = Rows(t["rows"], t["draw_positions"], self._masks(plan, len(layout.last)), self.sampler.plan(layout.rows))
        return batch, rows

    def _masks(self, plan: StepPlan, rows: int) -> Tensor | None:
        if not len(plan.mask_rows):
            return None
        vocab = self.resolved.checkpoint.config["vocab_size"]
        masks = np.ones((rows, vocab), bool)
        masks[plan.mask_rows] = np.unpackbits(plan.masks, axis=1)[:, :vocab].astype(bool)
        return torch.from_numpy(masks).to(self.device)

    def report(self) -> Mapping[str, Any]:
        padded = self.graphs.padded_rows if self.graphs else 0
        return {
            "seconds": self.seconds,
            "memory": self.sizing.as_dict(),
            "num_blocks": self.num_blocks,
            "weight_bytes_read": self.resolved.checkpoint.source.bytes_read,
            "padded_rows": padded,
        }

    def close(self) -> None:
        """Drop every tensor; the caller drops the runner."""
        for name in ("graphs", "model", "attention", "sampler", "last_token", "table_on_device"):
            if hasattr(self, name):
                delattr(self, name)
        device.release(self.device)
