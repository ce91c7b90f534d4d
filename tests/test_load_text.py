"""`load.content=text`: prompts of real sentences, of exactly the wanted lengths. And what results may not hold."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from core.bench.task import run_job
from core.config import compose
from core.environment import environment
from core.errors import ConfigError
from core.loads import LoadSettings, draw_load
from core.loads.text import SENTENCES, Writer

ROOT = Path(__file__).parent.parent
SETTINGS = LoadSettings(num_requests=6, content="text", input_min=40, input_max=90, output_min=1, output_max=1)


class Words:
    """A tokenizer with a token for each word. `merges`: pairs of tokens become one, as in BPE, across sentences too."""

    def __init__(self, merges: bool = False) -> None:
        self.ids: dict[str, int] = {}
        self.merges = merges

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if self.merges:
            words = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
        return [self.ids.setdefault(word, len(self.ids)) for word in words]

    def decode(self, tokens: list[int]) -> str:
        words = {number: word for word, number in self.ids.items()}
        return " ".join(words[token] for token in tokens)


@pytest.mark.parametrize("merges", [False, True])
def test_prompts_are_sentences(merges: bool) -> None:
    """Each prompt starts with a whole sentence and goes on with whole ones, the last cut; the length is exact, also where
    sentences together are fewer tokens than each alone."""
    words = Words(merges)
    load = draw_load(SETTINGS, 0, 10**6, words.encode)
    assert all(40 <= len(prompt) <= 90 for prompt in load.prompts) and len({len(p) for p in load.prompts}) > 1
    for prompt in load.prompts:
        text, count = words.decode(prompt), 0
        while sentence := next((s for s in SENTENCES.strip().splitlines() if text.startswith(s)), None):
            text, count = text.removeprefix(sentence).lstrip(), count + 1
        assert count >= 1 and any(s.startswith(text) for s in SENTENCES.strip().splitlines())


def test_lengths_are_those_that_were_asked_for() -> None:
    writer, rng = Writer(Words(merges=True).encode), random.Random(1)
    assert [len(writer.write(rng, count)) for count in (0, 1, 2, 17, 400)] == [0, 1, 2, 17, 400]


def test_text_is_seeded_and_shared() -> None:
    """The same run twice is the same load; another run has other prompts; groups begin alike and go on differently."""
    settings = LoadSettings(num_requests=6, content="text", input_min=30, input_max=30, shared=20)
    words = Words()
    first, again, other = (draw_load(settings, number, 10**6, words.encode) for number in (0, 0, 1))
    assert first == again and first.prompts != other.prompts
    assert len({tuple(p[:20]) for p in first.prompts}) == 1 and len({tuple(p) for p in first.prompts}) == 6
    assert all(len(prompt) == 20 + 30 for prompt in first.prompts)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Its sentences, whatever its line breaks; nothing of ours."""
    file = tmp_path / "text.txt"
    file.write_text("One two\nthree. Four five? Six\n\nseven!")
    words = Words()
    settings = LoadSettings(num_requests=3, content="text", input_min=50, input_max=50, text_file=str(file))
    load = draw_load(settings, 0, 10**6, words.encode)
    assert {word for prompt in load.prompts for word in words.decode(prompt).split()} == {
        "One",
        "two",
        "three.",
        "Four",
        "five?",
        "Six",
        "seven!",
    }


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The file, its content, the tokenizer, the setting that goes with it."""
    (tmp_path / "empty.txt").write_text(" \n ")
    for name, text in (("nowhere.txt", "no such file"), ("empty.txt", "holds no text")):
        settings = LoadSettings(content="text", text_file=str(tmp_path / name))
        with pytest.raises(ConfigError, match=rf"load\.text_file=.*{name}.* {text}"):
            draw_load(settings, 0, 100, Words().encode)
    with pytest.raises(ConfigError, match=r"load\.text_file=x\.txt is read with load\.content=text only"):
        LoadSettings(text_file="x.txt")
    with pytest.raises(ValueError, match=r"load\.content=text needs a model with a tokenizer.* or load\.content=tokens"):
        draw_load(SETTINGS, 0, 100)


def test_from_end_to_end(tmp_path: Path) -> None:
    """The model's own tokenizer, here one of bytes: requests of these lengths are answered."""
    small = ["load.num_requests=3", "load.input_min=20", "load.input_max=30", "load.output_min=2", "load.output_max=2"]
    bench = ["task=bench", "model=tiny-llama", "max_model_len=96", "cpu_threads=1", "bench.repeats=1", "bench.warmup=0"]
    record = run_job(compose([*bench, *small, "load.content=text"]), tmp_path)["bench"]["repeats"][0]
    assert 60 <= record["input_tokens"] <= 90 and record["output_tokens"] == 6


PATH = re.compile(r"(?:^|[\s\"'=`(:,])(/[A-Za-z][\w.-]*(?:/[\w.-]+)*)", re.M)  # of this machine


def test_results_hold_no_paths() -> None:
    """What is recorded in benchmarks/results is read on other machines."""
    for text in ('"argv": ["/home/me/x.py"]', "model=/tmp/q06", "lies in /opt"):
        assert PATH.search(text), "the test would see no path"
    assert not PATH.search("tok/s, https://example.org/a, a / b, benchmarks/results")
    files = [file for file in (ROOT / "benchmarks/results").rglob("*") if file.suffix in (".json", ".jsonl", ".md", ".csv")]
    found = {file.name: names for file in files if (names := PATH.findall(file.read_text()))}
    assert files and not found


def test_the_environment_names_the_script_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkout lies is of no use to a reader; what was asked for is."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/core/run.py", "task=bench"])
    assert environment("cpu")["argv"] == ["run.py", "task=bench"]
    assert "/somewhere" not in str(environment("cpu"))
