"""Sampling with a penalty on repetition: the logit of a token that prompt or answer hold already is divided by the penalty if
it is positive, multiplied by it if not (the CTRL paper, Keskar et al., 2019), before temperature and filters.

What a row draws depends on its logits, its own text, its seed and the position. The text is known from `admit`, which gets
the history (the component says wants_history), and grows by what `sample` itself draws. The noise is a function of seed,
position and token: equal tokens alone, in any batch, in chunks and after preemption.

S rows drawn, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.interfaces import Array, DeviceContext, NoSettings, Rows, Sampled, Sampler, SamplingParams

COLDEST = 1e-5  # temperatures below are 0: argmax
OFF = float("inf")


class Repetition(Sampler):
    """One row of parameters and one row of `seen` per slot; the last slot is for padding."""

    def __init__(self, settings: NoSettings, context: DeviceContext) -> None:
        super().__init__(settings, context)
        slots, device = context.limits.max_num_seqs + 1, context.device
        self.seen = torch.zeros(slots, context.vocab_size, dtype=torch.bool, device=device)
        # penalty, temperature, top-k (inf: off), top-p, min-p
        self.params = torch.tensor([[1.0, 0.0, OFF, 1.0, 0.0]], device=device).repeat(slots, 1)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """`tokens`: prompt, and what was drawn before a preemption."""
        hot = params.temperature >= COLDEST
        values = (
            params.extra.get("repetition_penalty", 1.0),
            params.temperature if hot else 0.0,
            params.top_k or OFF,
            params.top_p,
            params.min_p,
        )
        self.params[slot] = torch.tensor(values, dtype=torch.float32)
        self.seeds[slot] = params.seed or 0
        self.seen[slot] = False
        self.seen[slot, torch.from_numpy(tokens).long().to(self.seen.device)] = True

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        penalty, temperature, top_k, top_p, min_p = self.params[rows.slots].unbind(1)
        logits = logits.float()
        if rows.masks is not None:  # NaN stays wherever it is, so that a broken row is noticed
            logits = torch.where(rows.masks | logits.isnan(), logits, -torch.inf)
        sound = ~logits.isnan().any(1) & (logits > -torch.inf).any(1) & (logits < torch.inf).all(1)
        logits = torch.where(self.seen[rows.slots], penalized(logits, penalty[:, None]), logits)
        hot = temperature > 0
        scaled = logits / torch.where(hot, temperature, 1.0)[:, None]
        noise = gumbel(self.seeds[rows.slots], rows.positions, logits.shape[1])
        drawn = (filtered(scaled, top_k, top_p, min_p) + noise).argmax(1)
        tokens = torch.where(hot, drawn, logits.argmax(1))
        self.seen[rows.slots, tokens] = True
        return Sampled(torch.where(sound, tokens, -1))


def penalized(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [S, V], the others [S] -> the same with -inf where a filter removes the token. Top-k, then top-p on what it left,
    then min-p relative to the likeliest; of equal logits the lower id counts as likelier."""
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    keep = torch.arange(values.shape[1], device=values.device) < top_k[:, None]
    mass = values.softmax(1) * keep
    before = mass.cumsum(1) - mass
    keep &= (before < top_p[:, None] * mass.sum(1, keepdim=True)) | (top_p >= 1)[:, None]
    keep &= values >= values[:, :1] + min_p.log()[:, None]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, ids, keep), -torch.inf)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """seeds and positions [S] int64 -> [S, V] Gumbel noise, a pure function of seed, position and token id."""
    row = mix(mix(seeds) ^ positions)[:, None]
    bits = mix(row + torch.arange(vocab, device=seeds.device)) & 0xFFFFFFFF
    uniform = (bits.double() + 0.5) / 2**32
    return -(-uniform.log()).log().float()


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014) on int64, whose products wrap around."""
    x = x - 0x61C8864680B583EB  # so that 0 does not stay 0
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)
