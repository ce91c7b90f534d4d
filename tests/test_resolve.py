"""What fills each slot, with which values; every reason at once, each with a way out."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from core import machine
from core.checkpoint import Checkpoint
from core.config import compose
from core.interfaces import HostContext, Limits
from core.negotiate import Fact, Part, negotiate
from core.plugins import Registry, discover
from core.plugins.loading import find
from core.resolve import CapabilityError, Resolved, describe, resolve
from core.sources import RandomSource
from tests.plugins_fixtures import Site

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8192}


def resolved(*overrides: str, architecture: str = "LlamaForCausalLM", gguf: bool = False, **config: Any) -> Resolved:
    composed = compose(["device=cpu", *overrides])
    checkpoint = Checkpoint({**LLAMA, **config}, architecture, gguf, "fake", RandomSource(0))
    return resolve(composed, checkpoint, composed.registry)


def reasons(*overrides: str, **more: Any) -> list[str]:
    with pytest.raises(CapabilityError) as caught:
        resolved(*overrides, **more)
    return caught.value.reasons


def test_defaults_on_a_cpu() -> None:
    r = resolved()
    assert {kind: c.component.name for kind, c in r.choices.items()} == {
        "scheduler": "fcfs",
        "kv_allocator": "block_hash",
        "attention": "sdpa",
        "arch": "llama",
        "sampler": "gumbel",
        "executor": "local",
    }
    assert r.limits == Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    assert (r.device, r.dtype, r.block_size, r.overlap, r.graphs, r.notes) == ("cpu", "float32", 16, 0, False, ())
    assert r.choices["kv_allocator"].settings.block_size == 16
    assert r.choices["scheduler"].reason == "default"
    assert r.choices["attention"].reason.startswith("auto: ")


def test_values_that_give_way_say_so() -> None:
    """Only those left open; each with a line for the user."""
    assert resolved(max_position_embeddings=1000).limits.max_model_len == 1000
    assert resolved(max_position_embeddings=1000).notes == (
        "max_model_len lowered from 4096 to 1000 (max_position_embeddings of the model)",
    )
    lowered = resolved("max_num_batched_tokens=32")
    assert lowered.limits.max_num_seqs == 32 and "max_num_seqs lowered from 64 to 32" in lowered.notes[0]
    raised = resolved("max_num_seqs=3000")
    assert raised.limits.max_num_batched_tokens == 3000 and "max_num_batched_tokens raised" in raised.notes[0]
    assert "note: max_num_batched_tokens raised" in describe(raised)[0]


def test_explicit_values_never_change() -> None:
    (reason,) = reasons("max_num_seqs=40", "max_num_batched_tokens=32")
    assert "max_num_batched_tokens=32 (from the command line) is less than max_num_seqs=40" in reason
    (reason,) = reasons("max_model_len=9000")
    assert "max_model_len=9000 (from the command line) is more than the model's max_position_embeddings 8192" in reason
    assert resolved("max_model_len=9000", max_position_embeddings=None).limits.max_model_len == 9000
    assert resolved("kv_allocator.block_size=7", "overlap=1", "num_kv_blocks=5").block_size == 7
    assert resolved("overlap=1").overlap == 1


def test_flash_on_a_cpu_says_all_that_is_missing() -> None:
    """A known option everywhere; never another one in its place."""
    text = "\n".join(reasons("attention=flash", "kv_allocator.block_size=64"))
    assert "attention=flash needs device to be cuda, got cpu (device=cpu); way out: attention=sdpa" in text
    assert "attention=flash needs dtype to be bfloat16 or float16, got float32 (default on a CPU)" in text
    assert "needs kv_allocator.block_size to be a multiple of 256, got 64 (from the command line)" in text
    assert "way out: kv_allocator.block_size=auto or attention=sdpa" in text


def test_graphs_on_a_cpu() -> None:
    assert "graphs=on needs a GPU, got device cpu" in reasons("graphs=on")[0]
    assert resolved("enforce_eager=true").graphs is False


def test_parameters_that_a_sampler_refuses() -> None:
    """Only a temperature that was given counts: greedy is argmax for defaults."""
    assert resolved("sampler=greedy").choices["sampler"].component.name == "greedy"
    (reason,) = reasons("sampler=greedy", "sampling.temperature=0.5")
    assert "sampler=greedy needs sampling.temperature to be 0, got 0.5 (from the command line)" in reason
    assert "sampling.temperature=0 or sampler=gumbel" in reason


def test_the_dtype_rule() -> None:
    """B42: float32 on a CPU whatever the checkpoint says, unless it is given."""
    assert resolved(torch_dtype="bfloat16").dtype == "float32"
    assert resolved("dtype=bfloat16").dtype == "bfloat16"


def test_the_architecture() -> None:
    assert resolved(architecture="llama", gguf=True).choices["arch"].component.name == "llama"
    assert resolved("arch=qwen3").choices["arch"].reason == "command line"
    (reason,) = reasons(architecture="LlamaForCausalM")
    assert "no plugin offers the architecture 'LlamaForCausalM' of fake; did you mean LlamaForCausalLM?" in reason
    assert "Qwen3ForCausalLM" in reason and "arch=NAME" in reason


def test_two_plugins_for_one_architecture(site: Site) -> None:
    """Neither is taken silently."""
    site.add(
        "acme",
        """
        @hookimpl
        def inferlab_components():
            yield Component("arch", "mine", "m:X", provides={"architectures": ["LlamaForCausalLM"]})
        """,
    )
    (reason,) = reasons()
    assert "arch=llama (inferlab" in reason and "arch=mine (acme 1.0)" in reason and "choose one" in reason
    assert resolved("arch=mine").choices["arch"].distribution == "acme"


ATTENTION = """
calls = []
def probe(settings):
    calls.append(1)
    return Probe("acme_kernels", "3.2", {{"block_size": MultipleOf(32)}}, {problem!r})
@hookimpl
def inferlab_components():
    yield Component("attention", "acme", "m:X", capabilities={{"block_size": MultipleOf(48)}}, probe="MODULE:probe",
                    provides={{"auto_rank": {rank}}})
"""


def test_a_probe_replaces_capabilities_and_names_the_provider(site: Site) -> None:
    """What depends on the machine is asked for when it is chosen, and recorded."""
    module = site.add("acme", ATTENTION.format(problem="", rank=99))
    r = resolved()
    assert (r.choices["attention"].component.name, r.block_size) == ("acme", 32)
    assert describe(r)[1]["attention"]["provider_version"] == "3.2"
    assert "acme 1.0, acme_kernels 3.2" in describe(r)[0]
    del sys.modules[module].calls[:]  # type: ignore[attr-defined]
    resolved("attention=sdpa")
    assert not sys.modules[module].calls  # type: ignore[attr-defined]


def test_auto_skips_what_cannot_run_here_but_a_name_does_not(site: Site) -> None:
    """P2: chosen by name it is an error, whatever else could do the work."""
    site.add("acme", ATTENTION.format(problem="no such device; buy one", rank=99))
    assert resolved().choices["attention"].component.name == "sdpa"
    assert reasons("attention=acme") == ["attention=acme: no such device; buy one"]


def test_all_reasons_come_at_once(site: Site) -> None:
    site.add("acme", ATTENTION.format(problem="", rank=-1))
    more = "executor=local", "tensor_parallel_size=3", "max_model_len=9000"
    texts = reasons("attention=acme", "kv_allocator.block_size=48", *more)
    assert len(texts) == 4
    assert any("tensor_parallel_size to be 1, got 3" in t for t in texts)
    assert any("num_attention_heads (4) is no multiple" in t for t in texts)


def test_auto_values_satisfy_everybody(site: Site) -> None:
    """Two multiples meet at their least common multiple; two that never meet are both named."""
    site.add("acme", ATTENTION.format(problem="", rank=99))
    allocator = """
        @hookimpl
        def inferlab_components():
            yield Component("kv_allocator", "odd", "m:X", KVSettings, capabilities={"block_size": MultipleOf(24)})
            yield Component("kv_allocator", "one", "m:X", KVSettings, capabilities={"block_size": OneOf(1, 2)})
    """
    site.add("bolt", allocator)
    assert resolved("kv_allocator=odd").block_size == 96
    (reason,) = reasons("kv_allocator=one", "attention=acme")
    assert "no value of kv_allocator.block_size satisfies all" in reason
    assert "kv_allocator=one needs 1 or 2" in reason and "attention=acme needs a multiple of 32" in reason


def test_constraints_on_what_is_left_open_bind_too(site: Site) -> None:
    """A sampler that needs the token on the host: overlap=auto gives way, overlap=1 is refused."""
    site.add(
        "acme",
        """
        @hookimpl
        def inferlab_components():
            yield Component("sampler", "grammar", "m:X", capabilities={"overlap": OneOf(0)})
        """,
    )
    registry: Registry = discover()
    parts = [Part(registry.find("sampler", "grammar"), registry.find("sampler", "grammar").component.capabilities)]
    assert negotiate(parts, {}, {"overlap": 1}, lambda *_: []) == ({"overlap": 0}, [])
    assert negotiate(parts, {"overlap": Fact(1, "given")}, {"overlap": 1}, lambda *_: [])[1]
    (reason,) = reasons("sampler=grammar", "overlap=1")
    assert reason.startswith("sampler=grammar needs overlap to be 0, got 1 (from the command line); way out: overlap=auto")


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults there; graphs=auto is on where the attention backend takes graphs (sdpa, without triton, does not)."""
    monkeypatch.setattr(machine, "pick", lambda name: "cuda:1")
    r = resolved(torch_dtype="float16")
    assert r.limits == Limits(max_num_seqs=512, max_num_batched_tokens=16384, max_model_len=4096)
    assert (r.device, r.dtype, r.overlap) == ("cuda:1", "float16", 1)
    assert r.graphs == r.fused == (r.choices["attention"].component.name == "triton") == (find("triton") is not None)
    assert resolved("attention=sdpa").graphs is False and resolved("fusion=off").fused is False
    assert resolved().dtype == "bfloat16"


def test_workers_use_what_the_parent_resolved(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: pickled without the registry, built without discovery."""
    sent = pickle.dumps(resolved("scheduler=mixed"))
    assert len(sent) < 20_000
    monkeypatch.setattr("core.plugins.survey", None)
    received = pickle.loads(sent)
    assert received.registry is None
    scheduler = received.build("scheduler", HostContext(received.limits, 16, 8, lambda: 0.0))
    assert type(scheduler).__name__ == "Mixed"


def test_the_parent_builds_through_the_hook(site: Site) -> None:
    site.add(
        "acme", "@hookimpl(wrapper=True)\ndef inferlab_build(kind):\n    part = yield\n    part.timed = kind\n    return part\n"
    )
    r = resolved()
    assert r.build("scheduler", HostContext(r.limits, 16, 8, lambda: 0.0)).timed == "scheduler"
