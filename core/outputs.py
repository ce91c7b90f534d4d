"""What users get back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.interfaces import Request, RequestMetrics


@dataclass(frozen=True)
class RequestOutput:
    """The continuation of one prompt; `output["text"]` works as well as `output.text`."""

    request_id: int
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    token_ids: list[int]  # what was generated, a stop token included
    text: str  # no special tokens; "" if the model has no tokenizer
    finish_reason: str | None  # stop, length, abort, error; None while it goes on
    message: str = ""  # why, for "error"
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, name: str) -> Any:
        if name in self.__dataclass_fields__:
            return getattr(self, name)
        raise KeyError(f"{name!r}: an output has {', '.join(self.__dataclass_fields__)}")


@dataclass(frozen=True)
class Delta:
    """New text and tokens of a stream. The last one carries the finish reason."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


def output_of(request: Request, prompt: str | None, text: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.tokens[: request.num_prompt],
        token_ids=request.tokens[request.num_prompt :],
        text=text,
        finish_reason=request.finish_reason,
        message=request.message,
        metrics=request.metrics,
    )
