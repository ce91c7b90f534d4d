"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, in the words of vLLM and nano-vLLM."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from core.build import build_engine, check_params
from core.checkpoint import open_checkpoint
from core.composition import override
from core.config import Composed, compose
from core.engine import Engine, Output
from core.interfaces import Request, SamplingParams
from core.outputs import Delta, RequestOutput, output_of
from core.resolve import Resolved, resolve
from core.text import Detokenizer

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. One engine per object; several may live one after the other, or at once.

    model: a preset (`smollm2`), a directory, a .gguf file or a hub id. Settings are those of `python -m core.run`, as
    keywords (`attention="sdpa"`, `max_model_len=2048`) or as `overrides=["kv_allocator.block_size=64"]`.
    Raises ValueError with all reasons if the configuration cannot run.
    """

    def __init__(self, model: str = "smollm2", *, overrides: Sequence[str] = (), **settings: Any) -> None:
        given = [override(name, value) for name, value in {"model": model, **settings}.items()]
        self._start(compose([*given, *overrides], source="call of LLM"))

    @classmethod
    def from_composed(cls, composed: Composed) -> LLM:
        """From settings that were composed already (`core.run`)."""
        llm = cls.__new__(cls)
        llm._start(composed)
        return llm

    def _start(self, composed: Composed) -> None:
        checkpoint = open_checkpoint(composed.config.model, seed=composed.config.seed)
        self.resolved: Resolved = resolve(composed, checkpoint, composed.registry)
        self.engine: Engine = build_engine(self.resolved, composed.registry)
        self.tokenizer = checkpoint.tokenizer()
        self._prompts: dict[int, tuple[Request, str | None]] = {}  # of add_request, not yet reported as finished
        self._finalizer = weakref.finalize(self, self.engine.executor.close)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        A prompt is text or a list of token ids. All prompts are checked before one is queued: ValueError names the bad one.
        use_tqdm: progress bar on stderr (default: if that is a terminal).
        """
        many = _several(prompts)
        pairs = list(zip(many, self._params_for(sampling_params, len(many)), strict=True))
        ready = [self._checked(prompt, params, f"prompt {i}") for i, (prompt, params) in enumerate(pairs)]
        requests = [self.engine.submit(tokens, params) for tokens, params in ready]
        try:
            self._run(requests, use_tqdm)
        finally:
            for request in requests:
                self.engine.abort(request.id)
        texts = (prompt if isinstance(prompt, str) else None for prompt in many)
        return [self._result(request, text) for request, text in zip(requests, texts, strict=True)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, through the checkpoint's chat template."""
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_tokens(m) for m in several], sampling_params, use_tqdm=use_tqdm)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Text and tokens of one prompt as they come. Closing the iterator ends the request."""
        request = self.engine.submit(*self._checked(prompt, sampling_params or SamplingParams(), "the prompt"))
        try:
            yield from self._deltas(request)
        finally:
            self.engine.abort(request.id)

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, labels: Mapping[str, Any] | None = None
    ) -> int:
        """Queue a prompt for `step`; its id. labels: client, priority, deadline, ... for schedulers that read them."""
        tokens, params = self._checked(prompt, sampling_params or SamplingParams(), "the prompt")
        request = self.engine.submit(tokens, params, labels)
        self._prompts[request.id] = (request, prompt if isinstance(prompt, str) else None)
        return request.id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the state of every added request that advanced or ended."""
        advanced = [output.request.id for output in self.engine.step()]
        ended = [number for number, (request, _) in self._prompts.items() if request.finish_reason]
        results = []
        for number in dict.fromkeys([*advanced, *ended]):
            if number in self._prompts:
                result = self._result(*self._prompts[number])
                results.append(result)
                if result.finished:
                    del self._prompts[number]
        return results

    def is_finished(self) -> bool:
        """No request is under way, and none has ended that `step` has not reported."""
        return not self.engine.busy and not self._prompts

    def abort(self, request_id: int) -> None:
        """End a request; unknown and finished ids are ignored."""
        self.engine.abort(request_id)

    def close(self) -> None:
        """Give everything back. Called at interpreter exit as well; twice is fine."""
        for number in list(self.engine.live):
            self.engine.abort(number)
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for an answer. ValueError if there is no chat template."""
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            raise ValueError(f"model {self.resolved.checkpoint.name} has no chat template; use generate with plain prompts")
        return self.tokenizer.chat(messages)  # type: ignore[arg-type]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; "" if the model has no tokenizer."""
        return self.tokenizer.decode(token_ids) if self.tokenizer else ""

    def _checked(self, prompt: Prompt, params: SamplingParams, name: str) -> tuple[list[int], SamplingParams]:
        if not self._finalizer.alive:
            raise ValueError("this LLM is closed; make a new one")
        try:
            params = check_params(params, self.resolved.choices["sampler"])
            tokens = self._encode(prompt)
            self.engine.limit_of(tokens, params)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return tokens, params

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError(f"model {self.resolved.checkpoint.name} has no tokenizer; give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def _params_for(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
        return list(params)

    def _run(self, requests: Sequence[Request], use_tqdm: bool | None) -> None:
        """Step until all of `requests` have ended."""
        hide = not (sys.stderr.isatty() if use_tqdm is None else use_tqdm)
        left, stats = {r.id for r in requests if r.finish_reason is None}, self.engine.stats
        with tqdm(
            total=len(requests), initial=len(requests) - len(left), desc="Generating", disable=hide, dynamic_ncols=True
        ) as bar:
            while left:
                before, started = (stats.tokens, stats.decode_tokens), time.perf_counter()
                self.engine.step()
                ended = {r for r in left if r not in self.engine.live}
                left -= ended
                bar.update(len(ended))
                if not hide:
                    bar.set_postfix(self._rates(bar, before, time.perf_counter() - started), refresh=False)

    def _rates(self, bar: tqdm, before: tuple[int, int], seconds: float) -> dict[str, str]:
        """Latest prefill and decode speed side by side; a step without one of them keeps its last value."""
        rates: dict[str, str] = getattr(bar, "rates", {"prefill": "-", "decode": "-"})
        decode = self.engine.stats.decode_tokens - before[1]
        prefill = self.engine.stats.tokens - before[0] - decode
        for name, count in (("prefill", prefill), ("decode", decode)):
            if count:
                rates[name] = f"{count / seconds:.0f} tok/s"
        bar.rates = rates  # type: ignore[attr-defined]
        return rates

    def _deltas(self, request: Request) -> Iterator[Delta]:
        text = Detokenizer(self.tokenizer) if self.tokenizer else None
        while True:
            for output in self._advance(request):
                new = text.push(output.tokens) if text else ""
                if output.finish_reason and text:
                    new += text.flush()
                yield Delta(request.id, new, output.tokens, output.finish_reason)
            if request.finish_reason is not None:
                return

    def _advance(self, request: Request) -> list[Output]:
        return [output for output in self.engine.step() if output.request is request]

    def _result(self, request: Request, prompt: str | None) -> RequestOutput:
        return output_of(request, prompt, self.decode(request.tokens[request.num_prompt :]))


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or token ids) or several, as a list."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
