"""Which FlashAttention package does the work here, and what is known of the others. Imports torch and at most the packages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version

from plugins.attention.flash_providers import FlashAttn2, FlashAttn3, FlashAttn4, Provider, Vllm

PROVIDERS: tuple[type[Provider], ...] = (FlashAttn3, Vllm, FlashAttn2, FlashAttn4)  # in order of preference
INSTALL = "pip install 'inferlab[flash]'"


@dataclass(frozen=True)
class Chosen:
    """The package, and a text for each installed one of which it is not known whether it would run."""

    provider: type[Provider]
    untested: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of the package, with what a reader of the record should know."""
        remarks = [self.provider.label]
        if not self.provider.tried:
            remarks.append("this adapter was never tried on a GPU")
        if self.untested:
            remarks.append(f"untested: {', '.join(self.untested)}")
        return f"{installed_version(self.provider)} ({'; '.join(remarks)})".lstrip()


def choose(wanted: str, capability: tuple[int, int]) -> Chosen:
    """The first package that is installed, made for this GPU, and can be imported. A named one is taken or ValueError says
    why not; so it does if none is left."""
    found, refused = installed(wanted), []
    for at, provider in enumerate(found):
        if why := _refusal(provider, capability):
            refused.append(f"{_label(provider)}: {why}")
        else:
            return Chosen(provider, (*refused, *(f"{_label(p)}, not needed" for p in found[at + 1 :])))
    raise ValueError("no FlashAttention package can run here: " + "; ".join(refused))


def installed(wanted: str) -> list[type[Provider]]:
    """Best first; looks only, imports none of them. ValueError if there is none."""
    candidates = [p for p in PROVIDERS if wanted in ("auto", p.name)]
    found = [p for p in candidates if find(p.marker)]
    if not found:
        names = " or ".join(p.name for p in candidates)
        raise ValueError(f"no FlashAttention package is installed ({names}): {INSTALL}")
    return found


def _refusal(provider: type[Provider], capability: tuple[int, int]) -> str:
    major, minor = capability
    if major not in provider.gpus:
        wanted = " or ".join(f"{n}.x" for n in provider.gpus)
        return f"{provider.label} needs a GPU of compute capability {wanted}, this one has {major}.{minor}"
    try:
        provider.load()
    except Exception as error:  # a broken binary raises whatever it likes; the next package may work
        return f"cannot be imported: {type(error).__name__}: {error}"
    return ""


def _label(provider: type[Provider]) -> str:
    return f"{provider.name} {installed_version(provider)}".rstrip()


def installed_version(provider: type[Provider]) -> str:
    """ "" where the package has no metadata."""
    for name in provider.distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def find(name: str) -> ModuleSpec | None:
    """The spec of a dotted module without importing its parents: some take many seconds."""
    path, spec = None, None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec
