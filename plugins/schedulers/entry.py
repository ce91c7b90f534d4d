"""Built-in schedulers and their settings."""

from collections.abc import Iterable
from dataclasses import dataclass

from core.interfaces import Component, hookimpl, setting


@dataclass
class FcfsSettings:
    """First come, first served."""

    decode_after: int = setting(
        0, "prompt steps in a row after which running requests get one step; 0: prompts always go first", "steps"
    )

    def __post_init__(self) -> None:
        if self.decode_after < 0:
            raise ValueError(f"scheduler.decode_after must be >= 0 (0: off), got {self.decode_after}")


@dataclass
class MixedSettings:
    """Decodes and prompt chunks in one step."""

    max_chunk: int = setting(0, "of one prompt per step; 0: as many as the step's budget leaves", "tokens")

    def __post_init__(self) -> None:
        if self.max_chunk < 0:
            raise ValueError(f"scheduler.max_chunk must be >= 0 (0: off), got {self.max_chunk}")


@dataclass
class ReplaySettings:
    """A recorded run, step by step."""

    file: str | None = setting(None, "schedule.jsonl of a run with bench.record_schedule=true")


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="scheduler",
        name="fcfs",
        target="plugins.schedulers.fcfs:Fcfs",
        settings=FcfsSettings,
        summary="prompts first in order of arrival, chunked; the last to come gives way (nano-vLLM's policy)",
        provides={"max_wait_steps": "decode_after", "max_overtaken": 0},
    )
    yield Component(
        kind="scheduler",
        name="mixed",
        target="plugins.schedulers.mixed:Mixed",
        settings=MixedSettings,
        summary="every running request first, prompt chunks with what is left of the budget",
        provides={"max_wait_steps": 0, "max_overtaken": 0},
    )
    yield Component(
        kind="scheduler",
        name="replay",
        target="plugins.schedulers.replay:Replay",
        settings=ReplaySettings,
        summary="the steps of a recorded benchmark again, so that all else can be compared under the same plans",
        provides={"serves_only": "the load that was recorded"},
        probe="plugins.schedulers.replay:probe",
    )
