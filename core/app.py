"""`task=generate`: answer the prompts, stream to the terminal, leave result.json. Answers on stdout, all else on stderr."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.config import Composed
from core.engine import Output
from core.environment import environment, plugin_metrics
from core.files import write_json
from core.interfaces import PROJECT, Request
from core.llm import LLM
from core.progress import Progress, progress
from core.prompts import Encoded, Question, encode_question, read_questions
from core.resolve import Resolved, decide, describe
from core.sizing import Sizing
from core.sweep.tokens import write_tokens
from core.text import Detokenizer

log = logging.getLogger(PROJECT)


class Terminal:
    """Answers in the order of the prompts: the first unfinished one is streamed, later ones wait for their turn."""

    def __init__(self, llm: LLM, questions: list[Question], requests: list[Request]) -> None:
        self.questions, self.requests = questions, requests
        self.texts = {r.id: Detokenizer(llm.tokenizer, r.params.stop) if llm.tokenizer else None for r in requests}
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


def run_job(composed: Composed, run_dir: Path, resolved: Resolved | None = None) -> dict[str, Any]:
    """Run the task; what result.json holds. After Ctrl-C the file holds what finished, and KeyboardInterrupt is raised."""
    started, file = time.perf_counter(), run_dir / "result.json"
    file.unlink(missing_ok=True)  # a failing run must not be taken for an older one
    resolved = resolved or decide(composed)
    checkpoint = resolved.checkpoint
    questions = read_questions(composed)
    prompts = [encode_question(q, checkpoint, str(composed.config.chat)) for q in questions]
    with LLM.from_composed(composed, resolved) as llm:
        report = dict(llm.engine.executor.report())
        _introduce(llm, report, sum(p.templated for p in prompts))
        checked = [llm._checked(p.tokens, q.params, q.name) for p, q in zip(prompts, questions, strict=True)]
        ready = time.perf_counter()
        requests = [llm._submit(*ready) for ready in checked]
        with stop_signal() as stop, progress(llm.engine, len(requests), _bar_wanted()) as bar:
            _answer(bar, Terminal(llm, questions, requests), stop)
        seconds = time.perf_counter() - ready
        for request in requests:
            llm.abort(request.id)
        result = {
            "plugins": describe(llm.resolved)[1],
            "settings": composed.raw,
            "environment": environment(llm.resolved.device),
            "seed": composed.config.seed,
            "outputs": [_output(llm, *item) for item in zip(questions, requests, prompts, strict=True)],
            "timings": {"start_s": ready - started, **_timings(requests, seconds), **bar.rates(), **report},
            "engine": llm.engine.stats.as_dict(),
            "failed_observers": llm.engine.observers.report(),
            "interrupted": bool(stop),
        }
        result["metrics"] = plugin_metrics(composed.registry, result)
        write_tokens(run_dir, [requests])
        write_json(file, result)
    rates = "prefill {prefill_tokens_per_s:.0f}, decode {decode_tokens_per_s:.0f} tok/s".format(**bar.rates())
    log.info("%d tokens in %.1f s (%s); %s", result["timings"]["output_tokens"], seconds, rates, file)
    if stop:
        raise KeyboardInterrupt
    return result


def _introduce(llm: LLM, report: dict[str, Any], templated: int) -> None:
    """What runs, on stderr: the choice of every slot, where memory goes, what happens to the prompts."""
    print(describe(llm.resolved)[0], file=sys.stderr)
    if memory := report.get("memory"):
        print(Sizing(**memory), file=sys.stderr)
    if templated:
        print(f"chat template of the checkpoint applied to {templated} prompt(s) (chat=off switches it off)", file=sys.stderr)


def _bar_wanted() -> bool:
    """Answers that stream to the same terminal are progress enough, and a bar would break them."""
    return sys.stderr.isatty() and not sys.stdout.isatty()


def _answer(bar: Progress, terminal: Terminal, stop: list[int]) -> None:
    terminal.show()
    while bar.engine.busy and not stop:
        for output in bar.step():
            terminal.take(output)
            bar.finished(output.finish_reason is not None)
        terminal.show()


def _timings(requests: list[Request], seconds: float) -> dict[str, Any]:
    generated = sum(len(r.tokens) - r.num_prompt for r in requests)
    firsts = [r.metrics.ttft for r in requests if r.metrics.ttft is not None]
    rates = {"output_tokens": generated, "output_tokens_per_s": generated / seconds}
    return {"generate_s": seconds, "ttft_s": min(firsts, default=None), **rates}


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


def _output(llm: LLM, question: Question, request: Request, prompt: Encoded) -> dict[str, Any]:
    token_ids = request.tokens[request.num_prompt :]
    return {
        "prompt": question.text if question.text is not None else question.messages,
        "prompt_tokens": request.num_prompt,
        "chat_template": prompt.templated,
        "token_ids": token_ids,
        "text": llm._text_of(request),
        "finish_reason": request.finish_reason,
        "message": request.message,
        "seed": request.params.seed,
        "metrics": asdict(request.metrics),
    }
