"""The documents: generated pages are current, every hook is described and its example runs, links and names are real."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from core.cli import main
from core.interfaces import Metric, RequestRecord, StepRecord
from core.plugins.checks import HOOKS, KINDS
from tests.plugins_fixtures import Site

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*/README.md")])
HOOK_PAGE = (DOCS / "hooks.md").read_text()
SHORTEST = re.search(r"<!-- plugin: inferlab_shortest.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def script(name: str) -> ModuleType:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_arithmetic_of_ranks_is_current() -> None:
    """Counted on the models again: `python -m docs.generate_tensor_parallel` brings the page up to date."""
    found = script("generate_tensor_parallel")
    assert found.PAGE.read_text() == found.page(), "run python -m docs.generate_tensor_parallel"
    one, two, eight = (found.share("qwen3-14b", n) for n in (1, 2, 8))
    norms = one.weights - 2 * (one.weights - two.weights)
    assert 0 < norms < 0.001 * one.weights and eight.weights == (one.weights - norms) // 8 + norms
    assert (one.reductions, two.reductions, two.width) == (0, 2 * 40 + 1, 2 * 5120)


def test_contract_pages_are_current() -> None:
    """One per kind, written from core/interfaces.py: `python docs/generate_contracts.py` brings them up to date."""
    wanted = script("generate_contracts").pages()
    assert {f"{kind}.md" for kind in KINDS} < wanted.keys()
    assert {path.name for path in (DOCS / "contracts").iterdir()} == wanted.keys()
    for name, text in wanted.items():
        assert (DOCS / "contracts" / name).read_text() == text, f"{name}: run python docs/generate_contracts.py"


def test_contract_pages_hold_what_an_author_needs() -> None:
    """Every abstract method of a contract is marked as required on its page."""
    for kind, base in KINDS.items():
        page = (DOCS / "contracts" / f"{kind}.md").read_text()
        required = set(re.findall(r"\*\*`(\w+)\(.*`\*\* \(required\)", page))
        assert required == getattr(base, "__abstractmethods__"), kind  # noqa: B009, pyright knows no such attribute


def test_every_hook_is_described() -> None:
    """In the table, in a section with its signature, and with an example; and nothing is described that does not exist."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", HOOK_PAGE, re.S | re.M))
    assert list(sections) == HOOKS
    for name, text in sections.items():
        assert f"[`{name}`](#{name})" in HOOK_PAGE
        assert f"`{name}(" in text and re.search(rf"```python\n.*^def {name}\(", text, re.S | re.M), name


def test_signatures_of_hooks() -> None:
    """As core/hooks.py has them."""
    source = (ROOT / "core/hooks.py").read_text()
    for name in HOOKS:
        declared = re.search(rf"^def ({name}\(.*?\) -> .*?):$", source, re.M)
        assert declared and f"`{declared[1]}`" in HOOK_PAGE, name


@pytest.mark.parametrize("record", [StepRecord, RequestRecord, Metric], ids=lambda r: r.__name__)
def test_fields_of_records(record: type) -> None:
    """The hook page explains each that an observer gets or gives, and no other."""
    table = re.search(rf"^\| field of `{record.__name__}` \|.*\n\|---\|---\|\n((?:\|.*\n)+)", HOOK_PAGE, re.M)
    assert table
    named = [name for row in table[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == [f.name for f in fields(record)]


def test_every_hook_is_exercised(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logging_as_before: None
) -> None:
    """The page's examples are one plugin: in a real run each of its hooks is called, and what they add is in the result."""
    blocks = re.findall(r"<!-- plugin: hooks_example -->\n```python\n(.*?)```", HOOK_PAGE, re.S)
    assert {name for block in blocks for name in re.findall(r"^def (inferlab_\w+)", block, re.M)} == set(HOOKS)
    assert SHORTEST
    site.write("hooks_example/__init__.py", "\n\n".join(blocks))
    site.write("hooks_example/shortest.py", SHORTEST[1])
    site.write("hooks_example/conf/__init__.py", "")
    site.write("hooks_example/conf/experiment/short.yaml", "# @package _global_\nsampling:\n  max_tokens: 5\n")
    site.write("hooks_example-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: hooks-example\nVersion: 1.0\n")
    site.write("hooks_example-1.0.dist-info/entry_points.txt", "[inferlab.plugins]\nhooks_example = hooks_example\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["model=tiny-llama", "scheduler=shortest", "+experiment=short", "prompts=[abc,a]", "hydra.run.dir=out"]
    assert main(overrides) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["plugins"]["scheduler"]["distribution"] == "hooks-example"
    assert result["settings"]["sampling"]["max_tokens"] == 5
    metrics = result["metrics"]
    assert metrics["fullest"] == {"value": 2, "unit": "requests", "doc": "most requests that ran in one step"}
    assert 0 < metrics["scheduler_build"]["value"] < 60
    reasons = [output["finish_reason"] for output in result["outputs"]]
    assert sys.modules["hooks_example"].ends == reasons
    assert metrics["stopped"]["value"] == reasons.count("stop")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    """Relative links lead to files, and to headings that are there; paths in backticks are files of this repository."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}, target
    for path in re.findall(r"`((?:core|conf|docs|examples|plugins|benchmarks|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_index_lists_every_page() -> None:
    linked = {(DOCS / name).resolve() for name in re.findall(r"\]\(([^)\s#]+)\)", (DOCS / "index.md").read_text())}
    missing = {str(page.relative_to(ROOT)) for page in PAGES} - {str(p.relative_to(ROOT)) for p in linked}
    assert missing == {"docs/index.md", "CHANGELOG.md"}


SEED_NAMES = """
LLM LLMEngine add_request step is_finished exit generate Config model max_num_batched_tokens max_num_seqs max_model_len
gpu_memory_utilization tensor_parallel_size enforce_eager hf_config eos kvcache_block_size num_kvcache_blocks SamplingParams
temperature max_tokens ignore_eos Sequence SequenceStatus seq_id token_ids num_tokens num_prompt_tokens last_token
num_cached_tokens num_scheduled_tokens block_table is_prefill num_blocks last_block_num_tokens __getstate__ Scheduler waiting
running schedule preempt postprocess BlockManager Block block_id ref_count hash free_block_ids used_block_ids hash_to_block_id
compute_hash can_allocate allocate deallocate _deallocate_block can_append may_append hash_blocks ModelRunner run warmup_model
allocate_kv_cache prepare_prefill prepare_decode prepare_sample run_model capture_cudagraph graph_pool SharedMemory call loop
read_shm write_shm init_process_group Context set_context reset_context cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k
slot_mapping context_lens block_tables Attention store_kvcache flash_attn_varlen_func flash_attn_with_kvcache Qwen3ForCausalLM
Qwen3DecoderLayer packed_modules_mapping load_model weight_loader default_weight_loader ColumnParallelLinear
MergedColumnParallelLinear QKVParallelLinear RowParallelLinear VocabParallelEmbedding ParallelLMHead RMSNorm add_rms_forward
SiluAndMul RotaryEmbedding apply_rotary_emb get_rope Sampler example.py bench.py block_size num_gpu_blocks append_token swapped
RUNNING_PREFILL RUNNING_DECODE execute_model _load_sharded_model ExecutionContext cuda_graphs static_inputs static_outputs
TTFT TPOT goodput
"""


def test_the_seeds_are_mapped() -> None:
    """Every class and setting of both descriptions is in the page, and every place that it names exists."""
    page = (DOCS / "from_nano_vllm.md").read_text()
    left = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    words = set(re.findall(r"[\w.]+", " ".join(left))) | {w for text in left for w in re.findall(r"\w+", text)}
    assert not [name for name in SEED_NAMES.split() if name not in words]
    places = re.findall(r"`((?:core|plugins)/[\w/]+\.py):([\w.]+)`", page)
    assert len(places) > 60
    for path, name in places:
        text = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(?:class|def) {part}\b", text, re.M), f"{path}:{name}"
