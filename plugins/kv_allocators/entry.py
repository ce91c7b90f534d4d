"""Built-in KV allocators."""

from collections.abc import Iterable

from core.interfaces import Component, KVSettings, hookimpl


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="kv_allocator",
        name="block_hash",
        target="plugins.kv_allocators.block_hash:BlockHash",
        settings=KVSettings,
        summary="blocks shared by content: chained hashes, reference counts, lazy invalidation (prefix cache)",
        provides={"prefix_cache": True},
    )
    yield Component(
        kind="kv_allocator",
        name="paged",
        target="plugins.kv_allocators.paged:Paged",
        settings=KVSettings,
        summary="blocks of one request each, nothing shared",
        provides={"prefix_cache": False},
    )
