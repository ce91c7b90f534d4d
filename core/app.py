"""`task=generate`: answer the prompts, stream to the terminal, leave result.json. Answers on stdout, all else on stderr."""

from __future__ import annotations

import logging
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from core import device
from core.config import Composed
from core.engine import Output
from core.files import write_json
from core.interfaces import PROJECT, Request
from core.llm import LLM
from core.prompts import Question, read_questions
from core.resolve import describe
from core.text import Detokenizer

log = logging.getLogger(PROJECT)


class Terminal:
    """Answers in the order of the prompts: the first unfinished one is streamed, later ones wait for their turn."""

    def __init__(self, llm: LLM, questions: list[Question], requests: list[Request]) -> None:
        self.questions, self.requests = questions, requests
        self.texts = {r.id: Detokenizer(llm.tokenizer) if llm.tokenizer else None for r in requests}
        self.waiting: dict[int, str] = {r.id: "" for r in requests}
        self.shown = -1  # index of the answer under way

    def take(self, output: Output) -> None:
        number, text = output.request.id, self.texts[output.request.id]
        if text is not None:
            self.waiting[number] += text.push(output.tokens)
            if output.finish_reason:
                self.waiting[number] += text.flush()
        else:
            self.waiting[number] += "".join(f"{token} " for token in output.tokens)

    def show(self) -> None:
        while self.shown < len(self.requests):
            if self.shown >= 0:
                request = self.requests[self.shown]
                sys.stdout.write(self.waiting[request.id])
                self.waiting[request.id] = ""
                if request.finish_reason is None:
                    break
                note = f" [{request.finish_reason}: {request.message}]" if request.finish_reason in ("error", "abort") else ""
                sys.stdout.write(f"{note}\n\n")
            self.shown += 1
            if self.shown < len(self.requests):
                sys.stdout.write(f"> {self.questions[self.shown].shown}\n")
        sys.stdout.flush()


def run_job(composed: Composed, run_dir: Path) -> dict[str, Any]:
    """Run the task; what result.json holds. After Ctrl-C the file holds what finished, and KeyboardInterrupt is raised."""
    started = time.perf_counter()
    questions = read_questions(composed.config)
    with LLM.from_composed(composed) as llm:
        summary, choices = describe(llm.resolved)
        print(summary, file=sys.stderr)
        report = dict(llm.engine.executor.report())
        prompts = [_tokens(llm, question, str(composed.config.chat)) for question in questions]
        checked = [llm._checked(p, q.params, q.name) for p, q in zip(prompts, questions, strict=True)]
        ready = time.perf_counter()
        requests = [llm.engine.submit(tokens, params) for tokens, params in checked]
        with stop_signal() as stop:
            _answer(llm, Terminal(llm, questions, requests), stop)
        ended = time.perf_counter()
        for request in requests:
            llm.abort(request.id)
        generated = sum(len(r.tokens) - r.num_prompt for r in requests)
        firsts = [r.metrics.first_token - r.arrival for r in requests if r.metrics.first_token is not None]
        result = {
            "plugins": choices,
            "settings": composed.raw,
            "environment": _environment(llm.resolved.device),
            "seed": composed.config.seed,
            "outputs": [_output(llm, q, r) for q, r in zip(questions, requests, strict=True)],
            "timings": {
                "start_s": ready - started,
                "generate_s": ended - ready,
                "ttft_s": min(firsts, default=None),
                "output_tokens": generated,
                "output_tokens_per_s": generated / (ended - ready),
                **report,
            },
            "engine": llm.engine.stats.as_dict(),
            "interrupted": bool(stop),
        }
        result["metrics"] = _plugin_metrics(composed, result)
        write_json(run_dir / "result.json", result)
    log.info(
        "%d tokens in %.1f s (%.1f tok/s); %s", generated, ended - ready, generated / (ended - ready), run_dir / "result.json"
    )
    if stop:
        raise KeyboardInterrupt
    return result


def _answer(llm: LLM, terminal: Terminal, stop: list[int]) -> None:
    terminal.show()
    while llm.engine.busy and not stop:
        for output in llm.engine.step():
            terminal.take(output)
        terminal.show()


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """The list is no longer empty once Ctrl-C was pressed; a second press interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nstopping after this step (Ctrl-C again to stop at once)", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _tokens(llm: LLM, question: Question, chat: str) -> str | list[int]:
    """Text goes through the chat template if there is one (chat=auto) or always (chat=on)."""
    if question.tokens is not None:
        return question.tokens
    template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if question.messages is not None or chat == "on" or (chat == "auto" and template):
        return llm.chat_tokens(question.messages or [{"role": "user", "content": question.text}])
    assert question.text is not None
    return question.text


def _output(llm: LLM, question: Question, request: Request) -> dict[str, Any]:
    token_ids = request.tokens[request.num_prompt :]
    return {
        "prompt": question.text if question.text is not None else question.messages,
        "prompt_tokens": request.num_prompt,
        "token_ids": token_ids,
        "text": llm.decode(token_ids),
        "finish_reason": request.finish_reason,
        "message": request.message,
        "seed": request.params.seed,
        "metrics": asdict(request.metrics),
    }


def _environment(name: str) -> dict[str, Any]:
    packages = ("inferlab", "torch", "transformers", "hydra-core", "pluggy", "numpy")
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: installed.get(p) for p in packages},
        "argv": sys.argv,
        **device.describe(name),
    }


def _plugin_metrics(composed: Composed, result: dict[str, Any]) -> dict[str, Any]:
    """Numbers that plugins add; one that raises is named and left out."""
    found: dict[str, Any] = {}
    for hook in composed.registry.manager.hook.inferlab_metrics.get_hookimpls():
        try:
            metrics: Any = hook.function(result=result)
            found |= {name: asdict(metric) for name, metric in metrics.items()}
        except Exception as error:
            log.warning("plugin %s: inferlab_metrics raised %s: %s", hook.plugin_name, type(error).__name__, error)
    return found
