"""attention=flash without a GPU: which package is chosen and why, and what each adapter hands to its package.

The packages are stand-ins (see flash_fakes) that check their arguments and compute by definition.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core import device, machine
from core.checkpoint import Checkpoint
from core.config import compose
from core.interfaces import KVSpec, MultipleOf, OneOf, Prologue
from core.prologue import apply_prologue
from core.resolve import CapabilityError, describe, resolve
from core.sources import RandomSource
from plugins.attention import flash_choice
from plugins.attention.entry import FLASH_PACKAGES, FlashSettings
from plugins.attention.flash import Flash
from plugins.attention.flash_choice import PROVIDERS, choose
from plugins.attention.flash_probe import probe
from plugins.attention.flash_providers import SPLIT_TOKENS, UpTo
from plugins.attention.reference import Reference
from plugins.models.common.rope import rope_table
from tests import flash_fakes as fakes
from tests.test_attention import NONE, make_batch, packed

torch.set_num_threads(1)
FA3, VLLM, FA2, FA4 = FLASH_PACKAGES
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 8192}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, as far as the choice of packages is concerned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(device, "available_cuda", lambda: 1)
    monkeypatch.setattr(machine, "has_driver", lambda: True)


@pytest.fixture
def packages(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """packages(name, ..., broken=name) installs stand-ins."""
    return lambda *names, **more: fakes.install(tmp_path, monkeypatch, *names, **more)


def build(spec: KVSpec, block_size: int, provider: str = "auto", blocks: int = 0, fused: bool = False) -> Any:
    """A backend whose cache is full of NaN."""
    context = SimpleNamespace(device=torch.device("cpu"), dtype=spec.dtype, block_size=block_size, spec=spec, fused=fused)
    made = Flash(FlashSettings(provider), context)
    if blocks:
        made.allocate(spec, blocks, block_size)
        made.cache.fill_(float("nan"))
    return made


def decode_stand_in(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """In place of the Triton module, which does not run on a CPU."""

    def decode(q, keys, values, table, lens, out, scale, shape, scratch):
        assert out.is_contiguous() and out.shape == q.shape and scratch.rows == len(q) == shape.pairs // keys.shape[1]
        calls.append(scratch)
        cu_q = torch.arange(len(q) + 1, dtype=torch.int32)
        bound = table.shape[1] * keys.shape[2]
        out.copy_(fakes.attend(q, keys.transpose(1, 2), values.transpose(1, 2), cu_q, lens, table, scale, True, 1, bound))

    def shape_for(pairs, size, itemsize, max_kv, processors):
        assert (size, itemsize) == (64, 2) and processors == 132 and max_kv >= 1
        return SimpleNamespace(pairs=pairs, splits=3)

    def make(rows, parts, spec, device):
        assert parts == 3
        return SimpleNamespace(rows=rows)

    module: Any = ModuleType("plugins.attention.kernels.decode")
    module.decode, module.shape_for, module.Scratch = decode, shape_for, SimpleNamespace(make=make)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def steps(rng: np.random.Generator, block_size: int, count: int) -> Iterator[tuple[list[tuple[int, int, list[int]]], int]]:
    """Chunk lists (start, count, blocks) and the number of leading decodes: requests join, continue, and decode."""
    free: list[int] = rng.permutation(np.arange(1, 64)).tolist()
    computed, blocks = [0] * 6, [list[int]() for _ in range(6)]
    for _ in range(count):
        running = [r for r in range(6) if computed[r] and rng.random() < 0.6]
        others = [r for r in range(6) if r not in running and rng.random() < 0.6]
        sizes = [(r, 1) for r in running] + [(r, int(rng.integers(1, 2 * block_size))) for r in others]
        sizes = [(r, n) for r, n in sizes if computed[r] + n <= 8 * block_size] or [(0, 1)]
        leading = next((i for i, (_, n) in enumerate(sizes) if n > 1), len(sizes))
        chunks = []
        for r, n in sizes:
            while len(blocks[r]) * block_size < computed[r] + n:
                blocks[r].append(free.pop())
            chunks.append((computed[r], n, list(blocks[r])))
            computed[r] += n
        yield chunks, leading


CASES = [(FA3, 16, (4, 2)), (FA3, 64, (3, 3)), (VLLM, 16, (3, 3)), (VLLM, 64, (4, 2)), (FA2, 256, (4, 2)), (FA4, 64, (4, 2))]


@pytest.mark.parametrize(("provider", "block_size", "heads"), CASES)
def test_random_steps_equal_the_reference(gpu, packages, monkeypatch, provider, block_size, heads) -> None:
    """B48: decodes, prompts, cached prefixes, mixed; the pool full of NaN, which whole-block loads would spread (FA#2374)."""
    packages(provider)
    decode_stand_in(monkeypatch, [])
    rng, spec = np.random.default_rng(block_size), KVSpec(2, heads[0], heads[1], 64, torch.float16)
    tested = build(spec, block_size, blocks=64)
    plain = Reference(None, SimpleNamespace(device=torch.device("cpu")))
    plain.allocate(spec, 64, block_size)
    seen = set()
    for chunks, leading in steps(rng, block_size, 4 if block_size < 256 else 3):
        batch = dataclasses.replace(make_batch(chunks, block_size, extra_columns=1), num_decodes=leading)
        seen.add((leading > 0, leading < len(chunks)))
        state = tested.plan(batch)
        for layer in range(2):
            q, k, v = (x.half() for x in packed(len(batch.tokens), spec, rng))
            got = tested.forward(layer, q, k, v, batch, state, NONE)
            want = plain.forward(layer, q, k, v, batch, None, NONE)
            assert got.dtype == torch.float16 and got.shape == q.shape
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
    assert (False, True) in seen and (True, True) in seen


@pytest.mark.parametrize(("provider", "block_size"), [(FA3, 16), (VLLM, 64), (FA2, 256), (FA4, 16)])
def test_a_captured_plan_is_refreshed_in_place(gpu, packages, monkeypatch, provider, block_size) -> None:
    """The graph knows addresses: the second plan of a persistent batch changes contents only, and waits for nothing."""
    packages(provider)
    scratches: list[Any] = []
    decode_stand_in(monkeypatch, scratches)
    rng, spec = np.random.default_rng(0), KVSpec(1, 4, 2, 64, torch.float16)
    tested = build(spec, block_size, blocks=8)
    tested.cache.normal_()
    batch = make_batch([(0, 1, [0, 0])] * 3, block_size)
    batch = dataclasses.replace(batch, num_decodes=3, max_kv=2 * block_size)
    state = tested.plan(batch)
    assert state.decodes.kv_lens.data_ptr() == batch.kv_lens.data_ptr() and state.prompts is None and state.stale is None
    extra = state.decodes.extra
    batch.kv_lens[:2] = torch.tensor([block_size + 3, 7])
    batch.block_table[:2] = torch.tensor([[3, 5], [6, 0]])
    batch.kv_slots[:2] = torch.tensor([5 * block_size + 2, 6 * block_size + 6])
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits for the device"))
        assert tested.plan(batch, state) is state
    assert state.decodes.extra is extra
    q, k, v = (x.half() for x in packed(3, spec, rng))
    got = tested.forward(0, q, k, v, batch, state, NONE)
    want = tested.forward(0, q, k, v, batch, tested.plan(batch), NONE)
    assert torch.equal(got, want) and torch.isfinite(got).all()
    if provider == FA4:
        assert scratches[0] is extra[1]


def test_fused_prologue(gpu, packages, monkeypatch) -> None:
    """fusion=on: norm, rotation and stores in the project's kernel, over this cache with heads first."""
    packages(VLLM)
    spec = KVSpec(1, 4, 2, 64, torch.float16)
    prologue = Prologue(torch.rand(64), torch.rand(64), 1e-6, rope_table({"rope_theta": 100.0}, 64, 64, torch.device("cpu")))

    def prologue_store(q, k, v, keys, values, slots, positions, given):
        assert given is prologue and keys.shape[1:] == (2, 16, 64)
        q, k = apply_prologue(q, k, positions, given)
        for slot, key, value in zip(slots.tolist(), k, v, strict=True):
            keys[slot // 16, :, slot % 16], values[slot // 16, :, slot % 16] = key, value
        return q

    module: Any = ModuleType("plugins.attention.kernels.prologue")
    module.prologue_store = prologue_store
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fused, plain = build(spec, 16, blocks=5, fused=True), build(spec, 16, blocks=5)
    assert fused.fuses_prologue and not plain.fuses_prologue
    batch = make_batch([(0, 20, [4, 2]), (0, 3, [1])], 16)
    q, k, v = (x.half() for x in packed(23, spec, np.random.default_rng(0)))
    got = fused.forward(0, q, k, v, batch, fused.plan(batch), prologue)
    turned = apply_prologue(q, k, batch.positions, prologue)
    want = plain.forward(0, *turned, v, batch, plain.plan(batch), prologue)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_kernels_take_what_the_stand_ins_take() -> None:
    """The stand-ins above are called as the project's kernels are: a row's bytes were once given as its size."""
    pytest.importorskip("triton")
    from plugins.attention.kernels.decode import Scratch, decode, shape_for
    from plugins.attention.kernels.prologue import prologue_store

    wanted = {
        decode: "q keys values table lens out scale shape scratch",
        shape_for: "pairs size itemsize max_kv processors",
        Scratch.make: "rows parts spec device",
        prologue_store: "q k v keys values slots positions prologue",
    }
    for function, names in wanted.items():
        assert list(inspect.signature(function).parameters)[: len(names.split())] == names.split()


def test_splits_of_prompts_are_bounded(gpu, packages, monkeypatch) -> None:
    """Split prompts keep float32 results per split: many tokens, short chunks would take gigabytes that nobody counted."""
    packages(VLLM)
    tested = build(KVSpec(1, 2, 2, 64, torch.float16), 16, blocks=64)
    for tokens, splits in ((SPLIT_TOKENS, 0), (SPLIT_TOKENS + 1, 1)):
        share = tested.plan(make_batch([(0, tokens, list(range(1, 50)))], 16)).prompts
        assert share is not None and tested.provider.splits(share) == splits


def test_bytes_second_allocation_and_moves(gpu, packages) -> None:
    """KV bytes per token of Qwen3-0.6B (the golden example); moves in order, a target may be a later source."""
    packages(VLLM)
    assert build(KVSpec(28, 16, 8, 128, torch.bfloat16), 16).block_bytes(KVSpec(28, 16, 8, 128, torch.bfloat16), 1) == 114_688
    spec = KVSpec(3, 2, 2, 64, torch.float16)
    tested = build(spec, 16, blocks=4)
    tested.allocate(spec, 6, 16)
    assert tested.cache.nbytes == 6 * tested.block_bytes(spec, 16)
    tested.cache.normal_()
    want = tested.cache.clone()
    pairs = np.array([[1, 2], [2, 3], [5, 1]], np.int32)
    for source, target in pairs.tolist():
        want[:, :, target] = want[:, :, source].clone()
    tested.move(pairs)
    assert torch.equal(tested.cache, want)


# ---- which package


def test_order_of_preference(gpu, packages) -> None:
    """FA3, the FA3 of vllm, FA2, FA4; what else is there is named as untested."""
    packages(*FLASH_PACKAGES)
    assert [p.name for p in PROVIDERS] == list(FLASH_PACKAGES)
    found = probe()
    assert (found.provider, found.problem) == (FA3, "")
    assert found.version == (
        "3.0.0b1 (FlashAttention-3; this adapter was never tried on a GPU; untested: vllm.vllm_flash_attn 0.24.0, not needed, "
        "flash_attn 2.8.3, not needed, flash_attn.cute 4.0.0, not needed)"
    )


def test_a_broken_package_gives_way_to_the_next(gpu, packages) -> None:
    """Binaries built for another torch are common; auto goes on and says so."""
    packages(FA3, VLLM, broken=FA3)
    found = probe()
    assert found.provider == VLLM
    assert found.version == (
        "0.24.0 (FlashAttention-3; untested: flash_attn_interface 3.0.0b1: cannot be imported: OSError: libcudart.so not found)"
    )


def test_a_named_package_runs_or_fails(gpu, packages) -> None:
    packages(FA3, VLLM, FA2, broken=FA3)
    assert choose(FA2, (9, 0)).provider.name == FA2
    with pytest.raises(ValueError, match=r"can run here: flash_attn_interface 3\.0\.0b1: cannot be imported"):
        choose(FA3, (9, 0))
    assert "no FlashAttention package is installed (flash_attn.cute)" in probe(FlashSettings(FA4)).problem
    with pytest.raises(ValueError, match=r"attention\.provider must be auto or flash_attn_interface or .*got 'fa3'"):
        FlashSettings("fa3")


def test_a_named_package_wants_its_own_block_size(gpu, packages) -> None:
    """What the probe found holds for the package of auto; another one checks for itself."""
    packages(VLLM, FA2)
    spec = KVSpec(1, 4, 2, 64, torch.float16)
    assert build(spec, 64).kind.name == VLLM
    with pytest.raises(ValueError, match=r"flash_attn \(FlashAttention-2\) needs block_size to be a multiple of 256, got 64; "):
        build(spec, 64, FA2)


@pytest.mark.parametrize(
    ("capability", "names", "chosen"),
    [((8, 0), (VLLM, FA2), FA2), ((10, 0), (VLLM, FA4), FA4), ((9, 0), (FA2, FA4), FA2), ((12, 0), (FA3, FA2), FA2)],
)
def test_the_gpu_decides(gpu, packages, monkeypatch, capability, names, chosen) -> None:
    packages(*names)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert probe().provider == chosen


@pytest.mark.parametrize(
    ("cuda", "capability", "names", "texts"),
    [
        (False, None, (), ("finds no CUDA device here", "no FlashAttention package", "pip install 'inferlab[flash]'")),
        (False, None, (VLLM,), ("finds no CUDA device here",)),
        (True, (9, 0), (), ("no FlashAttention package is installed", "pip install 'inferlab[flash]'")),
        (True, (7, 5), (VLLM, FA2), ("FlashAttention-3 needs a GPU of compute capability 9.x, this one has 7.5", "8.x or 9.x")),
    ],
)
def test_the_probe_names_what_is_missing(packages, monkeypatch, cuda, capability, names, texts) -> None:
    """The truth about this machine, and the way out."""
    packages(*names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = probe()
    assert found.provider == "" and found.problem.endswith("or choose attention=sdpa, which runs anywhere")
    assert all(text in found.problem for text in texts)
    assert cuda or names == () or "installed" not in found.problem


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch) -> None:
    """Looking for vllm.vllm_flash_attn must not run vllm/__init__.py (many seconds), nor fail where it is broken."""
    (tmp_path / "heavy" / "inner").mkdir(parents=True)
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "heavy" / "inner" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("heavy", "heavy.inner", "heavy.other", "absent", "absent.inner")
    assert [name for name in names if flash_choice.find(name)] == ["heavy", "heavy.inner"]


# ---- through the capability check of the core


def resolved(*overrides: str, **config: Any):
    composed = compose(["device=cuda", "attention=flash", *overrides])
    checkpoint = Checkpoint({**LLAMA, "torch_dtype": "bfloat16", **config}, "LlamaForCausalLM", False, "fake", RandomSource(0))
    return resolve(composed, checkpoint, composed.registry)


def test_what_the_probe_found_replaces_the_declaration(gpu, packages) -> None:
    """Declared is a multiple of 256 (FA2); FA3 takes 64. The package and its version are printed and recorded."""
    packages(VLLM)
    r = resolved("kv_allocator.block_size=64")
    assert (r.block_size, r.dtype) == (64, "bfloat16")
    text, record = describe(r)
    assert "vllm.vllm_flash_attn 0.24.0 (FlashAttention-3)" in text
    assert record["attention"]["provider"] == VLLM and record["attention"]["provider_version"] == "0.24.0 (FlashAttention-3)"
    assert record["attention"]["settings"] == {"provider": "auto"}


def test_fa4_says_whose_decode_kernel_runs(gpu, packages) -> None:
    packages(FA4)
    assert (
        "flash_attn.cute 4.0.0 (FlashAttention-4 for prompts, the project's own Triton kernel for decodes"
        in (describe(resolved())[0])
    )


@pytest.mark.parametrize(
    ("package", "overrides", "config", "text"),
    [
        (VLLM, ("dtype=float32",), {}, "needs dtype to be bfloat16 or float16, got float32 (from the command line)"),
        (VLLM, (), {"head_dim": 320}, "needs the model's head size to be a multiple of 8, at most 256, got 320 (of the model)"),
        (FA2, ("kv_allocator.block_size=64",), {}, "needs kv_allocator.block_size to be a multiple of 256, got 64"),
        (VLLM, ("kv_allocator.block_size=40",), {}, "needs kv_allocator.block_size to be a multiple of 16, got 40"),
        (FA4, (), {"head_dim": 80}, "needs the model's head size to be 64 or 96 or 128, got 80 (of the model)"),
    ],
)
def test_refusals_have_a_way_out(gpu, packages, package, overrides, config, text) -> None:
    """B42: float32, head sizes and block sizes, before anything is loaded."""
    packages(package)
    with pytest.raises(CapabilityError) as caught:
        resolved(*overrides, **config)
    (reason,) = caught.value.reasons
    assert f"attention=flash {text}" in reason and "way out: " in reason and "attention=sdpa" in reason


def test_a_bounded_multiple() -> None:
    size = UpTo(8, 256)
    assert [n for n in (0, 8, 12, 256, 264) if size.ok(n)] == [8, 256]
    assert isinstance(size, MultipleOf) and not OneOf(64).ok(80)
