"""Each cell against one of them, the baseline, in pairs of the same repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from core.errors import did_you_mean
from core.report.effects import Effect, adjusted, series
from core.report.noise import difference
from core.report.table import Table
from core.report.words import name_of


@dataclass(frozen=True)
class Against:
    """cells: name of each other cell -> metric -> difference."""

    baseline: str
    cells: dict[str, dict[str, Effect]] = field(default_factory=dict)


def against(table: Table, wanted: str = "") -> Against | None:
    """wanted: `scheduler=fcfs,overlap=0`, enough to name one cell; else the first cell that is ok. None: no cell to compare."""
    cells = {name_of(c.factors): c.factors for c in table.sweep.cells if c.status == "ok"}
    if not cells:
        return None
    name = _named(cells, table.sweep.factors, wanted) if wanted else next(iter(cells))
    found: list[Effect] = []
    for metric in table.headlines:
        values, ratio = series(table, metric)
        base = _of(values, cells[name])
        for other in (o for o in cells if o != name):
            pairs = (_of(values, cells[other]) - base).dropna().to_numpy()
            if len(pairs):
                found.append(Effect(metric, (other,), ((name, other),), ratio, difference([pairs], [1]), 1))
    rows: dict[str, dict[str, Effect]] = {}
    for effect in adjusted(found):
        rows.setdefault(effect.factors[0], {})[effect.metric.name] = effect
    return Against(name, rows) if rows else None


def _of(values: pd.Series, factors: Mapping[str, str]) -> pd.Series:
    """repeat -> value of a cell."""
    frame = values.reset_index(name="value")
    for name, value in factors.items():
        frame = frame.loc[frame[name] == value]
    return pd.Series(frame["value"].to_numpy(), index=frame["repeat"].to_numpy())


def _named(cells: Mapping[str, Mapping[str, str]], factors: Mapping[str, Sequence[str]], wanted: str) -> str:
    parts = [part.partition("=") for part in wanted.replace(",", " ").split()]
    given = {factor: value for factor, _, value in parts}
    for factor, value in given.items():
        if factor not in factors:
            raise ValueError(
                f"baseline {wanted}: {factor} was not swept{did_you_mean(factor, factors)} Known: {', '.join(factors)}"
            )
        if value not in factors[factor]:
            raise ValueError(f"baseline {wanted}: {factor} has the values {', '.join(factors[factor])}, not {value}")
    found = [name for name, chosen in cells.items() if given.items() <= chosen.items()]
    if len(found) != 1:
        what = f"{len(found)} cells fit ({'; '.join(found)})" if found else "no run of that cell is ok"
        raise ValueError(f"baseline {wanted}: {what}; name one cell by its factors, as scheduler=fcfs,overlap=0")
    return found[0]
