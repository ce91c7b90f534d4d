"""A model that cannot be shared out over the ranks is refused with the numbers, before torch or a weight file is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from core.checkpoint import open_checkpoint
from core.interfaces import ModelArch, NoSettings
from core.shares import RULES, fitting, refused
from plugins.models.entry import SHARES, inferlab_components
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3
from tests.test_checkpoint import PRESETS, folder, needs_model, preset
from tests.test_models import context
from tests.test_parallel_layers import Group, Rank
from tests.test_resolve import reasons

ROOT = Path(__file__).parent.parent
SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}


def shared_out(ranks: int, **config: Any) -> list[str]:
    """Reasons that are about sharing out."""
    found = reasons(f"tensor_parallel_size={ranks}", "executor=local", **config)
    return [reason for reason in found if "cannot share out" in reason]


def test_value_limit_and_way_out() -> None:
    """Everything that does not fit, in one reason; sizes that do."""
    assert shared_out(2, **SMOLLM2) == [
        "tensor_parallel_size=2 (from the command line) cannot share out fake: num_attention_heads (9) is no multiple of it, "
        "num_key_value_heads (3) is neither a multiple nor a divisor of it; way out: tensor_parallel_size=1 or "
        "tensor_parallel_size=3"
    ]
    assert not shared_out(3, **SMOLLM2)


@pytest.mark.parametrize(
    ("word", "number", "ranks", "text"),
    [
        ("num_attention_heads", 12, 8, "num_attention_heads (12) is no multiple of it"),
        ("num_key_value_heads", 3, 2, "num_key_value_heads (3) is neither a multiple nor a divisor of it"),
        ("num_key_value_heads", 4, 6, "num_key_value_heads (4) is neither a multiple nor a divisor of it"),
        ("intermediate_size", 24, 5, "intermediate_size (24) is no multiple of it"),
        ("vocab_size", 3, 4, "vocab_size (3) leaves a rank without any of it"),
        ("vocab_size", 5, 4, "vocab_size (5) leaves a rank without any of it"),
    ],
)
def test_each_word_by_itself(word: str, number: int, ranks: int, text: str) -> None:
    """The number beside the rule that it breaks."""
    model = {"num_attention_heads": 120, "num_key_value_heads": 120, "intermediate_size": 240, "vocab_size": 1000}
    assert refused(SHARES, model, ranks) == []
    assert refused(SHARES, {**model, word: number}, ranks) == [text]
    lacking = {key: value for key, value in model.items() if key != word}
    assert refused(SHARES, lacking, ranks) == [], "what the model does not say is not judged"


@pytest.mark.parametrize(("vocab", "ranks"), [(101, 4), (151936, 7), (49152, 3), (4, 4), (7, 2)])
def test_an_uneven_vocabulary_is_padded(vocab: int, ranks: int) -> None:
    assert refused(SHARES, {"vocab_size": vocab}, ranks) == []


def test_the_built_in_architectures_state_it() -> None:
    stated = {c.name: c.provides["shares"] for c in inferlab_components()}
    assert stated == {"llama": SHARES, "qwen3": SHARES} and set(SHARES.values()) == set(RULES)


@pytest.mark.parametrize("arch", [Llama, Qwen3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate"), [(9, 3, 1536), (12, 2, 24), (40, 8, 17408), (8, 8, 20), (6, 1, 30)]
)
def test_the_layers_refuse_the_same(arch: type[ModelArch], heads: int, kv_heads: int, intermediate: int) -> None:
    """What is stated is what the layers can do: a model is built for a number of ranks if and only if it is accepted."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate}
    words = {**sizes, "hidden_size": 8 * heads, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 500}
    answers = set()
    for ranks in range(1, 17):
        accepted = not refused(SHARES, words, ranks)
        answers.add(accepted)
        where = context(words, parallel=Rank(ranks - 1, Group(ranks)), device=torch.device("meta"))
        if accepted:
            arch(NoSettings(), where)
        else:
            with pytest.raises(ValueError, match=rf"tensor_parallel_size \({ranks}\)"):
                arch(NoSettings(), where)
    assert answers == {True, False}


@pytest.mark.parametrize(("name", "sizes"), [("qwen3-0.6b", [1, 2, 4, 8, 16]), ("qwen3-8b", [1, 2, 4, 8, 16, 32])])
def test_sizes_of_real_models(name: str, sizes: list[int]) -> None:
    config = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    assert isinstance(config, dict) and fitting(SHARES, config["config"]) == sizes


@needs_model
def test_words_of_gguf() -> None:
    """The default model: its numbers come from metadata."""
    assert fitting(SHARES, open_checkpoint(preset("smollm2")).config) == [1, 3]


def test_no_weight_is_read_and_no_torch_imported(tmp_path: Path) -> None:
    """The file of the weights is none: what is said is what does not fit."""
    words: dict[str, Any] = {**SMOLLM2, "num_hidden_layers": 1, "max_position_embeddings": 64}
    path = folder(tmp_path / "m", None, generation=None, **words)
    (path / "model.safetensors").write_bytes(b"none")
    given = [f"model={path}", "device=cpu", "tensor_parallel_size=2"]
    code = f"import sys; from core.cli import main; code = main({given!r}); print('torch' in sys.modules, code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "num_attention_heads (9) is no multiple of it" in done.stderr and "safetensors" not in done.stderr
    assert done.stdout.split() == ["False", "1"]
