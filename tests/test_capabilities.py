"""Every pair of choices that can clash: the exact message, all of them at once, and before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core import machine
from core.capabilities import AtLeast, Includes, MultipleOf, OneOf, unknown_keys
from core.negotiate import name_of, show
from tests.plugins_fixtures import Site
from tests.test_resolve import reasons, resolved

ROOT = Path(__file__).parent.parent

LINE, DEFAULT, NAMED = "(from the command line)", "(default)", "from the command line"
ATTENTION = "attention=sdpa or attention=reference"
PAIRS: dict[str, tuple[str, list[str], str]] = {  # what clashes: a component's declaration, what is given, what is said
    "attention x block size": (
        '"attention", "acme", capabilities={"block_size": MultipleOf(48)}',
        ["attention=acme", "kv_allocator.block_size=64"],
        f"attention=acme needs kv_allocator.block_size to be a multiple of 48, got 64 {LINE}; "
        f"way out: kv_allocator.block_size=auto or {ATTENTION}",
    ),
    "attention x dtype": (
        '"attention", "acme", capabilities={"dtype": OneOf("float16")}',
        ["attention=acme"],
        "attention=acme needs dtype to be float16, got float32 (default on a CPU); way out: dtype=float16 or " + ATTENTION,
    ),
    "attention x device": (
        '"attention", "acme", capabilities={"device": OneOf("cuda")}',
        ["attention=acme"],
        f"attention=acme needs device to be cuda, got cpu (device=cpu); way out: {ATTENTION}",
    ),
    "attention x head size": (
        '"attention", "acme", capabilities={"head_size": OneOf(64, 128)}',
        ["attention=acme"],
        f"attention=acme needs the model's head size to be 64 or 128, got 16 (of the model); way out: {ATTENTION}",
    ),
    "attention x graphs": (
        '"attention", "acme", capabilities={"graphs": OneOf(True)}',
        ["attention=acme", "graphs=off"],
        f"attention=acme needs graphs to be on, got off {LINE}; way out: graphs=auto or {ATTENTION}",
    ),
    "attention x overlap": (
        '"attention", "acme", capabilities={"overlap": OneOf(0)}',
        ["attention=acme", "overlap=1"],
        f"attention=acme needs overlap to be 0, got 1 {LINE}; way out: overlap=auto or {ATTENTION}",
    ),
    "attention x model": (
        '"attention", "acme", capabilities={"model.hidden_act": OneOf("gelu")}',
        ["attention=acme"],
        f"attention=acme needs the model's hidden_act to be gelu, got none (of the model); way out: {ATTENTION}",
    ),
    "architecture x attention": (
        '"arch", "acme", capabilities={"attention.window": OneOf(True)}',
        ["arch=acme", "attention=sdpa"],
        f"arch=acme needs window of the attention to be on, got none (attention=sdpa, {NAMED}); way out: arch=auto",
    ),
    "sampler x overlap": (
        '"sampler", "acme", capabilities={"overlap": OneOf(0)}',
        ["sampler=acme", "overlap=1"],
        f"sampler=acme needs overlap to be 0, got 1 {LINE}; way out: overlap=auto or sampler=greedy or sampler=gumbel",
    ),
    "sampler x parameter": (
        '"sampler", "acme", capabilities={"sampling.temperature": OneOf(1.0)}',
        ["sampler=greedy", "sampling.temperature=0.5"],
        f"sampler=greedy needs sampling.temperature to be 0, got 0.5 {LINE}; way out: sampling.temperature=0 or sampler=gumbel",
    ),
    "scheduler x what the allocator states": (
        '"scheduler", "acme", capabilities={"kv_allocator.prefix_cache": OneOf(True)}',
        ["scheduler=acme", "kv_allocator=paged"],
        f"scheduler=acme needs prefix_cache of the kv_allocator to be on, got off (kv_allocator=paged, {NAMED}); "
        "way out: kv_allocator=block_hash or scheduler=fcfs or scheduler=mixed",
    ),
    "scheduler x allocator": (
        '"scheduler", "acme", capabilities={"kv_allocator": OneOf("block_hash")}',
        ["scheduler=acme", "kv_allocator=paged"],
        f"scheduler=acme needs kv_allocator to be block_hash, got paged {LINE}; "
        "way out: kv_allocator=block_hash or scheduler=fcfs or scheduler=mixed",
    ),
    "allocator x scheduler": (
        '"kv_allocator", "acme", settings=KVSettings, capabilities={"scheduler": OneOf("mixed")}',
        ["kv_allocator=acme"],
        f"kv_allocator=acme needs scheduler to be mixed, got fcfs {DEFAULT}; "
        "way out: scheduler=mixed or kv_allocator=block_hash or kv_allocator=paged",
    ),
    "scheduler x load": (
        '"scheduler", "acme", capabilities={"load.labels": Includes("client", "shoe_size")}',
        ["scheduler=acme", "task=bench"],
        "scheduler=acme needs the labels of the load to include client and shoe_size, got client, deadline, "
        "expected_tokens, priority (load=offline, default); way out: scheduler=fcfs or scheduler=mixed",
    ),
    "scheduler x limit": (
        '"scheduler", "acme", capabilities={"max_num_seqs": AtLeast(8)}',
        ["scheduler=acme", "max_num_seqs=4"],
        f"scheduler=acme needs max_num_seqs to be at least 8, got 4 {LINE}; "
        "way out: max_num_seqs=8 or scheduler=fcfs or scheduler=mixed",
    ),
    "executor x ranks": (
        '"executor", "acme", capabilities={"tensor_parallel_size": OneOf(1)}',
        ["executor=acme", "tensor_parallel_size=2"],
        f"executor=acme needs tensor_parallel_size to be 1, got 2 {LINE}; way out: tensor_parallel_size=1",
    ),
}


def add(site: Site, *declarations: str) -> None:
    """Components that only declare: none of these tests gets as far as their targets."""
    lines = [f'    yield Component({d}, target="m:X")' for d in declarations]
    site.add("acme", "\n".join(["@hookimpl", "def inferlab_components():", *lines]))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_clash_names_value_limit_and_way_out(site: Site, pair: str) -> None:
    """Who wants what, what it is, who said so, and what to write instead; and what is offered first removes the clash."""
    declaration, given, message = PAIRS[pair]
    add(site, declaration)
    assert reasons(*given)[0].startswith(message) if pair == "executor x ranks" else reasons(*given) == [message]
    if way := message.partition("way out: ")[2].partition(" or ")[0]:
        setting, _, value = way.partition("=")
        r = resolved(*[o for o in given if o.partition("=")[0] != setting], way)
        assert setting not in r.choices or value in (r.choices[setting].component.name, "auto")


NEEDS = (
    '"attention", "acme", capabilities={"block_size": MultipleOf(48)}',
    '"scheduler", "acme", capabilities={"kv_allocator.prefix_cache": OneOf(True)}',
    '"sampler", "acme", capabilities={"overlap": OneOf(0)}',
    '"executor", "acme", capabilities={"tensor_parallel_size": OneOf(1)}',
)
ALL = (
    *("scheduler=acme", "kv_allocator=paged", "attention=acme", "kv_allocator.block_size=64", "sampler=acme", "overlap=1"),
    *("executor=acme", "tensor_parallel_size=2", "max_model_len=99999"),
)
OFFENDED = ("max_model_len=99999 ", "scheduler=acme ", "attention=acme ", "sampler=acme ", "executor=acme ")


def test_all_clashes_come_together(site: Site) -> None:
    """Slots, settings and limits: one message."""
    add(site, *NEEDS)
    texts = reasons(*ALL)
    assert [t for t in texts if not t.startswith(OFFENDED)] == [] and len(texts) == len(OFFENDED)


def test_a_device_that_is_not_there_is_one_reason_of_many(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    add(site, *NEEDS)
    monkeypatch.setattr(machine, "has_driver", lambda: False)
    first, *others = reasons("device=cuda:1", "scheduler=acme", "kv_allocator=paged")
    assert first == "device=cuda:1: this machine has no driver of a GPU; use device=auto or device=cpu"
    assert len(others) == 1 and others[0].startswith("scheduler=acme needs prefix_cache")
    with pytest.raises(ValueError, match=r"device must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        machine.pick("gpu")
    assert machine.pick("auto") == machine.pick("cpu") == "cpu"


def test_auto_finds_what_another_slot_needs(site: Site) -> None:
    """attention=auto takes none that clashes with what is chosen; nobody need know the pair."""
    add(
        site,
        '"arch", "acme", capabilities={"attention.window": OneOf(True)}',
        '"attention", "ring", provides={"window": True, "auto_rank": -5}',
    )
    assert resolved("arch=llama").choices["attention"].component.name == "sdpa"
    assert resolved("arch=acme").choices["attention"].component.name == "ring"
    assert reasons("arch=acme", "attention=sdpa")[0].endswith("way out: attention=ring or arch=auto")


def test_a_load_with_the_labels_is_offered(site: Site) -> None:
    """Labels are asked for in a benchmark only: from Python, each request brings its own."""
    add(site, '"scheduler", "acme", capabilities={"load.labels": Includes("client", "deadline")}')
    (site.path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n')
    trace = ["scheduler=acme", "task=bench", "load=trace", f"load.file={site.path}/trace.jsonl"]
    assert resolved("scheduler=acme", "load.labels=[]").choices["scheduler"].component.name == "acme"
    (reason,) = reasons(*trace)
    assert "include client and deadline, got deadline, expected_tokens, priority (load=trace, from the command" in reason
    assert "way out: load=batch16 or load=bimodal or load=clients or scheduler=fcfs" in reason
    (reason,) = reasons(*trace[:2], "load.labels=[client]")
    assert "got client (load=offline, from the command line); way out: load.labels=[client,deadline] or sched" in reason
    assert resolved("scheduler=acme", "task=bench").choices["scheduler"].component.name == "acme"


def test_torch_is_not_loaded_for_a_clash(site: Site) -> None:
    """On the command line and from Python: nothing heavy is imported before the configuration is known to be possible."""
    add(site, *NEEDS)
    code = (
        "import sys; from core.cli import main; from core.llm import LLM\n"
        f"assert main({['model=tiny-llama', 'device=cpu', *ALL]!r}) == 1\n"
        "try: LLM('tiny-llama', attention='flash', device='cpu')\n"
        "except ValueError as error: print(error)\n"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    path = f"{site.path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=site.path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and "attention=flash needs device to be cuda" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "error: this configuration cannot run:" and len(lines) == 1 + len(OFFENDED)


def test_a_capability_under_an_unknown_key_is_refused(site: Site) -> None:
    """It would never be checked."""
    add(site, '"scheduler", "acme", capabilities={"blok_size": OneOf(1)}')
    assert "nothing is known as 'blok_size'" in site.discover().failed["acme"]
    assert "did you mean block_size?" in site.discover().failed["acme"]
    assert unknown_keys(["block_size", "sampling.x", "model.y", "attention.z", "arch", "load.labels", "load.size", "x.y"]) == [
        "load.size",
        "x.y",
    ]


def test_constraints_and_words() -> None:
    assert Includes("a").ok(("a", "b")) and not Includes("a", "c").ok(["a", "b"]) and not Includes("a").ok(None)
    assert str(Includes("a", "b")) == "a collection with a and b"
    assert not AtLeast(2).ok(None) and not MultipleOf(2).ok("4") and OneOf(None).ok(None)
    assert (show(None), show(()), show(["x", True]), show(OneOf(0, None))) == ("none", "none", "x, on", "0 or none")
    assert (name_of("attention"), name_of("model.x"), name_of("sampler.y")) == (
        "attention",
        "the model's x",
        "y of the sampler",
    )
