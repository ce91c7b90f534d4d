"""What FlashAttention finds on this machine. Runs only when flash is chosen; imports torch, none of the packages."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version

from core.interfaces import Probe
from plugins.attention.entry import FLASH_PACKAGES

INSTALL = "pip install 'inferlab[flash]'"


def probe() -> Probe:
    """Names what is missing: a CUDA device, a package, or (in this version) the backend itself."""
    import torch

    provider = next(filter(_find, FLASH_PACKAGES), "")
    missing = []
    if not torch.cuda.is_available():
        missing.append(f"PyTorch {torch.__version__} finds no CUDA device here")
    if not provider:
        missing.append(f"no FlashAttention package is installed (one of {', '.join(FLASH_PACKAGES)}): {INSTALL}")
    if not missing:
        missing.append("this version of inferlab declares the flash backend, but does not contain it yet")
    return Probe(provider, _version(provider), problem="; ".join(missing) + "; or choose attention=sdpa, which runs anywhere")


def _find(name: str) -> ModuleSpec | None:
    """The spec of a dotted module without importing its parents: `vllm` alone takes many seconds."""
    path, spec = None, None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _version(provider: str) -> str:
    try:
        return version(provider.split(".")[0]) if provider else ""
    except PackageNotFoundError:
        return ""
