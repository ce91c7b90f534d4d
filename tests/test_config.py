"""Composition: types, names, precedence; what Hydra lets pass is refused, and what it held before is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from core.composition import rewrite
from core.config import Config, compose, override
from core.errors import nearest
from core.plugins import discover
from core.vocabulary import parse
from tests.plugins_fixtures import Site


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is what the caller looks at)
        compose(overrides)
    return str(caught.value)


def test_defaults_need_no_override() -> None:
    composed = compose()
    assert composed.choices == {
        "scheduler": "fcfs",
        "kv_allocator": "block_hash",
        "attention": "auto",
        "arch": "auto",
        "sampler": "gumbel",
        "executor": "auto",
    }
    assert composed.explicit == set()
    assert composed.config.sampling.params().temperature == 0
    assert "temperature" not in composed.config.sampling.params().given


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("+atention.x=1", "unknown setting atention; did you mean attention?"),
        ("++attention.typo=2", "attention=auto has no settings of its own; name the option that is meant, attention=NAME"),
        ("block_size=abc", "unknown setting block_size; did you mean kv_allocator.block_size?"),
        ("kv_allocator.block_size=abc", "kv_allocator.block_size must be a whole number >= 1 or auto, got 'abc'"),
        ("scheduler=[a,b]", "scheduler takes one of fcfs, mixed, replay, got [a,b]; to try each in turn: -m scheduler=a,b"),
        ("scheduler=[fcfs,mixed]", "scheduler takes one of fcfs, mixed, replay, got [fcfs,mixed]"),
        ("~scheduler", "scheduler has no option; give one: scheduler=fcfs or mixed or replay"),
    ],
)
def test_what_hydra_lets_pass(override: str, text: str) -> None:
    """H5: prefixes and lists pass Hydra's own checks, a wrong name has no hint."""
    assert text in refusal(override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("atention=flash", "did you mean attention?"),
        ("block_size=16", "did you mean kv_allocator.block_size?"),
        ("weights=random", "did you mean model.weights?"),
        ("temperature=0", "did you mean sampling.temperature?"),
        ("max_num_seq=3", "did you mean max_num_seqs"),
        ("+plugins.blck=[a]", "did you mean plugins.block?"),
        ("scheduler.max_chunk=3", "is a setting of scheduler=mixed; the chosen scheduler=fcfs has decode_after"),
        ("+scheduler.max_chunk=3", "is a setting of scheduler=mixed; the chosen scheduler=fcfs has decode_after"),
        ("attention.x=1", "name the option that is meant"),
        ("scheduler=mixd", "scheduler=mixd: no such option; did you mean mixed?"),
        ("model.pth=x", "did you mean model.path?"),
        ("++model.pth=x", "did you mean model.path?"),
    ],
)
def test_unknown_names(override: str, text: str) -> None:
    assert text in refusal(override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("max_num_seqs=0", "max_num_seqs must be a whole number >= 1 or auto, got 0"),
        ("max_num_seqs=abc", "got 'abc'"),
        ("max_model_len=[1]", "max_model_len=[1]"),
        ("seed=abc", "seed=abc: Value 'abc' of type 'str' could not be converted to Integer"),
        ("seed=-1", "seed must be a whole number in [0, 2**63), got -1"),
        ("++seed=x", "could not be converted to Integer"),
        ("overlap=2", "overlap must be auto, 0 or 1, got 2"),
        ("overlap=true", "overlap=true: Value 'True' of type 'bool'"),
        ("dtype=int8", "dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
        ("graphs=maybe", "graphs must be auto, on or off, got 'maybe'"),
        ("compile=auto", "compile must be on or off"),
        ("kv_memory=2XB", "2GiB"),
        ("gpu_memory_utilization=1.5", "in (0, 1], got 1.5"),
        ("tensor_parallel_size=0", ">= 1, got 0"),
        ("sampling.top_p=3", "sampling.top_p must be a number in (0, 1], got 3.0"),
        ("sampling.stop_token_ids=[-1]", "sampling.stop_token_ids must be a list of token ids >= 0"),
        ("prompts=hello", "a list is needed"),
        ("scheduler.decode_after=-1", "scheduler.decode_after must be >= 0"),
        ("task=sing", "task must be"),
        ("sweep.timeout_s=0", "sweep.timeout_s must be > 0"),
        ("max_num_seqs=1,2", "--multirun"),
    ],
)
def test_wrong_values(override: str, text: str) -> None:
    """Each names the setting, the value and what is allowed."""
    assert text in refusal(override)


def test_two_names_of_one_setting() -> None:
    """Other engines' words; two different values are a contradiction."""
    assert compose(["num_gpu_blocks_override=7"]).config.num_kv_blocks == 7
    assert compose(["num_kvcache_blocks=7", "num_kv_blocks=7"]).config.num_kv_blocks == 7
    assert "name the same setting" in refusal("num_kv_blocks=7", "num_kvcache_blocks=8")
    assert compose(["enforce_eager=true"]).config.graphs == "off"
    assert "leave one out" in refusal("enforce_eager=true", "graphs=on")


def test_spellings() -> None:
    assert compose(["graphs=true"]).config.graphs == "on"
    assert compose(["compile=on"]).config.compile is True
    assert compose(["kv_memory=2GiB"]).config.kv_memory == 2 * 2**30
    assert compose(["kv_memory=1.5MB"]).config.kv_memory == 1_500_000


def test_explicit_is_what_was_given() -> None:
    """Values from the command line and from presets count, defaults do not; the last one wins."""
    composed = compose(["kv_allocator.block_size=64", "attention=sdpa", "sampling={temperature: 0.5}", "seed=1", "seed=0"])
    assert composed.explicit == {"kv_allocator.block_size", "attention", "sampling.temperature", "seed"}
    assert composed.config.seed == 0
    assert composed.where("seed") == "from the command line"
    assert composed.where("dtype") == "default"
    assert compose(["seed=1"], source="call of LLM").where("seed") == "from the call of LLM"


def test_the_command_line_beats_a_preset(site: Site) -> None:
    """A preset counts as given, says so in messages, and gives way to the command line."""
    files = {
        "MODULE_conf/experiment/small.yaml": """
            # @package _global_
            defaults:
              - override /scheduler: mixed
            max_num_seqs: 4
            scheduler:
              max_chunk: 32
        """
    }
    site.add(
        "acme",
        '@hookimpl\ndef inferlab_presets():\n    return ["MODULE_conf"]\n',
        files={**files, "MODULE_conf/__init__.py": ""},
    )
    composed = compose(["+experiment=small"])
    assert (composed.choices["scheduler"], composed.config.scheduler.max_chunk, composed.config.max_num_seqs) == (
        "mixed",
        32,
        4,
    )
    assert composed.where("max_num_seqs") == composed.where("scheduler.max_chunk") == "from the preset"
    composed = compose(["+experiment=small", "max_num_seqs=5"])
    assert composed.config.max_num_seqs == 5
    assert composed.where("max_num_seqs") == "from the command line"


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("model=tiny-llama", ["model=tiny-llama"]),
        ("model=Qwen/Qwen3-0.6B", ["model=custom", "model.path='Qwen/Qwen3-0.6B'"]),
        ("model=/a b/c=d(1)", ["model=custom", "model.path='/a b/c=d(1)'"]),
        ("model='it\\'s'", ["model=custom", "model.path='it\\'s'"]),
        ("model=tiny-llama,smollm2", ["model=tiny-llama,smollm2"]),
        ("model=a/b,c/d", ["model=custom", "model.path='a/b','c/d'"]),
        ("model.path=x", ["model.path=x"]),
        ("sampling.temperature=1", ["sampling.temperature=1"]),
    ],
)
def test_rewriting(given: str, becomes: list[str]) -> None:
    """A model that is no preset is a path or hub id, also one with signs of Hydra's grammar in it."""
    assert rewrite([given], discover()) == becomes


def test_a_misspelt_preset() -> None:
    """It would be taken for a path, and the message would know no presets."""
    assert "did you mean tiny-llama" in refusal("model=tiny-lama")


def test_a_mixed_sweep_over_models_says_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"sweep over model\.path"):
        rewrite(["model=tiny-llama,/some/path"], discover())


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.5, "", "a,b", "it's [a] \\ {b} $x", "Qwen/Qwen3", ["a", 1, ["b"]], {"a": [1.5, None]}, "10", "true"],
)
def test_python_values_survive_hydras_grammar(value: Any) -> None:
    """LLM(**settings) goes through the same composition; a text that looks like a number stays a text."""
    (parsed,) = parse([override("key", value)])
    plain = parsed.value()
    assert _unquoted(plain) == value


def _unquoted(value: Any) -> Any:
    if isinstance(value, list):
        return [_unquoted(v) for v in value]
    if isinstance(value, dict):
        return {_unquoted(k): _unquoted(v) for k, v in value.items()}
    return getattr(value, "text", value)


def test_parameters_of_the_samplers_own(site: Site) -> None:
    """`sampling.NAME` of the chosen sampler's request_settings: typed, and refused with another sampler or misspelt."""
    site.add(
        "acme",
        """
        @dataclass
        class Extra:
            penalty: float = 1.0
        @hookimpl
        def inferlab_components():
            yield Component("sampler", "picky", "m:X", request_settings=Extra)
        """,
    )
    composed = compose(["sampler=picky", "sampling.penalty=2"])
    assert composed.config.sampling.theirs == {"penalty": 2.0} and composed.where("sampling.penalty") == "from the command line"
    assert composed.config.sampling.params().extra == {"penalty": 2.0}
    assert "did you mean sampling.penalty" in refusal("sampler=picky", "sampling.penlty=2")
    assert "could not be converted to Float" in refusal("sampler=picky", "sampling.penalty=x")
    wrong = refusal("sampling.penalty=2")
    assert "sampling.penalty is a parameter of sampler=picky; the chosen sampler=gumbel has no parameters of its own" in wrong
    assert "does not exist" in refusal("++sampling.theirs.nothing=2")


def test_hydras_state_is_left_as_it_was(tmp_path: Path) -> None:
    """LLM inside somebody's own Hydra application must not add options to it, nor end it."""
    from hydra import compose as their_compose
    from hydra import initialize_config_dir

    (tmp_path / "theirs.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        store = ConfigStore.instance()
        store.store(group="scheduler", name="fcfs", node={"y": 2})
        before = store.repo
        compose(["scheduler=mixed"])
        assert store.repo is before and before["scheduler"].keys() == {"fcfs.yaml"}
        assert GlobalHydra.instance().is_initialized()
        assert their_compose("theirs", ["+scheduler=fcfs"]) == {"x": 1, "scheduler": {"y": 2}}
        del before["scheduler"]


def test_a_preset_cannot_block_plugins(site: Site) -> None:
    """Plugins are loaded before presets are read, so this would do nothing, silently."""
    files = {
        "MODULE_conf/__init__.py": "",
        "MODULE_conf/experiment/x.yaml": "# @package _global_\nplugins:\n  block: [models]\n",
    }
    site.add("acme", '@hookimpl\ndef inferlab_presets():\n    return ["MODULE_conf"]\n', files=files)
    assert "plugins.block works on the command line only" in refusal("+experiment=x")


def test_every_setting_has_a_line_of_help() -> None:
    """A knob states unit, scope and default rule."""
    from dataclasses import fields, is_dataclass

    from core.plugins.checks import KINDS

    for item in fields(Config):
        if item.name not in (*KINDS, "model", "load") and not is_dataclass(item.default_factory):
            assert item.metadata["doc"], item.name


def test_nearest_prefers_the_same_last_part() -> None:
    assert nearest("block_size", ["block", "kv_allocator.block_size"])[0] == "kv_allocator.block_size"
    assert nearest("qqqq", ["block", "kv_allocator.block_size"]) == []
