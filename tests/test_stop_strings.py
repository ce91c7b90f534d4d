"""Stop strings: the text ends before the first match, and nothing of a possible match is streamed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.llm import LLM, SamplingParams
from core.stop_strings import StopStrings, before_stop
from tests.real import TINY

TEXT = st.text("AB", max_size=24)
STOP = st.lists(st.text("AB", min_size=1, max_size=5), min_size=1, max_size=4)


def definition(text: str, stop: list[str]) -> str:
    """The first end at which some stop string ends; the longest of those."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))]
    return text


def begun(text: str, stop: list[str]) -> int:
    """Characters at the end that a longer text might take back."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@given(TEXT, STOP, st.lists(st.integers(0, 24)))
def test_any_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    """Whatever pieces a text comes in: the same end, and all that is certain is handed out at once, nothing else."""
    strings, handed, seen = StopStrings(stop), "", ""
    for start, end in pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        handed += strings.push(text[start:end])
        seen = text[:end]
        assert strings.found == any(s in seen for s in stop)
        assert handed == (definition(seen, stop) if strings.found else seen[: len(seen) - begun(seen, stop)])
    assert handed + strings.flush() == before_stop(text, stop) == definition(text, stop)


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("ABCDEF", ["DE"], "ABC"),  # spread over two tokens
        ("ABCDEF", ["CDEF", "DE"], "ABC"),  # DE is complete first
        ("ABCDEF", ["E", "CDE"], "AB"),  # both with the same character
        ("ABCDEF", ["FG"], "ABCDEF"),  # the tail comes at the end
        ("ABABAC", ["ABAC"], "AB"),  # the match begins inside a false start
        ("ABC", ["A"], ""),
    ],
)
def test_examples(text: str, stop: list[str], kept: str) -> None:
    """By hand; also as two tokens, ABC and the rest."""
    strings = StopStrings(stop)
    assert strings.push(text[:3]) + strings.push(text[3:]) + strings.flush() == before_stop(text, stop) == kept


@pytest.fixture(scope="module", params=[0, 1])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny-llama", **{**TINY, "overlap": request.param}) as llm:
        yield llm


def drawn(llm: LLM) -> tuple[SamplingParams, str, int]:
    """Parameters whose text has three plain characters in a row, a token each; the text, and the place of the first one."""
    for seed in range(100):
        params = SamplingParams(temperature=1, seed=seed, max_tokens=24, ignore_eos=True)
        output = llm.generate("abc", params)[0]
        if match := re.search(rb"[A-Za-z]{3}", bytes(t for t in output.token_ids if t < 256)):
            place = output.token_ids.index(match[0][0])
            if output.token_ids[place : place + 3] == list(match[0]) and place > 2:
                return params, output.text, place
    raise AssertionError("no example among the seeds")


def with_stop(params: SamplingParams, *stop: str) -> SamplingParams:
    return SamplingParams(temperature=1, seed=params.seed, max_tokens=params.max_tokens, ignore_eos=True, stop=stop)


def test_a_request_ends(llm: LLM) -> None:
    """Two tokens make the match: the text ends before it, the tokens with the second one; a stream says the same."""
    params, text, place = drawn(llm)
    whole = llm.generate("abc", params)[0]
    word = llm.decode(whole.token_ids[place : place + 2])
    wanted = with_stop(params, "not in it", word)
    output = llm.generate("abc", wanted)[0]
    assert output.finish_reason == "stop" and output.text == definition(text, ["not in it", word])
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and len(output.token_ids) <= place + 2
    assert llm.decode(output.token_ids) == output.text + word
    deltas = list(llm.stream("abc", wanted))
    assert "".join(d.text for d in deltas) == output.text and deltas[-1].finish_reason == "stop"
    assert [t for d in deltas for t in d.token_ids] == output.token_ids
    llm.add_request("abc", wanted)
    states = []
    while not llm.is_finished():
        states += llm.step()
    assert states[-1].text == output.text and states[-1].finish_reason == "stop"
    assert not llm.engine._ends, "what watched the requests is still there"


def test_a_tail_that_only_looked_like_a_match(llm: LLM) -> None:
    """Held back until the end, then told; neighbours without stop strings go on."""
    params, text, _ = drawn(llm)
    never = with_stop(params, text[-1] + "never")
    both = llm.generate(["abc", "abc"], [never, params])
    assert [o.text for o in both] == [text, text] and both[0].finish_reason == "length"
    deltas = list(llm.stream("abc", never))
    assert "".join(d.text for d in deltas) == text and deltas[-1].text.endswith(text[-1])


@pytest.mark.parametrize("stop", ["", ["a", ""], 5, [5], b"a", {"a": 1, 2: 3}])
def test_what_is_no_stop_string(stop: object) -> None:
    """The value is told."""
    with pytest.raises(ValueError, match=r"stop must be a text or a list of texts of at least one character, got"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


def test_without_a_tokenizer() -> None:
    """There is no text to be searched, and that is said before anything is queued."""
    assert SamplingParams(stop=None).stop == () and SamplingParams(stop="ab").stop == ("ab",)
    with LLM("tiny-llama", **{**TINY, "overrides": ["model.tokenizer=none"]}) as llm:
        with pytest.raises(ValueError, match=r"prompt 0: stop=\['a'\] needs text, and this checkpoint has no tokenizer"):
            llm.generate([[1, 2]], SamplingParams(stop="a"))
        assert llm.is_finished()
