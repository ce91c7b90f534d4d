"""GGUF metadata in the words of config.json, and GGUF tensor names in those of Hugging Face.

Nothing is dropped in silence: a rotary scaling that cannot be expressed is refused here, an unknown tensor by core.weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from core.gguf_file import GGUFFile

_ROPE_FACTORS = "rope_freqs.weight"  # one divisor per rotary frequency: how GGUF stores Llama 3's scaling
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_WORDS = {  # config.json's word: GGUF's, after "<architecture>."
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
}
_TOKENS = {"bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id"}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The model's configuration in config.json's words; numbers that GGUF leaves out get the value its readers assume."""
    kind = file.fields.get("general.architecture")
    if not isinstance(kind, str):
        raise ValueError(f"{file.path} names no general.architecture; is it a model?")
    given = {key[len(kind) + 1 :]: value for key, value in file.fields.items() if key.startswith(f"{kind}.")}
    missing = [word for word in ("embedding_length", "block_count", "attention.head_count") if word not in given]
    if missing or "token_embd.weight" not in file.tensors:
        absent = [f"{kind}.{word}" for word in missing] or ["token_embd.weight"]
        raise ValueError(f"{file.path} is no language model that can be run: it lacks {', '.join(absent)}")
    config: dict[str, Any] = {word: given[theirs] for word, theirs in _WORDS.items() if theirs in given}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    _check_uniform(file, kind, config)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    # The file stores a float32: 9.999999747378752e-06 was 1e-05 in config.json.
    config["rms_norm_eps"] = float(f"{config.get('rms_norm_eps', 1e-6):.6g}")
    if given.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ValueError(
            f"{file.path}: keys of {config['head_dim']} and values of {given['attention.value_length']} differ in size"
        )
    if given.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        config["partial_rotary_factor"] = given["rope.dimension_count"] / config["head_dim"]
    return (
        config
        | {
            "model_type": kind,
            "hidden_act": "silu",
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
            "rope_scaling": _rope_scaling(file, given, config),
        }
        | {word: file.fields[key] for word, key in _TOKENS.items() if key in file.fields}
    )


def _check_uniform(file: GGUFFile, kind: str, config: Mapping[str, Any]) -> None:
    """Layers of different sizes are lists in GGUF; no word of config.json's says that."""
    for word, value in config.items():
        if isinstance(value, list):
            raise ValueError(f"{file.path}: {kind}.{_WORDS[word]} differs from layer to layer, which is not supported")


def _rope_scaling(file: GGUFFile, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    kind = given.get("rope.scaling.type", "none")
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = given.get("rope.scaling.original_context_length")
        for ours, theirs in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
            scaling |= {ours: given[f"rope.scaling.{theirs}"]} if f"rope.scaling.{theirs}" in given else {}
    return scaling


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters behind the stored divisors: only `factor` varies between published Llama 3 models."""
    stored = [float(value) for value in file.read(_ROPE_FACTORS)]
    factor = round(max(stored), 4)
    wanted = llama3_divisors(config["rope_theta"], config["head_dim"], factor=factor, **_LLAMA3)
    if len(stored) != len(wanted) or any(abs(a - b) > 1e-3 * b for a, b in zip(stored, wanted, strict=True)):
        raise ValueError(
            f"{file.path}: its {_ROPE_FACTORS} is not the scaling of Llama 3 ({_LLAMA3}), and GGUF does not say which it is;"
            " use the Hugging Face directory of this model (model.path=DIR)"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_divisors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> list[float]:
    """What Llama 3 divides each rotary frequency by: 1 for short waves, `factor` for long ones, smooth between."""
    result = []
    for i in range(0, head_dim, 2):
        turns = original_max_position_embeddings / (2 * math.pi * theta ** (i / head_dim))  # over the original context
        share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        result.append(1.0 / (share + (1 - share) / factor))
    return result


def gguf_names(file: GGUFFile, wanted: Iterable[str]) -> dict[str, str]:
    """Wanted name: its name in this file, where it has one. What stays unmapped here is reported as missing or unexpected."""
    import gguf

    kind = file.fields["general.architecture"]
    by_word = {word: arch for arch, word in gguf.MODEL_ARCH_NAMES.items()}
    if kind not in by_word:
        raise ValueError(f"{file.path}: the installed gguf package does not know the architecture {kind!r}; upgrade it")
    names = gguf.get_tensor_name_map(by_word[kind], file.fields[f"{kind}.block_count"])
    found = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in wanted}
    return {name: theirs for name, theirs in found.items() if theirs in file.tensors}


def unused_in_gguf(file: GGUFFile, used: Iterable[str]) -> set[str]:
    """Tensors that no wanted name claims; the rotary divisors were read as configuration."""
    return set(file.tensors) - set(used) - {_ROPE_FACTORS}
