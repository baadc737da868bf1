"""How executions and runs end before their work is done: skipped, failed, stopped."""

from comfyfleet.graphs.draft import Draft
from comfyfleet.graphs.events import CancelJob, FailNode, FailRun, SkipNode
from comfyfleet.graphs.model import WorkflowNode
from comfyfleet.graphs.runs import Key, RunError, RunStatus, Status, job_id


def skip(draft: Draft, key: Key, reason: str) -> None:
    draft.end(key, Status.SKIPPED, waiting=0, question=None, notes=(reason,))
    draft.actions.append(SkipNode(key, reason))


def fail_node(
    draft: Draft, key: Key, message: str, others: tuple[str, ...] = (), traceback: str | None = None
) -> None:
    node = draft.plan.node(key.node)
    draft.end(key, Status.FAILED, waiting=0, question=None, error=message, traceback=traceback)
    if isinstance(node, WorkflowNode) and node.continue_on_error:
        draft.actions.append(FailNode(key, message))
    else:
        fail_run(draft, key, f"Node {key} failed: {message}", others)


def fail_run(draft: Draft, key: Key, message: str, others: tuple[str, ...] = ()) -> None:
    record = draft.record(key)
    draft.error = RunError(key.node, key.at, record.backend or record.affinity, message, others)
    draft.actions.append(FailRun(draft.error))
    stop(draft, RunStatus.FAILED)


def stop(draft: Draft, status: RunStatus) -> None:
    """What has not started never will; what is in flight is told to stop, and ends when it says so."""
    draft.status = status
    draft.hold_none()
    for key in list(draft.all_keys()):
        record = draft.record(key)
        if record.status.is_in_flight:
            if record.status != Status.MOVING:
                cancel_job(draft, key)
            draft.update(key, status=Status.STOPPING)
        elif not record.status.is_ended and record.status != Status.STOPPING:
            draft.end(key, Status.CANCELLED, question=None)
    draft.in_flight.clear()
    draft.asking.clear()
    draft.news.clear()
    draft.untold.clear()


def cancel_job(draft: Draft, key: Key) -> None:
    attempt = draft.record(key).attempt
    draft.actions.append(CancelJob(key, job_id(draft.was.id, key, attempt), attempt))
