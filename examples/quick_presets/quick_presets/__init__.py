"""Two presets and nothing else: load=short_chats and +experiment=low_latency."""

from core.interfaces import hookimpl


@hookimpl
def inferlab_presets() -> list[str]:
    return ["quick_presets.conf"]
