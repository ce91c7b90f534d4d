"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, in the words of vLLM and nano-vLLM."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from core.build import build_engine, build_parts, check_params
from core.composition import override
from core.config import Composed, compose
from core.encoding import Prompt, encode, encode_chat, several
from core.engine import Engine
from core.interfaces import Request, SamplingParams
from core.outputs import Delta, RequestOutput, output_of
from core.progress import progress
from core.resolve import Resolved, decide
from core.stop_strings import before_stop
from core.text import Detokenizer

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. One engine per object; several may live one after the other, or at once.

    model: a preset (`smollm2`), a directory, a .gguf file or a hub id. Settings are those of `python -m core.run`, as
    keywords (`attention="sdpa"`, `max_model_len=2048`) or as `overrides=["kv_allocator.block_size=64"]`.
    Raises ValueError with all reasons if the configuration cannot run.
    """

    def __init__(self, model: str = "smollm2", *, overrides: Sequence[str] = (), **settings: Any) -> None:
        if isinstance(overrides, str):
            raise ValueError(f"overrides is a list of SETTING=VALUE, got {overrides!r}")
        given = [override(name, value) for name, value in {"model": model, **settings}.items()]
        self._start(compose([*given, *overrides], source="call of LLM"))

    @classmethod
    def from_composed(cls, composed: Composed, resolved: Resolved | None = None) -> LLM:
        """From settings that were composed already (`core.run`), and decided if given."""
        llm = cls.__new__(cls)
        llm._start(composed, resolved)
        return llm

    def _start(self, composed: Composed, resolved: Resolved | None = None) -> None:
        self.resolved: Resolved = resolved or decide(composed)
        self.tokenizer = self.resolved.checkpoint.tokenizer()  # before the engine: if it fails, nothing is to be given back
        self.engine: Engine = build_engine(self.resolved, composed.registry)
        self._prompts: dict[int, tuple[Request, str | None]] = {}  # of add_request, not yet reported as finished
        self._finalizer = weakref.finalize(self, self.engine.executor.close)
        if self.resolved.device != "cpu":  # a collection that walks all of torch would be seen in a step of a millisecond
            gc.collect()
            gc.freeze()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        A prompt is text or a list of token ids. All prompts are checked before one is queued: ValueError names the bad one.
        use_tqdm: progress bar on stderr (default: if that is a terminal).
        """
        many = several(prompts)
        pairs = list(zip(many, self._params_for(sampling_params, len(many)), strict=True))
        ready = [self._checked(prompt, params, f"prompt {i}") for i, (prompt, params) in enumerate(pairs)]
        requests = [self._submit(*checked) for checked in ready]
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
        """Text and tokens of one prompt as they come; the last delta carries the finish reason.

        The request is checked and queued at once. Closing the iterator ends it. Several streams may be read in turn.
        """
        tokens, params, limit = self._checked(prompt, sampling_params, "the prompt")
        return self._deltas(self._submit(tokens, params, limit))

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, labels: Mapping[str, Any] | None = None
    ) -> int:
        """Queue a prompt for `step`; its id. labels: client, priority, deadline, ... for schedulers that read them."""
        tokens, params, limit = self._checked(prompt, sampling_params, "the prompt")
        request = self._submit(tokens, params, limit, labels)
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
        return not self.engine.live and not self._prompts

    def abort(self, request_id: int) -> None:
        """End a request; unknown and finished ids are ignored."""
        self.engine.abort(request_id)

    def restart(self) -> None:
        """After a rank died: end what is left of the executor, build it anew and take every unfinished request up again, with
        its tokens so far as the prompt. ValueError if this LLM is closed, or if torchrun started its ranks."""
        if not self._finalizer.alive:
            raise ValueError("this LLM is closed; make a new one")
        self._finalizer.detach()  # should this fail, the LLM is closed
        self.engine.executor.close()
        self.engine.revive(**build_parts(self.resolved, self.engine.clock))
        self._finalizer = weakref.finalize(self, self.engine.executor.close)

    def close(self) -> None:
        """Give everything back. Called at interpreter exit as well; twice is fine."""
        for number in list(self.engine.live):
            self.engine.abort(number)
        self._finalizer()
        if self.resolved.device != "cpu":
            gc.unfreeze()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for an answer. ValueError if there is no chat template."""
        return encode_chat(messages, self.tokenizer, self.resolved.checkpoint)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; "" if the model has no tokenizer."""
        return self.tokenizer.decode(token_ids) if self.tokenizer else ""

    def _text_of(self, request: Request) -> str:
        """What was generated, without special tokens, up to the first stop string."""
        return before_stop(self.decode(request.tokens[request.num_prompt :]), request.params.stop)

    def _submit(
        self, tokens: list[int], params: SamplingParams, limit: int, labels: Mapping[str, Any] | None = None
    ) -> Request:
        """Queue what `_checked` let pass."""
        ends = Detokenizer(self.tokenizer, params.stop).ends if params.stop else None
        return self.engine.submit(tokens, params, labels, limit=limit, ends=ends)

    def _checked(self, prompt: Any, params: Any, name: str) -> tuple[list[int], SamplingParams, int]:
        """Token ids and parameters that can run, and the length at which they end; ValueError starting with `name`."""
        if not self._finalizer.alive:
            raise ValueError("this LLM is closed; make a new one")
        params = SamplingParams() if params is None else params
        try:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling parameters are SamplingParams(...), got {params!r}")
            params = check_params(params, self.resolved.choices["sampler"])
            if params.stop and self.tokenizer is None:
                raise ValueError(
                    f"stop={list(params.stop)} needs text, and this checkpoint has no tokenizer; use stop_token_ids"
                )
            tokens = encode(prompt, self.tokenizer, self.resolved.checkpoint)
            return tokens, params, self.engine.limit_of(tokens, params)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _params_for(self, params: Any, count: int) -> list[Any]:
        if not isinstance(params, list | tuple):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
        return list(params)

    def _run(self, requests: Sequence[Request], show: bool | None) -> None:
        """Step until all of `requests` have ended."""
        left = {r.id for r in requests}
        with progress(self.engine, len(left), show) as bar:
            while left:
                ended = left - self.engine.live.keys()
                bar.finished(len(ended))
                left -= ended
                if left:
                    bar.step()

    def _deltas(self, request: Request) -> Generator[Delta, None, None]:
        # From the request itself: somebody else's step may be the one that advances it.
        text, seen = Detokenizer(self.tokenizer, request.params.stop), request.num_prompt
        try:
            while request.finish_reason is None:
                if len(request.tokens) == seen:
                    self.engine.step()
                elif request.finish_reason is None:
                    new, seen = tuple(request.tokens[seen:]), len(request.tokens)
                    yield Delta(request.id, text.push(new), new)
            new = tuple(request.tokens[seen:])
            yield Delta(request.id, text.push(new) + text.flush(), new, request.finish_reason)
        finally:
            self.engine.abort(request.id)

    def _result(self, request: Request, prompt: str | None) -> RequestOutput:
        return output_of(request, prompt, self._text_of(request))
