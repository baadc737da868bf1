"""Where a job may run: its affinity first, then what its node says for the case that it is offline."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from comfyfleet.graphs.catalogue import BackendState, Need, WorkflowFacts
from comfyfleet.graphs.model import Fallback, WorkflowNode
from comfyfleet.graphs.runs import Question


class Placed(NamedTuple):
    affinity: str | None  # None: whichever worker asks first


class Nowhere(NamedTuple):
    message: str
    alternatives: tuple[str, ...] = ()


Placement: TypeAlias = Placed | Nowhere | Question


def place(
    node: WorkflowNode,
    workflow: WorkflowFacts,
    need: Need,
    backends: Iterable[BackendState],
    chosen: str | None = None,
    *,
    is_unserved: bool = False,
) -> Placement:
    """A job without affinity waits in the queue: a worker that can run it may come.

    `is_unserved`: it has waited for that long enough.
    """
    affinity = chosen or node.backend_affinity
    backends = tuple(backends)
    if affinity is None and is_unserved:
        message = nobody(workflow)
        asks = node.fallback_strategy == Fallback.ASK_USER
        return Question(message, ()) if asks else Nowhere(message)
    if affinity is None or is_online(affinity, need, backends):
        return Placed(affinity)
    is_there = any(each.is_online and each.is_meant_by(affinity) for each in backends)
    message = f"Backend {affinity} is offline"
    if is_there:
        message = f"Backend {affinity} can't run {workflow.name}"
    others = alternatives(need, backends)
    if node.fallback_strategy == Fallback.ASK_USER:
        return Question(message, others)
    if node.fallback_strategy == Fallback.NONE:
        return Nowhere(message, others)
    if not others:
        wanted = ", ".join(sorted(workflow.required_capabilities)) or workflow.slug
        return Nowhere(f"No backends with capabilities: {wanted}")
    return Placed(others[0])


def is_ours(workflow: WorkflowFacts) -> bool:
    """What a cloud can run is not known here."""
    return workflow.effect is None or workflow.effect.provider == "self_hosted"


def nobody(workflow: WorkflowFacts) -> str:
    needed = ", ".join(sorted(workflow.required_capabilities))
    which = f" (it needs {needed})" if needed else ""
    return f"NoBackendAvailable: no backend can run {workflow.name}{which} at the moment"


def is_online(affinity: str, need: Need, backends: Iterable[BackendState]) -> bool:
    return any(_can_run(each, need) and each.is_meant_by(affinity) for each in backends)


def alternatives(need: Need, backends: Iterable[BackendState]) -> tuple[str, ...]:
    """The shortest queue first, then the most free GPU memory."""
    able = [each for each in backends if _can_run(each, need)]
    able.sort(key=lambda each: (each.queue_depth, -each.free_gpu_memory_bytes, each.worker_id))
    return tuple(each.name for each in able)


def _can_run(backend: BackendState, need: Need) -> bool:
    return backend.is_online and backend.is_able(need)
