"""Built-in executors."""

from collections.abc import Iterable

from core.interfaces import Component, OneOf, hookimpl


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="executor",
        name="local",
        target="plugins.executors.local:Local",
        summary="one rank in this process",
        capabilities={"tensor_parallel_size": OneOf(1)},
    )
