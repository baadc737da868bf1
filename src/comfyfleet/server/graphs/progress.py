"""Calculates the progress of a run. This takes time in proportion to the number of nodes."""

from typing import NamedTuple

from comfyfleet.api.graph_model import WorkflowNode, is_hidden
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.run import (
    ExecutionKey,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
)

UNKNOWN_SECONDS = 1.0  # Weight of a job whose typical duration is unknown.
NO_JOB_SECONDS = 0.01  # Weight of a node without a job.


class NodeProgress(NamedTuple):
    node_id: str
    at: tuple[int, ...]
    backend_id: str | None
    progress: float
    current_step: str | None


class RunProgress(NamedTuple):
    overall_percent: float
    weighted_percent: float  # Each node is weighted by its typical duration.
    completed_nodes: int
    total_nodes: int
    # The nodes that are running on a backend. Queued nodes aren't included.
    running_nodes: tuple[NodeProgress, ...]


def progress_of(plan: RunPlan, run: GraphRunState) -> RunProgress:
    """Calculates the progress of a run. Skipped nodes count as completed."""
    running = tuple(
        _running(run, key)
        for key in sorted(run.in_flight)
        if run.record(key).status == ExecutionStatus.RUNNING
    )
    going: dict[str, float] = {}
    for execution in running:
        going[execution.node_id] = going.get(execution.node_id, 0.0) + execution.progress
    shown = [node for node in plan.shape.order if not is_hidden(plan.node(node))]
    parts = {node: done_fraction(plan, run, node, going.get(node, 0.0)) for node in shown}
    weights = {node: weight_of(plan, node) for node in shown}
    return RunProgress(
        _percent(parts, dict.fromkeys(parts, 1.0)),
        _percent(parts, weights),
        sum(part >= 1 for part in parts.values()),
        len(parts),
        running,
    )


def _running(run: GraphRunState, key: ExecutionKey) -> NodeProgress:
    record = run.record(key)
    return NodeProgress(
        key.node,
        key.at,
        record.backend,
        record.progress,
        record.current_step,
    )


def done_fraction(plan: RunPlan, run: GraphRunState, node: str, going: float = 0.0) -> float:
    """Returns the completed fraction of a node, from 0 to 1. `going` is the total progress of its
    running executions."""
    if run.status == GraphRunStatus.PENDING:
        return 0.0
    tally = run.tally(node)
    if run.status in (GraphRunStatus.FAILED, GraphRunStatus.CANCELLED):
        # Executions that never ran don't count as completed.
        return (tally.done + tally.skipped) / tally.expected if tally.expected else 0.0
    if is_settled(plan, run, node):
        return 1.0
    return min(0.999, (tally.ended + going) / tally.expected) if tally.expected else 0.0


def is_settled(plan: RunPlan, run: GraphRunState, node: str) -> bool:
    """Checks whether a node has no open executions and can't get new ones. New executions are
    possible as long as a surrounding fan-out is open."""
    if run.status == GraphRunStatus.PENDING:
        return False
    tally = run.tally(node)
    return tally.ended == tally.expected and all(
        run.tally(opener).ended == run.tally(opener).expected for opener in plan.scope(node)
    )


def node_status(plan: RunPlan, run: GraphRunState, node: str) -> ExecutionStatus:
    """Returns a single status for all executions of a node."""
    tally = run.tally(node)
    if not is_settled(plan, run, node):
        going = {run.record(key).status for key in run.in_flight if key.node == node}
        if tally.ended or going - {ExecutionStatus.QUEUED}:
            return ExecutionStatus.RUNNING
        return ExecutionStatus.QUEUED if going else ExecutionStatus.PENDING
    if tally.failed:
        return ExecutionStatus.FAILED
    if tally.cancelled:
        return ExecutionStatus.CANCELLED
    return ExecutionStatus.DONE if tally.done else ExecutionStatus.SKIPPED


def weight_of(plan: RunPlan, node: str) -> float:
    if not isinstance(plan.node(node), WorkflowNode):
        return NO_JOB_SECONDS
    return plan.workflows[node].typical_seconds or UNKNOWN_SECONDS


def _percent(parts: dict[str, float], weights: dict[str, float]) -> float:
    total = sum(weights.values())
    return 100 * sum(parts[node] * weights[node] for node in parts) / total if total else 100.0
