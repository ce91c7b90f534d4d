"""GGUF metadata in the words of config.json, and GGUF tensor names in those of Hugging Face.

Nothing is dropped in silence: a rotary scaling that cannot be expressed is refused here, an unknown tensor by core.weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from core.gguf_file import GGUFFile

_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # one divisor per rotary frequency: how GGUF stores Llama 3's scaling
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_WAY_OUT = "use the Hugging Face directory of this model (model.path=DIR)"
_ROPE_WORDS = {  # GGUF's word: config.json's in rope_scaling
    "rope.scaling.type": "",
    "rope.scaling.factor": "",
    "rope.scaling.finetuned": "",  # says how the model was made, changes nothing
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
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
    given = {key[len(f"{kind}.") :]: value for key, value in file.fields.items() if key.startswith(f"{kind}.")}
    missing = [f"{kind}.{word}" for word in ("embedding_length", "block_count", "attention.head_count") if word not in given]
    missing += [] if _EMBEDDING in file.tensors else [_EMBEDDING]
    if missing:
        raise ValueError(f"{file.path} is no language model that can be run: it lacks {', '.join(missing)}")
    config = _sizes(file, given) | {
        "model_type": kind,
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    config |= {word: file.fields[key] for word, key in _TOKENS.items() if key in file.fields}
    return config | {"rope_scaling": _rope_scaling(file, given, config)}


def _sizes(file: GGUFFile, given: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {word: given[theirs] for word, theirs in _WORDS.items() if theirs in given}
    for word, value in config.items():
        if isinstance(value, list):
            raise ValueError(f"{file.path}: {_WORDS[word]} differs from layer to layer, which is not supported")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    size = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if given.get("attention.value_length", size) != size:
        raise ValueError(f"{file.path}: keys of {size} and values of {given['attention.value_length']} differ in size")
    if given.get("rope.dimension_count", size) != size:
        config["partial_rotary_factor"] = given["rope.dimension_count"] / size
    if "rms_norm_eps" in config:  # stored as float32: 9.999999747378752e-06 was 1e-05 in config.json
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    return config


def _rope_scaling(file: GGUFFile, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    if unknown := [word for word in given if word.startswith("rope.scaling.") and word not in _ROPE_WORDS]:
        raise ValueError(f"{file.path}: rotary settings {', '.join(unknown)} are not supported; {_WAY_OUT}")
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 0.0))
    kind = given.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    words = {word: given[key] for key, word in _ROPE_WORDS.items() if word and key in given}
    return words | {"rope_type": kind, "factor": factor}


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters behind the stored divisors: only `factor` varies between published Llama 3 models."""
    stored = [float(value) for value in file.read(_ROPE_FACTORS)]
    factor = round(max(stored), 4)
    wanted = llama3_divisors(config["rope_theta"], config["head_dim"], factor=factor, **_LLAMA3)
    if len(stored) != len(wanted) or any(abs(a - b) > 1e-3 * b for a, b in zip(stored, wanted, strict=True)):
        raise ValueError(
            f"{file.path}: its {_ROPE_FACTORS} is not the scaling of Llama 3 ({_LLAMA3}), and GGUF does not say which it is;"
            f" {_WAY_OUT}"
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
