"""The first lines of a report: what a reader who stops there must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.report.effects import Effect, outliers
from core.report.words import change, number
from core.sweep.records import STATUSES

if TYPE_CHECKING:
    from core.report.content import Content

Finding = tuple[str, str]  # good, bad, warn or plain; sentence
ENVIRONMENT = "environment."


def findings(content: Content) -> list[Finding]:
    """In the order of importance: is all there, is it right, what makes a difference, what does not, how noisy is it."""
    return [*_complete(content), *_equal(content), *_caveats(content), *_effects(content), *_noise(content)]


def _complete(content: Content) -> Iterator[Finding]:
    sweep = content.table.sweep
    ok, total = sweep.count("ok"), len(sweep.cells)
    counts = ", ".join(f"{sweep.count(status)} {status}" for status in STATUSES[1:] if sweep.count(status))
    if sweep.interrupted or total < sweep.planned:
        yield "warn", f"Interrupted: {total} of {sweep.planned or '?'} runs were reached; the report covers these."
    if counts:
        bad = any(sweep.count(status) for status in ("failed", "crashed", "timeout"))
        yield "bad" if bad else "plain", f"{ok} of {total} runs are ok ({counts}); the reasons are listed below."
    else:
        yield "good", f"All {total} runs are ok."
    for trouble in content.troubles:
        where = trouble["runs"]
        yield "warn", f"{trouble['kind'].capitalize()} {trouble['name']} failed in {len(where)} runs: {trouble['why']}"


def _equal(content: Content) -> Iterator[Finding]:
    equal = content.table.sweep.equal_output
    wrong = [cell for cell in content.cells if cell.differences]
    for cell in wrong:
        faster = f", and it looks better in {', '.join(cell.wrong_and_faster)}: faster, but not the same answers"
        yield "bad", f"Output of {cell.name} is NOT EQUAL to what it should be{faster if cell.wrong_and_faster else ''}."
    if equal and not wrong:
        yield "good", f"Equal output: the {equal['compared']} runs that should have drawn the same tokens did."
    if not equal and content.table.sweep.count("ok"):
        yield "plain", "Output was not compared: sampling was not greedy (sampling.temperature=0), or one run is all there is."


def _caveats(content: Content) -> Iterator[Finding]:
    cells = [cell for cell in content.cells if cell.saturated]
    if cells:
        which = "all cells" if len(cells) == len(content.cells) else f"{len(cells)} of {len(content.cells)} cells"
        yield (
            "warn",
            f"Saturated: in {which} requests came faster than they were served. Latencies there grow with the length "
            "of the run; they rank the cells, they are not what a user would see.",
        )
    yield from _outliers(content)
    if machine := [name.removeprefix(ENVIRONMENT) for name, _ in content.unasked if name.startswith(ENVIRONMENT)]:
        yield "warn", f"Not all runs had the same {', '.join(machine)}: differences may come from there."


def _outliers(content: Content) -> Iterator[Finding]:
    runs: dict[str, list[str]] = {}
    for metric in content.table.headlines:
        for name in outliers(content.table, metric):
            runs.setdefault(name, []).append(metric.name)
    for name, metrics in list(runs.items())[:5]:
        what = f"{name} is far from the other repeats of its cell in {', '.join(metrics)}"
        yield "warn", f"Outlier: {what}. The tables and plots show it, the verdicts leave it out."
    if len(runs) > 5:
        yield "warn", f"{len(runs) - 5} further runs are outliers."


def _effects(content: Content) -> Iterator[Finding]:
    for factor, values in content.table.sweep.factors.items():
        for value in values[1:]:
            rows = [e for e in content.mains if e.factors == (factor,) and e.change == ((values[0], value),)]
            if rows and all(e.p is not None for e in rows):
                yield "plain", f"{factor}={value} instead of {values[0]}: {_told(rows)}"
    for effect in [e for e in content.interactions if e.real and not e.tiny][:5]:
        yield "plain", interaction_text(effect)


def _told(rows: Sequence[Effect]) -> str:
    real = [e for e in rows if e.real and not e.tiny]
    rest = [e.metric.name for e in rows if e not in real]
    text = "; ".join(f"{e.metric.name} {e.size} ({'in every repeat' if e.exact else e.interval}{_word(e)})" for e in real)
    if not real:
        return f"no difference beyond noise in any of {', '.join(rest)}."
    return f"{text}. No difference beyond noise in {', '.join(rest)}." if rest else f"{text}."


def _word(effect: Effect) -> str:
    return {1: ", better", -1: ", worse", 0: ""}[effect.good]


def interaction_text(effect: Effect) -> str:
    """What the effect of one factor depends on."""
    (f, g), ((_, b), (c, d)) = effect.factors, effect.change
    much = f"{effect.size} on top" if not effect.ratio else f"times {number(1 + (effect.share or 0))}"
    what = f"The effect of {f}={b} on {effect.metric.name} depends on {g}"
    return f"{what}: with {d} instead of {c} it is {much} ({effect.interval})."


def _noise(content: Content) -> Iterator[Finding]:
    if content.repeats < 2:
        yield "warn", "Each cell was run once: nothing can be said about noise. Repeat with sweep.repeats=5."
        return
    scatter = []
    for metric in content.table.headlines:
        shares = [
            (max(s.values) - min(s.values)) / abs(s.median)
            for cell in content.cells
            if (s := cell.stats.get(metric.name)) and s.median
        ]
        if shares:
            scatter.append(f"{metric.name} {change(sorted(shares)[len(shares) // 2]).lstrip('+')}")
    if scatter:
        yield "plain", f"From the slowest to the fastest repeat of a typical cell: {', '.join(scatter)}."
