"""tokens.json: what a run with greedy sampling drew, for the comparison of cells (`core.sweep.equal`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.files import write_json
from core.interfaces import Request

TOKENS = "tokens.json"


def write_tokens(folder: Path, runs: Sequence[Sequence[Request]]) -> None:
    """runs[run][request] -> the drawn tokens of that request, in the order of the prompts or of the load. Nothing is written
    if a request was sampled otherwise than greedily; a file of an earlier run is removed."""
    (folder / TOKENS).unlink(missing_ok=True)
    if all(request.params.temperature == 0 for run in runs for request in run):
        drawn = [[request.tokens[request.num_prompt :] for request in run] for run in runs]
        write_json(folder / TOKENS, {"runs": drawn}, indent=None)
