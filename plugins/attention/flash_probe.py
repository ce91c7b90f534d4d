"""What FlashAttention finds on this machine. Runs only when flash is chosen, and imports the package that would do the work."""

from __future__ import annotations

from core.interfaces import Probe
from plugins.attention.entry import FlashSettings
from plugins.attention.flash_choice import choose, installed

INSTEAD = "or choose attention=sdpa, which runs anywhere"


def probe(settings: FlashSettings | None = None) -> Probe:
    """The package with its capabilities, or all that is missing: a CUDA device, a package, one that fits this GPU."""
    import torch

    wanted = settings.provider if settings else "auto"
    problems = [] if torch.cuda.is_available() else [f"PyTorch {torch.__version__} finds no CUDA device here"]
    try:
        if problems:
            installed(wanted)
        else:
            chosen = choose(wanted, torch.cuda.get_device_capability())
            return Probe(chosen.provider.name, chosen.version, chosen.provider.capabilities())
    except ValueError as error:
        problems.append(str(error))
    return Probe(problem="; ".join([*problems, INSTEAD]))
