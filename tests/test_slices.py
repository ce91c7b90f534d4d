"""Each rank reads its own slices of a checkpoint, counted: safetensors and GGUF, and how much of the file comes into memory."""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from core.checkpoint import Checkpoint, open_checkpoint
from core.gguf_file import GGUFFile
from core.interfaces import ModelArch, NoSettings
from core.llm import LLM
from core.sources import rows_moved
from core.weights import load_weights
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3
from tests.test_checkpoint import folder, needs_model, opened, preset
from tests.test_models import context, logits, reference
from tests.test_parallel_layers import Group, Rank, on_ranks

ARCHS = {"llama": (Llama, transformers.LlamaConfig), "qwen3": (Qwen3, transformers.Qwen3Config)}
WORDS = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]


def as_safetensors(path: Path, weights: Mapping[str, Tensor], words: Mapping[str, Any], kind: str) -> Checkpoint:
    """Two shards in bfloat16, with an index."""
    config = {**words, "architectures": [f"{kind.title()}ForCausalLM"]}
    folder(path, **config)
    (path / "model.safetensors").unlink()
    where = {name: f"{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({n: t.bfloat16().contiguous() for n, t in weights.items() if where[n] == file}, str(path / file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return opened(path)


def as_gguf(path: Path, weights: Mapping[str, Tensor], words: Mapping[str, Any], kind: str) -> Checkpoint:
    """Matrices as Q8_0, vectors as F32; rows of Llama's q and k in GGUF's order."""
    path = path.with_suffix(".gguf")
    arch = getattr(gguf.MODEL_ARCH, kind.upper())
    names = gguf.get_tensor_name_map(arch, words["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, kind)
    writer.add_embedding_length(words["hidden_size"])
    writer.add_block_count(words["num_hidden_layers"])
    writer.add_feed_forward_length(words["intermediate_size"])
    writer.add_head_count(words["num_attention_heads"])
    writer.add_head_count_kv(words["num_key_value_heads"])
    writer.add_key_length(words["head_dim"])
    writer.add_value_length(words["head_dim"])
    writer.add_layer_norm_rms_eps(words["rms_norm_eps"])
    writer.add_context_length(words["max_position_embeddings"])
    for name, tensor in weights.items():
        heads = words["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        if kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = tensor.reshape(heads, 2, words["head_dim"] // 2, -1).transpose(1, 2).reshape(tensor.shape)
        theirs, values = names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy()
        assert theirs
        if values.ndim > 1:
            quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(theirs, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return opened(path)


FORMATS = {"safetensors": as_safetensors, "gguf": as_gguf}


def size_of(checkpoint: Checkpoint, shape: tuple[int, ...]) -> int:
    """Bytes that this part of a tensor takes in the file."""
    if not checkpoint.is_gguf:
        return 2 * math.prod(shape)
    return 4 * shape[0] if len(shape) == 1 else shape[0] * -(-shape[1] // BLOCK) * BLOCK_BYTES


def built(arch: type[ModelArch], checkpoint: Checkpoint, parallel: Any, **words: Any) -> ModelArch:
    model = arch(NoSettings(), context({**checkpoint.config, **words}, parallel=parallel))
    load_weights(model, checkpoint)
    return model


def replicated(name: str, size: int, kv_heads: int) -> int:
    """How many ranks hold each element of this tensor."""
    if "norm" in name:
        return size
    return max(size // kv_heads, 1) if ".k_proj." in name or ".v_proj." in name else 1


@pytest.mark.parametrize("kind", ARCHS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("size", "kv_heads"), [(1, 4), (2, 4), (3, 3), (4, 2)])
def test_bytes_read_by_each_rank(tmp_path: Path, kind: str, form: str, size: int, kv_heads: int) -> None:
    """Over all ranks every byte is read once, norms once per rank, KV heads once per copy; and no rank reads another's share.

    A Q8_0 block holds 32 columns: where two ranks share one (o_proj and down_proj on 4 ranks), both read it.
    """
    arch, config = ARCHS[kind]
    words = {**WORDS, "num_key_value_heads": kv_heads}
    weights = reference(config(**words)).state_dict()
    checkpoint = FORMATS[form](tmp_path / "m", weights, words, kind)
    total = 0
    for rank in range(size):
        before = checkpoint.source.bytes_read
        model = arch(NoSettings(), context(checkpoint.config, parallel=Rank(rank, Group(size))))
        taken = {
            name: tuple(len(range(*part.indices(full))) for part, full in zip(piece.take, piece.shape, strict=True))
            for name, piece in model._all_pieces()  # type: ignore[attr-defined]
        }
        load_weights(model, checkpoint)
        got = checkpoint.source.bytes_read - before
        assert got == sum(size_of(checkpoint, shape) for shape in taken.values() if 0 not in shape), f"rank {rank}"
        total += got
    wanted = sum(replicated(name, size, kv_heads) * size_of(checkpoint, tuple(t.shape)) for name, t in weights.items())
    shared = 0
    if form == "gguf" and size == 4:  # 48 columns per rank: of 64 read, 16 belong to a neighbour
        rows = words["hidden_size"] * words["num_hidden_layers"]
        shared = 2 * rows * (4 * size_of(checkpoint, (1, 48)) - size_of(checkpoint, (1, 192)))
    assert total == wanted + shared


@pytest.mark.parametrize("kind", ARCHS)
@pytest.mark.parametrize(("size", "kv_heads"), [(3, 3), (4, 2)])
def test_gguf_slices_hold_the_right_numbers(tmp_path: Path, kind: str, size: int, kv_heads: int) -> None:
    """Rows that the architecture puts back are found where the file has them: ranks give the logits of one."""
    arch, config = ARCHS[kind]
    words = {**WORDS, "num_key_value_heads": kv_heads}
    checkpoint = as_gguf(tmp_path / "m.gguf", reference(config(**words)).state_dict(), words, kind)
    tokens = torch.arange(0, 60, 3)
    wanted = logits(built(arch, checkpoint, Rank(0, Group(1))), tokens)
    assert wanted.std() > 0.05
    copies = [opened(tmp_path / "m.gguf") for _ in range(size)]  # a process each, so a file each
    for got in on_ranks(size, lambda rank: logits(built(arch, copies[rank.rank], rank), tokens)):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@needs_model
def test_a_third_of_the_default_model() -> None:
    """SmolLM2 on 3 ranks: 9 heads, 3 KV heads, Q4_1; a third of the file's tensors each, and the norms."""
    checkpoint = open_checkpoint(preset("smollm2"))
    source = checkpoint.source
    file = source.file  # type: ignore[attr-defined]
    assert isinstance(file, GGUFFile)
    whole = sum(info.size for info in file.tensors.values())
    norms = sum(info.size for name, info in file.tensors.items() if "norm" in name)
    assert whole > 8e7
    for rank in range(3):
        before = source.bytes_read
        built(Llama, checkpoint, Rank(rank, Group(3)))
        read = source.bytes_read - before
        assert read == (whole - norms) / 3 + norms, rank
        assert read < 0.335 * whole


@pytest.mark.parametrize("form", FORMATS)
def test_the_source_counts_what_is_copied(tmp_path: Path, form: str) -> None:
    """`bytes_read` against what numpy or torch hand over, whole and in part: the tests above rest on it."""
    stored = torch.randn(24, 64)
    weights = {"model.embed_tokens.weight": stored, "model.norm.weight": torch.randn(64)}
    words = {**WORDS, "hidden_size": 64}
    checkpoint = FORMATS[form](tmp_path / "m", weights, words, "llama")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    lazy = dict(checkpoint.tensors(shapes, undo=lambda name, tensor: tensor, dtype=torch.float32))
    whole = lazy["model.embed_tokens.weight"][:]
    torch.testing.assert_close(whole, stored, atol=0.05, rtol=0)
    for index in ((slice(3, 9), slice(32, 64)), (slice(0, 24), slice(0, 32)), (slice(5, 6),), (slice(4, 4), slice(0, 64))):
        before = checkpoint.source.bytes_read
        part = lazy["model.embed_tokens.weight"][index]
        assert torch.equal(part, whole[index])
        taken = tuple(part.shape)
        assert checkpoint.source.bytes_read - before == (size_of(checkpoint, taken) if part.numel() else 0)
    assert torch.equal(lazy["model.embed_tokens.weight"][2:5, 7:50], whole[2:5, 7:50]), "columns within blocks"
    norm = weights["model.norm.weight"]
    assert torch.equal(lazy["model.norm.weight"][10:20], (norm if form == "gguf" else norm.bfloat16().float())[10:20])


def test_what_undoing_means() -> None:
    """Moves of whole rows are recognised; anything else is applied to the whole tensor, as it always was."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    moves = {"": lambda n, t: t, "flip": lambda n, t: t.flip(0), "any": lambda n, t: t[order]}
    wanted = {"": torch.arange(24), "flip": torch.arange(23, -1, -1), "any": order}
    for shape in ((24, 64), (24,), (24, 3)):
        for name, undo in moves.items():
            moved = rows_moved(undo, "x", shape)
            assert moved is not None and torch.equal(torch.from_numpy(moved), wanted[name])
    others = {
        "minus one": lambda n, t: t - 1,
        "in place": lambda n, t: t.mul_(2),
        "columns": lambda n, t: t.flip(1),
        "half a turn": lambda n, t: t.roll(32, 1),
        "transposed": lambda n, t: t.T.contiguous(),
        "of that size only": lambda n, t: t[:, torch.arange(64)],
        "pairs of columns": lambda n, t: t.reshape(24, 32, 2).transpose(1, 2).reshape(24, 64),
        "scaled": lambda n, t: t * 0.5,
        "out of range": lambda n, t: t + 31 * 24,
    }
    for name, undo in others.items():
        assert rows_moved(undo, "x", (24, 64)) is None, name


def test_undoing_more_than_a_move(tmp_path: Path) -> None:
    """A slice of a tensor whose columns are turned is the slice of the turned whole."""
    stored = torch.randn(24, 64)
    weights = {"model.embed_tokens.weight": stored, "model.norm.weight": torch.ones(64)}
    checkpoint = as_gguf(tmp_path / "m.gguf", weights, WORDS, "llama")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    lazy = dict(checkpoint.tensors(shapes, undo=lambda n, t: t.flip(-1) * 2, dtype=torch.float32))
    part = lazy["model.embed_tokens.weight"][4:7, 0:32]
    torch.testing.assert_close(part, stored.flip(-1)[4:7, 0:32] * 2, atol=0.1, rtol=0)


def test_a_stored_head_is_compared_once_over_all_ranks(tmp_path: Path) -> None:
    """A tied checkpoint that stores its head: each rank compares its share of the rows, and one of them sees a difference."""
    from core.checkpoint import ModelSettings

    embedding = torch.randn(101, 8)
    head = embedding.clone()
    path = folder(tmp_path / "m", {"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tie_word_embeddings=True)
    wanted = {"model.embed_tokens.weight": (101, 8)}
    reads = []
    for rank in range(3):
        checkpoint = open_checkpoint(ModelSettings(path=str(path)))
        assert checkpoint.shapes(wanted, (rank, 3))[1] == set()
        reads.append(checkpoint.source.bytes_read)
    assert sum(reads) == 2 * embedding.nbytes and max(reads) <= 2 * 34 * 8 * 4
    head[50, 3] += 1
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, str(path / "model.safetensors"))
    seen = [bool(open_checkpoint(ModelSettings(path=str(path))).shapes(wanted, (rank, 3))[1]) for rank in range(3)]
    assert seen == [False, True, False]


def resident(path: Path) -> int:
    """Bytes of this file that are mapped into the process and present."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")
@pytest.mark.parametrize("form", FORMATS)
def test_pages_of_the_file(tmp_path: Path, form: str) -> None:
    """Not only what is copied: three quarters of the file never enter the process, give or take pages of 2 MB at the ends."""
    shape, margin = (8192, 2048), 1 << 22
    weights = {"model.embed_tokens.weight": torch.zeros(shape), "model.norm.weight": torch.ones(64)}
    checkpoint = FORMATS[form](tmp_path / "m", weights, WORDS, "llama")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    path = Path(checkpoint.source.files[0])
    whole = size_of(checkpoint, shape)
    lazy = dict(checkpoint.tensors(shapes, undo=lambda n, t: t, dtype=torch.float32))
    gc.collect()
    before = resident(path)
    lazy["model.embed_tokens.weight"][2048:4096, 0:2048].sum()
    seen = resident(path) - before
    assert seen >= whole / 4 - 8192, "the counter does not see this mapping"
    assert seen <= whole / 4 + margin < whole / 2, f"{seen} of {whole} bytes"


def test_the_engine_reports_it(tmp_path: Path) -> None:
    """Bytes that this rank read, beside what start-up found."""
    weights = reference(transformers.LlamaConfig(**WORDS)).state_dict()
    path = tmp_path / "m"
    as_safetensors(path, weights, WORDS, "llama")
    with LLM(str(path), max_model_len=64, cpu_threads=1, device="cpu") as llm:
        assert llm.engine.executor.report()["weight_bytes_read"] == 2 * sum(tensor.numel() for tensor in weights.values())
