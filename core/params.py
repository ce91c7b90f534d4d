"""What a request asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How one request is continued. Unknown keywords are parameters of the chosen sampler, kept in `extra`.

    Raises ValueError with the value and the range. Temperatures below 1e-5 mean 0: argmax.
    """

    temperature: float
    top_p: float  # in (0, 1]; the smallest set of likeliest tokens whose probability reaches it; 1 is off
    top_k: int  # 0 (or -1) is off
    min_p: float  # in [0, 1]; least probability, relative to the likeliest token's; 0 is off
    max_tokens: int
    stop: tuple[str, ...]  # texts that end a request; its text ends before the first, its tokens with the one that completes it
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool  # switches the checkpoint's stop tokens off, not `stop_token_ids`
    seed: int | None  # None: derived from the engine's seed and the number of the request
    extra: Mapping[str, Any] = field(repr=False)
    given: frozenset[str] = field(repr=False, compare=False)  # which of the values the caller spelt out

    def __init__(
        self,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        stop: str | Iterable[str] | None = (),
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        given: frozenset[str] | None = None,
        **theirs: Any,
    ) -> None:
        values: dict[str, Any] = dict(  # noqa: C408
            temperature=1.0 if temperature is None else temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()) if hasattr(stop or (), "__iter__") else stop,
            stop_token_ids=tuple(stop_token_ids or ()) if not hasattr(stop_token_ids, "__index__") else stop_token_ids,
            ignore_eos=bool(ignore_eos),
            seed=seed,
            extra={**(extra or {}), **theirs},
        )
        values |= {k: v.item() for k, v in values.items() if hasattr(v, "item")}  # numbers of numpy and torch
        _check(values)
        values["top_k"] = max(values["top_k"], 0)
        spelt = {*theirs, *(["temperature"] if temperature is not None else [])}
        for name, value in {**values, "given": frozenset(spelt) if given is None else given}.items():
            object.__setattr__(self, name, value)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same but for the seed; checks nothing again."""
        copy = object.__new__(SamplingParams)
        copy.__dict__.update(self.__dict__, seed=seed)
        return copy


def _check(values: Mapping[str, Any]) -> None:
    number = (int, float)
    rules = (
        ("temperature", number, lambda x: 0 <= x < float("inf"), "a finite number >= 0"),
        ("top_p", number, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("top_k", int, lambda x: x >= -1, "a whole number >= 1, or 0 or -1 to switch it off"),
        ("min_p", number, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        ("max_tokens", int, lambda x: x >= 1, "a whole number >= 1"),
        ("seed", (int, type(None)), lambda x: x is None or 0 <= x < 2**63, "a whole number in [0, 2**63), or None"),
    )
    for name, kind, ok, rule in rules:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not ok(value):
            raise ValueError(f"{name} must be {rule}, got {value!r}")
    stop, stops = values["stop"], values["stop_token_ids"]
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop must be a text or a list of texts of at least one character, got {stop!r}")
    if not isinstance(stops, tuple) or not all(hasattr(t, "__index__") and t >= 0 for t in stops):
        raise ValueError(f"stop_token_ids must be a list of token ids >= 0, got {stops!r}")
