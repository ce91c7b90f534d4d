"""Chat templates: the Jinja programs of checkpoints, run in a sandbox under the conventions of Hugging Face."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar


class ChatTemplate:
    """One template with the special tokens that it may name; compiled when first used."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "special_tokens": self.special_tokens}

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self.source)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text that ends where the assistant speaks; ValueError if the template refuses it."""
        from jinja2 import TemplateError

        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(f"a chat is a non-empty list of {{'role': ..., 'content': ...}}, got {messages!r}")
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise ValueError(f"the checkpoint's chat template refuses these messages: {error}") from None


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what to train on; here its body is only text."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        # Jinja's own filter escapes <, > and &, which a model has never seen.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment
