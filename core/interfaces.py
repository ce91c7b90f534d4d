"""Every contract of the engine: the one file that a plugin author reads.

One decision per step: which requests, and how many tokens of each. A decode is a chunk of one token, a prompt is one or
several longer chunks; no phase flag exists. Schedulers decide, the step builder turns decisions into a frozen `StepPlan`,
every rank executes that plan. This module imports neither torch nor any other heavy package, so entry modules may use it.

Letters in shapes: T tokens of a step, B chunks of a step, S rows drawn, N changed table entries, M blocks of the longest
row, H query heads, K KV heads, D head size, E hidden size, V vocabulary (of this rank). Host arrays are int32 numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from core.arrays import Array
from core.capabilities import AtLeast, Constraint, Includes, MultipleOf, OneOf, Probe  # noqa: F401, for authors
from core.params import SamplingParams
from core.records import Metric, RequestMetrics, RequestRecord, StepRecord  # noqa: F401, for authors
from core.settings import setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

API_VERSION = (1, 0)  # major: plugins must change; minor: plugins may use more
PROJECT, ENTRY_POINT_GROUP = "inferlab", "inferlab.plugins"
ON_DEVICE = -1  # in StepPlan.tokens: the host does not know this token yet, the device does
hookspec, hookimpl = pluggy.HookspecMarker(PROJECT), pluggy.HookimplMarker(PROJECT)


@dataclass
class NoSettings:
    """Settings of a component that has none."""


@dataclass
class KVSettings:
    """Base of every KV allocator's settings: `block_size` is a word of the core's."""

    block_size: int | str = setting("auto", "auto: chosen from what the attention backend accepts", "tokens per block")

    def __post_init__(self) -> None:
        size = self.block_size
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"kv_allocator.block_size must be a whole number >= 1 or auto, got {size!r}")


@dataclass(frozen=True)
class Component:
    """One option of one slot, as declared by a plugin's entry module. Nothing of `target` is imported before it is chosen."""

    kind: str  # scheduler, kv_allocator, attention, arch, sampler, executor
    name: str  # the word on the command line
    target: str  # "module:Class", built as Class(settings, context)
    settings: type = NoSettings  # plain dataclass: its fields are the options, checked in __post_init__
    summary: str = ""  # one line
    request_settings: type | None = None  # sampler: plain dataclass of extra sampling parameters
    requires: Sequence[str | tuple[str, ...]] = ()  # importable modules, "module>=1.2" where needed; a tuple is any-of
    install: str = ""  # the command that provides `requires`
    capabilities: Mapping[str, Constraint] = field(default_factory=dict)
    """Constraints on values of the run (block_size, ...), the model, the load, or another slot; keys: core.capabilities."""
    prefers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # order of choice where a setting is auto
    provides: Mapping[str, Any] = field(default_factory=dict)
    """Facts for others: architectures, gguf_architectures, shares (arch, see core.shares), auto_rank (highest goes first),
    auto_reason (what was measured), wants_history (sampler), prefix_cache (kv_allocator), max_wait_steps, max_overtaken,
    serves_only (scheduler, see docs/testing.md), and any that capabilities name as "SLOT.NAME"."""
    probe: str = ""  # "module:function", called with the settings -> Probe; only when chosen
    api: tuple[int, int] = (1, 0)  # the API_VERSION that the plugin was written for; not stated: 1.0


@dataclass(slots=True)
class Seat:
    """What a resident request holds; gained and lost as one. Written by the step builder's module only."""

    slot: int  # row in device tables
    blocks: list[int]  # block ids in order of position; 0 is a hole (positions no longer needed)
    computed: int  # positions [0, computed) are in the KV cache, or will be once launched steps are done
    published: int = 0  # leading blocks whose content was announced to the allocator


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its continuation. `seat` is written by the step builder, `keys` by the allocator, else by the engine."""

    id: int
    tokens: list[int]  # prompt, then every token whose value the host knows
    params: SamplingParams
    limit: int  # total length at which it ends with "length"
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    labels: Mapping[str, Any] = field(default_factory=dict)  # client, priority, deadline, expected_tokens, ...
    num_prompt: int = field(init=False)
    promised: int = 0  # tokens drawn on the device whose value is still on its way
    seat: Seat | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    message: str = ""  # why, for "error"
    draft: list[int] = field(default_factory=list)  # speculated continuation, known on the host
    host_bound: bool = False  # its next input needs the value of its last token on the host
    keys: list[Any] = field(default_factory=list)  # the allocator's memo of `tokens`; survives preemption
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.metrics.arrival = self.arrival

    @property
    def length(self) -> int:
        """Known and promised tokens."""
        return len(self.tokens) + self.promised

    @property
    def generated(self) -> int:
        return self.length - self.num_prompt

    @property
    def remaining(self) -> int:
        """Positions to compute before it can draw (its draft included); 1 for a plain decode, 0 once all is granted."""
        return self.length - (self.seat.computed if self.seat else 0) + len(self.draft)

    @property
    def prefilling(self) -> bool:
        return self.length - (self.seat.computed if self.seat else 0) > 1

    @property
    def exhausted(self) -> bool:
        return self.length >= self.limit


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that a rank needs to know of one step. Host to every rank, one message."""

    slots: Array  # [B]
    starts: Array  # [B] position of the chunk's first token
    counts: Array  # [B] tokens of the chunk, >= 1
    draws: Array  # [B] trailing positions that draw a token: 0, 1, or 1 + draft
    tokens: Array  # [T] or ON_DEVICE
    new_blocks: Array  # [N, 3] slot, column, block: changes of the block table, in order
    moves: Array  # [P, 2] from block, to block: copied before anything else
    admitted: Array  # [A, 2] slot, number of tokens in `history`
    history: Array  # known tokens of admitted rows, if the sampler wants them
    params: tuple[SamplingParams, ...]  # [A]
    mask_rows: Array  # [G] which of the S rows have a mask
    masks: Array  # [G, ceil(V / 8)] uint8, np.packbits of "may be drawn"
    shared_blocks: int = 0  # leading blocks that are the same in all chunks


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # requests resident at once
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # prompt and continuation


@dataclass(frozen=True, slots=True)
class HostContext:
    """What schedulers and allocators are built with."""

    limits: Limits
    block_size: int  # tokens per block
    num_blocks: int  # usable ones: ids 1 .. num_blocks; id 0 is scratch
    clock: Callable[[], float]  # seconds; virtual on a simulated device
    seed: int = 0


class Part:
    def __init__(self, settings: Any, context: Any) -> None:
        self.settings, self.context = settings, context


class Step(Protocol):
    """The step under construction, as a scheduler sees it."""

    @property
    def tokens_left(self) -> int: ...
    @property
    def empty(self) -> bool: ...  # nothing was granted so far
    @property
    def now(self) -> float: ...  # seconds on the engine's clock
    @property
    def short(self) -> str:
        """Why the last grant was 0: tokens, slots, blocks, whole, later (its last token is in flight); "" if it was not."""
        ...

    def grant(self, request: Request, limit: int | None = None, *, whole: bool = False, reserve: int = 0) -> int:
        """Advance `request` by up to `limit` tokens; returns how many, 0 with the reason in `short`, all or nothing.

        whole: all that remains or nothing. reserve: hold blocks for positions [0, reserve) from now on, or grant nothing.
        Raises ValueError on a second grant to one request in a step, and on whole with a smaller limit.
        """
        ...

    def cached(self, request: Request) -> int:
        """Positions that a waiting request would find cached now. No side effect."""
        ...

    def evict(self, request: Request) -> None:
        """Take the seat away; what it computed is computed again (or found in the cache) later. Not after its grant."""

    def wait(self, until: float) -> None:
        """Nothing is to run before this time: an empty step on purpose."""


class Scheduler(Part, ABC):
    """Policy only: keeps its own queues, asks for grants, sees no tensor, reads no clock but `step.now`."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """It has ended or draws its last token in a launched step; may come while that step is in flight."""

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Grant tokens to requests until budget or blocks run out."""


class KVAllocator(Part, ABC):
    """Owns the block pool. A block is free (blank), reusable (no holder, content still findable) or held."""

    @abstractmethod
    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        """Blocks of the longest known prefix of `tokens`, full blocks only. Only looks: holds nothing, reorders nothing."""

    @abstractmethod
    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Hold `hits` (from `match` of this step) and `count` fresh blocks; their ids in that order, or None and nothing
        changed. A hit may come back under another id (loaded from a lower tier through `moves`)."""

    @abstractmethod
    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        """blocks[start:] now hold full blocks of `tokens`. Returns for each the block that is found under that content
        from now on: itself, or an equal one published before. Changes no holder."""

    @abstractmethod
    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each, ids 0 skipped; of one list the tail is offered for reuse first, heads live longest."""

    @abstractmethod
    def audit(self) -> tuple[int, int, int]:
        """(free, reusable, held): adds up to num_blocks. Asserts the allocator's own invariants."""

    def idle(self) -> int:
        """Free and reusable blocks, as in `audit`. Observers are told after each step, so override it where it is cheap."""
        return sum(self.audit()[:2])

    def moves(self) -> list[tuple[int, int]]:
        """Block copies (from, to) that must precede the next step; handed out once."""
        return []

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Content of these blocks (all if None) is not found any more; holders keep them."""


class Parallel(Protocol):
    """The tensor-parallel group of this rank; the identity for one rank."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...


@dataclass(frozen=True)
class KVSpec:
    """What one rank stores per layer and position."""

    num_layers: int
    num_heads: int  # query heads of this rank
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


@dataclass(frozen=True)
class DeviceContext:
    """What models, attention backends and samplers are built with."""

    limits: Limits
    device: torch.device
    dtype: torch.dtype
    config: Mapping[str, Any]  # the model's configuration, in config.json's words
    vocab_size: int
    parallel: Parallel
    block_size: int
    spec: KVSpec | None = None  # None only while the model itself is built
    compile: bool = False  # torch.compile on norm, RoPE, SiLU and sampler
    fused: bool = False  # Triton kernels for these instead


@dataclass(frozen=True)
class Prologue:
    """What happens to q and k before attention: per-head RMSNorm (optional), then rotary embedding (half-split pairs)."""

    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    eps: float
    cos_sin: Tensor  # [max_len, D] float32: cosines, then sines


@dataclass(slots=True)
class Batch:
    """One step on the device: views on persistent buffers where the executor has them."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_q: Tensor  # [B + 1] int32, chunk i is tokens [cu_q[i], cu_q[i + 1])
    kv_lens: Tensor  # [B] int32, positions visible to the chunk's last token
    block_table: Tensor  # [B, M] int32
    kv_slots: Tensor  # [T] int64, block * block_size + offset: where k and v of each token go
    last: Tensor  # [S] int64, tokens that draw
    max_q: int  # upper bounds, known on the host
    max_kv: int
    num_decodes: int = 0  # leading chunks of exactly one token
    shared_blocks: int = 0  # leading blocks of chunk 0 that all chunks hold; rows of padding may lack them


Attend = Callable[[int, "Tensor", "Tensor", "Tensor", Prologue], "Tensor"]
"""attend(layer, q [T, H, D], k [T, K, D], v [T, K, D], prologue) -> [T, H, D]; q and k come un-normed and un-rotated."""


class AttentionBackend(Part, ABC):
    """Owns the layout of the KV cache. All stores of a layer precede its reads: a chunk may read what another one of the
    same batch writes. Causal; scale is spec.scale; query head h reads KV head h * K // H."""

    fuses_prologue: bool = False  # False: the core applies the prologue before `forward`

    @abstractmethod
    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one block over all layers."""

    @abstractmethod
    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        """Make room for ids 0 .. blocks - 1. Called again after sizing: the former cache is given up first."""

    @abstractmethod
    def plan(self, batch: Batch, state: Any = None) -> Any:
        """Once per step, before the layers. Captured batches: `state` is given from the second step on and is refreshed in
        place, while the block table is refreshed within the capture."""

    @abstractmethod
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        """Store k and v at batch.kv_slots, then attend; q, k, v may be strided views of one buffer. -> [T, H, D]"""

    @abstractmethod
    def move(self, pairs: Array) -> None:
        """Copy whole blocks of all layers, in order. pairs [P, 2]: from, to."""


class Weight(Protocol):
    """A tensor of a checkpoint that is read only when indexed, and only the part that is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...


class ModelArch(Part, ABC):
    """The equations of one architecture: no cache and no parallelism visible beyond the layers it is made of."""

    kv_spec: KVSpec

    @abstractmethod
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Name and full shape (before any sharding) of every tensor that a checkpoint must hold."""

    @abstractmethod
    def load(self, tensors: Iterator[tuple[str, Weight]]) -> None:
        """Take each of `weights()` once, in any order; missing, unexpected and misshapen ones were refused before."""

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T], [T] -> hidden states [T, E]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, E] -> [S, V]."""

    def from_gguf(self, name: str, tensor: Tensor) -> Tensor:
        """Undo what converters to GGUF did to a tensor, given under its own (not GGUF's) name. Default: nothing."""
        return tensor


@dataclass(slots=True)
class Rows:
    """What a sampler knows of the rows it draws."""

    slots: Tensor  # [S] int64
    positions: Tensor  # [S] int64, of the token to be drawn: the counter of its random stream
    masks: Tensor | None = None  # [S, V] bool, True: may be drawn
    variant: Hashable = None  # what `Sampler.plan` answered for these rows


@dataclass(slots=True)
class Sampled:
    tokens: Any  # [S] int64 tensor on the device, numpy once waited for; -1: no finite logit (NaN counts as none)
    extras: dict[str, Any] = field(default_factory=dict)  # [S, ...] each, copied along


class Sampler(Part, ABC):
    """Keeps parameters per slot (rows 0 .. max_num_seqs; the last one is for padding). Draws depend on the row's logits,
    seed and position only, never on batch mates."""

    @abstractmethod
    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """A request takes the slot; `tokens` is its history if the component provides wants_history, else empty."""

    @abstractmethod
    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        """[S, V] -> tokens [S]."""

    def plan(self, slots: Array) -> Hashable:
        """Host side: which variant of `sample` these rows need (one captured graph each)."""
        return None


class Drawn(Protocol):
    """Tokens on their way to the host."""

    def wait(self) -> Sampled: ...  # the only place where the host waits for the device


class Executor(Part, ABC):
    """Runs plans in the order of their launch. Its context is the resolved choice of all parts (core.resolve.Resolved)."""

    num_blocks: int  # usable blocks, scratch not counted

    @abstractmethod
    def launch(self, plan: StepPlan) -> Drawn: ...

    @abstractmethod
    def close(self) -> None:
        """Release everything; twice is fine."""

    def report(self) -> Mapping[str, Any]:
        """What start-up found, for result.json: seconds, bytes, sizes."""
        return {}
