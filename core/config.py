"""The settings: their types, units and default rules, and how overrides become a checked `Composed`.

Fields whose default is "auto" are decided in `core.resolve`; any other value was given by the user or a preset and is
never changed silently. Hydra is kept in `core.composition`; nothing below this module sees a DictConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from core.composition import Options, composed_by_hydra, override
from core.errors import ConfigError
from core.params import SamplingParams
from core.plugins import Registry
from core.settings import setting

__all__ = ["Composed", "Config", "SamplingSettings", "compose", "finish", "given_count", "override"]

SWITCH = {"auto": "auto", "on": "on", "off": "off", "True": "on", "False": "off", "true": "on", "false": "off"}
TASKS = ("generate", "bench")
PEERS = ("vllm",)
UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "b": 1}
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Name three uses of a paper clip.",
)


@dataclass
class SamplingSettings:
    """How `core.run` continues every prompt."""

    temperature: float | None = setting(None, "0 is argmax; null: 0, but the sampler's own rules do not count it as given")
    top_p: float = setting(1.0, "in (0, 1]; 1 is off")
    top_k: int = setting(0, "0 or -1 is off")
    min_p: float = setting(0.0, "in [0, 1], relative to the likeliest token; 0 is off")
    max_tokens: int = setting(256, "new tokens per prompt")
    stop: list[str] = setting([], 'texts that end an answer, which is given without them: sampling.stop=["User:",END]')
    stop_token_ids: list[int] = setting([], "in addition to the checkpoint's")
    ignore_eos: bool = setting(False, "do not stop at the checkpoint's stop tokens")
    seed: int | None = setting(None, "of each request; null: derived from the engine's seed and the request's number")
    theirs: dict[str, Any] = setting({}, "the chosen sampler's own parameters; sampling.NAME=VALUE sets theirs.NAME")

    def __post_init__(self) -> None:
        try:
            self.params()
        except ValueError as error:
            raise ConfigError(f"sampling.{error}") from None

    def params(self) -> SamplingParams:
        """For a request of `core.run`: its default temperature is 0."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("theirs", "temperature")}
        given = frozenset(self.theirs) | ({"temperature"} if self.temperature is not None else set())
        return SamplingParams(temperature=self.temperature or 0.0, extra=dict(self.theirs), given=given, **values)


@dataclass
class PluginSettings:
    """Which plugins are loaded."""

    block: list[str] = setting([], "plugins or distributions that are not loaded")
    strict: bool = setting(False, "a plugin that cannot be loaded is an error even if it is not chosen")


@dataclass
class SweepSettings:
    """Multirun (-m)."""

    timeout_s: float = setting(1800.0, "seconds after which a job is ended")
    repeats: int = setting(1, "times that each cell is run, interleaved: A B C A B C; give a number, not a list")
    repeat: int = setting(0, "number of the repeat, from 0; the sweep sets it")
    parallel: int | str = setting("auto", "jobs at a time; auto: the number of GPUs, if the jobs use any GPU, else 1")

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"sweep.timeout_s must be > 0 seconds, got {self.timeout_s}")
        _check_count("sweep.repeats", self.repeats, auto="")
        _check_count("sweep.parallel", self.parallel)
        if self.repeat < 0:
            raise ConfigError(f"sweep.repeat must be >= 0, got {self.repeat}")


@dataclass
class BenchSettings:
    """task=bench: the chosen load is run several times by one engine."""

    repeats: int = setting(3, "timed runs; each has prompts of its own, and the prefix cache is empty before it")
    warmup: int = setting(1, "runs before them that are not timed")
    peer: str | None = setting(None, "another engine that runs the same loads in turn: vllm; each gets half of the memory")
    profile_steps: int = setting(64, "profile=true: steps that are traced")
    records: bool = setting(True, "write steps.jsonl, requests.jsonl and timeline.json")
    record_schedule: bool = setting(False, "write schedule.jsonl, which scheduler=replay follows")
    slo_ttft_ms: float | None = setting(None, "goodput: longest time to the first token; null: not asked for")
    slo_tpot_ms: float | None = setting(None, "goodput: longest time per output token after the first")
    slo_e2e_ms: float | None = setting(None, "goodput: longest time from end to end")

    def __post_init__(self) -> None:
        for name in ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"bench.{name} must be > 0 ms or null, got {value}")
        for name, least in (("repeats", 1), ("warmup", 0), ("profile_steps", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"bench.{name} must be a whole number >= {least}, got {value}")
        if self.peer is not None:
            _check_one_of("bench.peer", self.peer, PEERS)


@dataclass
class Config:
    """The typed root. The slots hold the settings object of the chosen option (NoSettings for auto)."""

    model: Any = field(default_factory=dict)
    scheduler: Any = field(default_factory=dict)
    kv_allocator: Any = field(default_factory=dict)
    attention: Any = field(default_factory=dict)
    arch: Any = field(default_factory=dict)
    sampler: Any = field(default_factory=dict)
    executor: Any = field(default_factory=dict)
    load: Any = field(default_factory=dict)
    task: str = setting("generate", "what is run: generate answers the prompts, bench measures the load")
    prompts: list[str] = setting(list(QUESTIONS), "texts to be answered")
    prompts_file: str | None = setting(
        None, "instead of prompts: .txt (a line each) or .jsonl (`prompt` or `messages`, parameters)"
    )
    chat: bool | str = setting("auto", "apply the checkpoint's chat template to prompts: auto (if there is one), on, off")
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    device: str = setting("auto", "auto, cpu, or one named by its kind and number")
    dtype: str = setting("auto", "auto (float32 on a CPU, else the checkpoint's), float32, bfloat16, float16")
    max_model_len: int | str = setting("auto", "tokens of prompt and continuation; auto: 4096, or the model's own if smaller")
    max_num_seqs: int | str = setting("auto", "requests resident at once; auto: 512 (64 on a CPU), at most the token budget")
    max_num_batched_tokens: int | str = setting("auto", "token budget of a step; auto: 16384 (2048 on a CPU)")
    gpu_memory_utilization: float = setting(0.9, "share of the device's memory to use, in (0, 1]")
    num_kv_blocks: int | str = setting("auto", "usable KV blocks; auto: from memory")
    num_gpu_blocks_override: int | None = setting(None, "another name of num_kv_blocks (vLLM's)")
    num_kvcache_blocks: int | None = setting(None, "another name of num_kv_blocks (nano-vLLM's)")
    kv_memory: int | str = setting(
        "auto", "KV cache on a CPU: bytes, or 2GiB, 500MB; auto: what the limits need, at most 25 % of free memory"
    )
    tensor_parallel_size: int = setting(1, "ranks that share the model")
    overlap: int | str = setting("auto", "steps in flight beside the one being built, 0 or 1; auto: 1 on a GPU, 0 on a CPU")
    graphs: bool | str = setting(
        "auto", "captured graphs for decoding: auto (on with a GPU where every part allows it), on, off"
    )
    enforce_eager: bool = setting(False, "the same as graphs=off")
    fusion: bool | str = setting(
        "auto",
        "Triton kernels for norm, SiLU, prologue and sampler: auto (on with a GPU and Triton, unless compile=on), on, off",
    )
    compile: bool | str = setting("off", "torch.compile on norm, RoPE, SiLU and sampler of the plain path: on, off")
    seed: int = setting(0, "fixes everything that is random")
    cpu_threads: int | str = setting("auto", "auto: the cores that this process may use")
    log_level: str = setting("info", "debug, info, warning, error")
    profile: bool = setting(False, "task=bench: one more run under the profiler of torch, left as trace.json")
    bench: BenchSettings = field(default_factory=BenchSettings)
    plugins: PluginSettings = field(default_factory=PluginSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "cpu_threads"):
            _check_count(name, getattr(self, name))
        _check_count("tensor_parallel_size", self.tensor_parallel_size, auto="")
        _check_one_of("task", self.task, TASKS)
        _check_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _check_one_of("overlap", self.overlap, ("auto", 0, 1))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number in [0, 2**63), got {self.seed}")
        self.chat, self.graphs = _switch("chat", self.chat), _switch("graphs", self.graphs)
        self.fusion = _switch("fusion", self.fusion)
        self.compile = _switch("compile", self.compile, auto=False) == "on"
        self.kv_memory = _bytes(self.kv_memory)
        if self.compile and self.fusion == "on":
            raise ConfigError("compile=on works on the plain path, fusion=on replaces it: leave one out")
        if self.profile and self.task != "bench":
            raise ConfigError(f"profile=true belongs to task=bench, got task={self.task}")
        self._merge_names()

    def _merge_names(self) -> None:
        """Other engines' words for the same thing."""
        if self.enforce_eager and self.graphs == "on":
            raise ConfigError("enforce_eager=true means graphs=off, but graphs=on was given: leave one out")
        if self.enforce_eager:
            self.graphs = "off"
        names = ("num_kv_blocks", "num_gpu_blocks_override", "num_kvcache_blocks")
        given = {name: value for name in names if (value := getattr(self, name)) not in (None, "auto")}
        if len(set(given.values())) > 1:
            raise ConfigError(f"{' and '.join(f'{k}={v}' for k, v in given.items())} name the same setting: leave one out")
        for name, value in given.items():
            _check_count(name, value)
            self.num_kv_blocks = value
        if given and self.kv_memory != "auto":
            raise ConfigError(f"{next(iter(given))} and kv_memory both size the KV cache: leave one out")


@dataclass(frozen=True)
class Composed:
    """Checked settings, and where they come from."""

    config: Config
    choices: Mapping[str, str]  # kind -> name of the option, or "auto"
    explicit: frozenset[str]  # dotted keys that were given (kinds among them), by the user or by a preset
    sources: Mapping[str, str]  # dotted key -> "command line" or "preset"; only for keys in `explicit`
    raw: Mapping[str, Any]  # the resolved configuration, plain containers, for recording
    registry: Registry
    load: str = "offline"  # name of the preset

    def where(self, key: str) -> str:
        """For messages: "from the command line"."""
        return f"from the {self.sources[key]}" if key in self.sources else "default"


def compose(overrides: Sequence[str] = (), source: str = "command line") -> Composed:
    """Overrides in Hydra's grammar (see `override` for values from Python) -> checked settings. Raises ValueError."""
    return finish(composed_by_hydra(Config, list(overrides)), source)


def finish(options: Options, source: str = "command line") -> Composed:
    """Validate what Hydra composed: prefixes such as + and ++ pass its own checks."""
    config, choices = options.validated(Config)
    if sorted(config.plugins.block) != list(options.registry.blocked):
        raise ConfigError(f"plugins.block works on the command line only, not in a preset (got {config.plugins.block})")
    sources = dict.fromkeys(options.changed(Config), "preset") | dict.fromkeys(options.given(), source)
    return Composed(config, choices, frozenset(sources), sources, options.raw, options.registry, str(options.chosen["load"]))


def given_count(value: int | str) -> int | None:
    """None for auto."""
    return None if isinstance(value, str) else value


def _check_count(name: str, value: Any, auto: str = "auto") -> None:
    if value != auto and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a whole number >= 1{' or auto' if auto else ''}, got {value!r}")


def _check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if isinstance(value, bool) or value not in allowed:
        words = " or ".join(filter(None, (", ".join(map(str, allowed[:-1])), str(allowed[-1]))))
        raise ConfigError(f"{name} must be {words}, got {value!r}")


def _switch(name: str, value: Any, auto: bool = True) -> str:
    known = SWITCH if auto else {k: v for k, v in SWITCH.items() if v != "auto"}
    if str(value) not in known:
        raise ConfigError(f"{name} must be {'auto, ' if auto else ''}on or off, got {value!r}")
    return known[str(value)]


def _bytes(value: Any) -> int | str:
    given = value
    if isinstance(value, str) and value != "auto":
        number = value.strip().lower()
        unit = next((u for u in UNITS if number.endswith(u)), "")
        try:
            value = int(float(number.removesuffix(unit)) * UNITS.get(unit, 1))
        except ValueError:
            value = 0
    if value != "auto" and (isinstance(value, bool) or value < 1):
        raise ConfigError(f"kv_memory must be a number of bytes, a size such as 2GiB or 500MB, or auto; got {given!r}")
    return value
