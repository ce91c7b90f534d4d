"""Tensors of a checkpoint: complete, of the right shape, lazily read, equal to what other readers give."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from core.checkpoint import open_checkpoint
from core.parallel import Solo
from core.weights import load_weights
from tests.test_checkpoint import folder, opened, preset


class Model:
    """Wants tensors of given shapes, and keeps them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.shapes, self.context, self.loaded = shapes, SimpleNamespace(dtype=dtype, parallel=Solo()), {}

    def weights(self):
        return self.shapes

    def from_gguf(self, name, tensor):
        return tensor.flip(0) if "q_proj" in name else tensor

    def load(self, tensors):
        self.loaded = {name: weight[:] for name, weight in tensors}


def loaded(checkpoint, shapes, dtype=torch.float32) -> dict[str, torch.Tensor]:
    model = Model(shapes, dtype)
    load_weights(model, checkpoint)  # type: ignore[arg-type]
    return model.loaded


def shards(path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None):
    folder(path)
    (path / "model.safetensors").unlink()
    for name, tensors in files.items():
        save_file(tensors, str(path / name))
    names = index or {tensor: name for name, tensors in files.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def test_one_file_and_shards(tmp_path):
    """Values arrive unchanged, in the dtype that the engine runs in, from one file or several."""
    a, b = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(5)
    one = opened(folder(tmp_path / "one", {"a": a, "b": b}))
    two = opened(shards(tmp_path / "two", {"x.safetensors": {"a": a}, "y.safetensors": {"b": b}}))
    for checkpoint in (one, two, pickle.loads(pickle.dumps(two))):
        found = loaded(checkpoint, {"a": (4, 3), "b": (5,)})
        assert torch.equal(found["a"], a.float())
        assert torch.equal(found["b"], b)
    assert loaded(one, {"a": (4, 3), "b": (5,)}, torch.bfloat16)["b"].dtype == torch.bfloat16


def test_all_problems_at_once(tmp_path):
    """B35: missing, unexpected and misshapen tensors and the files looked at, in one message; the model stays untouched."""
    checkpoint = opened(folder(tmp_path / "m", {"a": torch.zeros(4, 3), "extra": torch.zeros(1)}))
    model = Model({"a": (3, 4), "b": (5,)})
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        load_weights(model, checkpoint)  # type: ignore[arg-type]
    for text in ("1 missing: b;", "1 unexpected: extra;", "a (wanted (3, 4), got (4, 3))", "model.safetensors"):
        assert text in str(caught.value)
    assert model.loaded == {}


def test_many_missing_are_abbreviated(tmp_path):
    with pytest.raises(ValueError, match=r"30 missing: .* and 22 more"):
        loaded(opened(folder(tmp_path / "m")), {"w": (2,)} | {f"layer.{i}": (1,) for i in range(30)})


def test_twice_in_two_shards(tmp_path):
    """Which of the two would win depends on the order of files: refused with both."""
    files = {"x.safetensors": {"a": torch.zeros(1)}, "y.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}}
    path = shards(tmp_path / "m", files, index={"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(ValueError, match=r"tensor a is in .*x\.safetensors and in .*y\.safetensors"):
        loaded(opened(path), {"a": (1,), "b": (1,)})


def test_damaged_file(tmp_path):
    path = folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        loaded(opened(path), {"w": (2,)})


@pytest.mark.parametrize(("tied", "equal", "fine"), [(True, True, True), (True, False, False), (False, True, False)])
def test_head_that_repeats_the_embedding(tmp_path, tied, equal, fine):
    """Some tied checkpoints store the head too: accepted if it is the embedding, and only where the configuration says tied."""
    embedding = torch.randn(9000, 2)
    head = embedding.clone()
    head[-1, -1] += 0 if equal else 1
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    checkpoint = opened(folder(tmp_path / "m", tensors, tie_word_embeddings=tied))
    shapes = {"model.embed_tokens.weight": (9000, 2)}
    if fine:
        assert list(loaded(checkpoint, shapes)) == list(shapes)
    else:
        with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight"):
            loaded(checkpoint, shapes)


def test_rotary_tables_are_ignored(tmp_path):
    """Old checkpoints carry inv_freq buffers; they are no weights."""
    tensors = {"w": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert list(loaded(opened(folder(tmp_path / "m", tensors)), {"w": (2,)})) == ["w"]


def test_slices_read_only_the_slice(tmp_path):
    """A rank that holds an eighth must not read the whole; indices that are no plain slices still give the right part."""
    whole = torch.randn(6, 4)
    checkpoint = opened(folder(tmp_path / "m", {"w": whole}))
    (_, weight), *_ = checkpoint.tensors({"w": (6, 4)}, undo=lambda name, tensor: tensor, dtype=torch.float32)
    assert weight.shape == (6, 4)
    for index in (..., 3, torch.tensor([0, 5]), slice(None, None, 2)):
        assert torch.equal(weight[index], whole[index])
    where = checkpoint.source._where  # type: ignore[attr-defined]
    where["w"] = SliceOnly(where["w"])
    (_, weight), *_ = checkpoint.tensors({"w": (6, 4)}, undo=lambda name, tensor: tensor, dtype=torch.float32)
    assert torch.equal(weight[2:4], whole[2:4])
    assert torch.equal(weight[:, 1:3], whole[:, 1:3])
    with pytest.raises(AssertionError):
        weight[...]


class SliceOnly:
    """An open safetensors file that refuses to read a tensor as a whole."""

    def __init__(self, file) -> None:
        self.get_slice = file.get_slice

    def get_tensor(self, name):
        raise AssertionError("read as a whole")


def test_random_weights():
    """A tensor depends on seed and name alone: slices on other ranks, other orders and other processes see the same."""
    shapes = {"model.norm.weight": (64,), "a.weight": (300, 200), "a.bias": (200,), "b.weight": (300, 200)}
    settings = preset("tiny-qwen3")
    found = loaded(open_checkpoint(settings, seed=1), shapes)
    assert torch.equal(found["model.norm.weight"], torch.ones(64))
    assert found["a.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(found["a.weight"].mean().item()) < 4e-4
    assert found["a.bias"].std().item() == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(found["a.weight"], found["b.weight"])
    again = dict(open_checkpoint(settings, seed=1).tensors({"a.weight": (300, 200)}, undo=lambda n, t: t, dtype=torch.float32))
    assert torch.equal(again["a.weight"][100:], found["a.weight"][100:])
    assert not torch.equal(loaded(open_checkpoint(settings, seed=2), shapes)["a.weight"], found["a.weight"])


def test_progress_bar_only_on_request(tmp_path, capsys):
    """No bar where stderr is no terminal; asked for, it counts tensors on stderr and nothing goes to stdout."""
    checkpoint = opened(folder(tmp_path / "m"))
    load_weights(Model({"w": (2,)}), checkpoint)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")
    load_weights(Model({"w": (2,)}), checkpoint, progress=True)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading weights" in err
    assert "/1 [" in err
