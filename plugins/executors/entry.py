"""Built-in executors."""

from collections.abc import Iterable

from core.interfaces import AtLeast, Component, OneOf, hookimpl


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="executor",
        name="local",
        target="plugins.executors.local:Local",
        summary="one rank in this process",
        capabilities={"tensor_parallel_size": OneOf(1)},
    )
    yield Component(
        kind="executor",
        name="workers",
        target="plugins.executors.workers:Workers",
        summary="tensor-parallel ranks, a process each; of several machines under torchrun",
        capabilities={"tensor_parallel_size": AtLeast(2)},
    )
