"""From what the user wrote in `model.path` or `model.package` to a path on this machine.

An existing path is used as it is and never touches the network; else ORG/NAME is looked up in the Hugging Face cache and hub.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    *("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def locate(text: str) -> Path:
    """A directory or a .gguf file for `text`: an existing path, else a hub id; ValueError names both readings."""
    path = Path(text).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ValueError(f"model.path={text} is a file, but no .gguf file; give a .gguf file or a Hugging Face directory")
        return path
    if not _HUB_ID.fullmatch(text):
        raise ValueError(
            f"model.path={text} was not found: no such file or directory, and as a hub id it is no ORG/NAME;"
            " give a Hugging Face directory, a .gguf file or ORG/NAME"
        )
    return _from_hub(text)


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"model.path={name}: no such file or directory, and as hub id: the package huggingface_hub is not installed;"
            " pip install huggingface_hub, or give a local path"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_PATTERNS)))
    except (OSError, ValueError) as error:  # what all of the hub's errors derive from
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"model.path={name} was not found: no such file or directory, and as hub id: {type(error).__name__}: {reason};"
            " check the name and the network (HF_HUB_OFFLINE=1 uses the local cache only), or give a local path"
        ) from None


def locate_package(file: str, install: str) -> Path:
    """`file` is PACKAGE/FILE inside an installed Python package, which is not imported."""
    package, _, inner = file.partition("/")
    spec = importlib.util.find_spec(package)
    found = [Path(folder) / inner for folder in (spec.submodule_search_locations or [])] if spec else []
    for path in found:
        if path.exists():
            return path
    what = f"holds no {inner}" if found else "is not installed"
    raise ValueError(
        f"the model comes from the Python package {package}, which {what}: {install or f'pip install {package}'};"
        " or give another model with model.path="
    )
