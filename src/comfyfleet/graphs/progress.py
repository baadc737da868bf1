"""How far a run has come, for people to watch. Costs as much as there are nodes, not jobs."""

from typing import NamedTuple

from comfyfleet.graphs.model import WorkflowNode
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.runs import Key, Run, RunStatus, Status

UNKNOWN_SECONDS = (
    1.0  # what a node weighs if nobody knows how long it takes; a fraction if it has no job
)
NO_JOB_SECONDS = 0.01


class RunningNode(NamedTuple):
    node_id: str
    at: tuple[int, ...]
    backend_id: str | None
    progress: float
    current_step: str | None


class Progress(NamedTuple):
    overall_percent: float
    weighted_percent: float  # by how long each node typically takes
    completed_nodes: int
    total_nodes: int
    running_nodes: tuple[RunningNode, ...]  # that a backend works on; others wait in the queue


def progress_of(plan: Plan, run: Run) -> Progress:
    """Skipped nodes count as completed: nothing is left to be done for them."""
    running = tuple(
        _running(run, key)
        for key in sorted(run.in_flight)
        if run.record(key).status == Status.RUNNING
    )
    going: dict[str, float] = {}
    for each in running:
        going[each.node_id] = going.get(each.node_id, 0.0) + each.progress
    parts = {node: part_done(plan, run, node, going.get(node, 0.0)) for node in plan.shape.order}
    weights = {node: weight_of(plan, node) for node in plan.shape.order}
    return Progress(
        _percent(parts, dict.fromkeys(parts, 1.0)),
        _percent(parts, weights),
        sum(part >= 1 for part in parts.values()),
        len(parts),
        running,
    )


def _running(run: Run, key: Key) -> RunningNode:
    record = run.record(key)
    return RunningNode(
        key.node,
        key.at,
        record.backend,
        record.progress,
        record.current_step,
    )


def part_done(plan: Plan, run: Run, node: str, going: float = 0.0) -> float:
    """From 0 to 1; `going` is the progress of its executions that are under way, added up."""
    if run.status == RunStatus.PENDING:
        return 0.0
    tally = run.tally(node)
    if run.status in (RunStatus.FAILED, RunStatus.CANCELLED):
        # What will never be done is not done, though nothing of it is left to wait for.
        return (tally.done + tally.skipped) / tally.expected if tally.expected else 0.0
    if is_settled(plan, run, node):
        return 1.0
    return min(0.999, (tally.ended + going) / tally.expected) if tally.expected else 0.0


def is_settled(plan: Plan, run: Run, node: str) -> bool:
    """Nothing is left, and nothing more can come: the fan-outs around it are settled too."""
    if run.status == RunStatus.PENDING:
        return False
    tally = run.tally(node)
    return tally.ended == tally.expected and all(
        run.tally(each).ended == run.tally(each).expected for each in plan.scope(node)
    )


def node_status(plan: Plan, run: Run, node: str) -> Status:
    """One word for all executions of a node."""
    tally = run.tally(node)
    if not is_settled(plan, run, node):
        going = {run.record(key).status for key in run.in_flight if key.node == node}
        if tally.ended or going - {Status.QUEUED}:
            return Status.RUNNING
        return Status.QUEUED if going else Status.PENDING
    if tally.failed:
        return Status.FAILED
    if tally.cancelled:
        return Status.CANCELLED
    return Status.DONE if tally.done else Status.SKIPPED


def weight_of(plan: Plan, node: str) -> float:
    if not isinstance(plan.node(node), WorkflowNode):
        return NO_JOB_SECONDS
    return plan.workflows[node].typical_seconds or UNKNOWN_SECONDS


def _percent(parts: dict[str, float], weights: dict[str, float]) -> float:
    total = sum(weights.values())
    return 100 * sum(parts[node] * weights[node] for node in parts) / total if total else 100.0
