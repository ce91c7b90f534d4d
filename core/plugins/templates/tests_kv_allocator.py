"""The contract of a KV allocator, and what this one promises beyond it."""

from __future__ import annotations

from core.interfaces import HostContext, Limits
from core.plugins.templates.kv_allocator import MyPluginAllocator, Settings
from core.testing import AllocatorSuite

OFTEN, ONCE = [1, 1], [2, 2]  # tokens of one block each


class TestContract(AllocatorSuite):
    name = "my-plugin"


def is_kept(tokens: list[int], memory: int) -> bool:
    """Of two blocks, the older one was shared by three requests, the newer one by nobody; a stranger needs the room of one."""
    kv = MyPluginAllocator(Settings(memory=memory), HostContext(Limits(4, 64, 64), 2, 2, lambda: 0.0))
    for content, holders in ((OFTEN, 3), (ONCE, 1)):
        blocks = kv.allocate(1)
        assert blocks is not None
        kv.publish(content, blocks, 0, [])
        for _ in range(holders - 1):
            assert kv.allocate(0, kv.match(content, [])) == blocks
        for _ in range(holders):
            kv.free(blocks)
    assert kv.allocate(1) is not None
    return bool(kv.match(tokens, []))


def test_the_least_used_goes_first() -> None:
    assert is_kept(OFTEN, memory=8) and not is_kept(ONCE, memory=8)


def test_without_memory_the_longest_unused_goes_first() -> None:
    assert is_kept(ONCE, memory=0) and not is_kept(OFTEN, memory=0)
