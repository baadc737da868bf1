"""What a run is told: jobs that start, get on and end, and what people answer."""

from functools import singledispatch

from comfyfleet.graphs.draft import Draft
from comfyfleet.graphs.ending import fail_node, skip
from comfyfleet.graphs.events import (
    Answer,
    Cause,
    Event,
    JobCancelled,
    JobDone,
    JobFailed,
    JobProgressed,
    JobStarted,
    JobWaiting,
)
from comfyfleet.graphs.model import OUTPUT_PORT, Fallback
from comfyfleet.graphs.placing import alternatives, nobody
from comfyfleet.graphs.runs import Choice, Key, Record, Status

MOVES_MAX = 10
_RETRIED = frozenset({Cause.ERROR, Cause.TIMEOUT, Cause.BACKEND_LOST})


@singledispatch
def take(event: Event, draft: Draft) -> None:
    raise TypeError(f"{event!r} is no event")


def _current(draft: Draft, key: Key, attempt: int) -> Record | None:
    """The record that a job's word is about; None if the job is not, or no longer, its latest."""
    record = draft.record(key)
    is_meant = record.attempt == attempt and attempt > 0
    is_open = record.status.is_in_flight or record.status == Status.STOPPING
    return record if is_meant and is_open else None


@take.register
def _started(event: JobStarted, draft: Draft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is not None and record.status == Status.QUEUED:
        at = event.at or draft.world.now
        draft.update(event.key, status=Status.RUNNING, backend=event.backend, started_at=at)


@take.register
def _waiting(event: JobWaiting, draft: Draft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is not None and record.status == Status.RUNNING:
        draft.update(event.key, status=Status.QUEUED, backend=None, started_at=None, progress=0.0)


@take.register
def _progressed(event: JobProgressed, draft: Draft) -> None:
    if _current(draft, event.key, event.attempt) is not None:
        progress = min(1.0, max(0.0, event.progress))
        draft.update(event.key, progress=progress, current_step=event.current_step)


@take.register
def _done(event: JobDone, draft: Draft) -> None:
    """Also of a job that was told to stop and was quicker: it is paid, and a retry will use it."""
    record = _current(draft, event.key, event.attempt)
    if record is not None:
        backend = event.backend or record.backend
        outputs = {OUTPUT_PORT: event.output}
        if draft.is_running and (why := draft.refusal(event.key, outputs)):
            fail_node(draft, event.key, why)
            return
        draft.end(event.key, Status.DONE, outputs=outputs, backend=backend, progress=1.0)


@take.register
def _failed(event: JobFailed, draft: Draft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is None:
        return
    _refund(draft, event.key)
    backend = event.backend or record.backend
    if record.status == Status.STOPPING:
        draft.end(event.key, Status.CANCELLED, error=event.message, backend=backend)
        return
    record = draft.update(event.key, backend=backend, failures=record.failures + 1)
    if _may_try_again(draft, event, record):
        draft.in_flight.discard(event.key)
        draft.hold(event.key)
        return
    is_lost = event.cause == Cause.BACKEND_LOST
    need = draft.plan.workflows[event.key.node].need_for(record.inputs or {})
    others = alternatives(need, draft.world.backends) if is_lost else ()
    fail_node(draft, event.key, event.message, others, event.traceback)


def _may_try_again(draft: Draft, event: JobFailed, record: Record) -> bool:
    """Losing a backend is not the node's fault: with a fallback it doesn't use up a retry."""
    node = draft.plan.workflow_node(event.key.node)
    if event.cause == Cause.BACKEND_LOST and node.fallback_strategy != Fallback.NONE:
        draft.update(event.key, failures=record.failures - 1, moves=record.moves + 1)
        return record.moves < MOVES_MAX
    return event.cause in _RETRIED and record.failures <= node.retries


@take.register
def _cancelled(event: JobCancelled, draft: Draft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is None:
        return
    _refund(draft, event.key)
    if record.status == Status.STOPPING:
        draft.end(event.key, Status.CANCELLED)
    elif record.status == Status.MOVING and record.moves <= MOVES_MAX:
        draft.in_flight.discard(event.key)
        draft.hold(event.key)
    else:
        fail_node(draft, event.key, _why_cancelled(draft, event.key, record))


def _why_cancelled(draft: Draft, key: Key, record: Record) -> str:
    if not record.moves:
        return "its job was cancelled"
    if record.affinity is None:
        return nobody(draft.plan.workflows[key.node])
    return f"Backend {record.affinity} is offline"


def _refund(draft: Draft, key: Key) -> None:
    draft.tokens -= draft.plan.workflows[key.node].price_tokens


@take.register
def _answered(event: Answer, draft: Draft) -> None:
    """An answer to a question that is no longer open changes nothing."""
    record = draft.record(event.key)
    if record.status != Status.ASKING or not draft.is_running:
        return
    draft.asking.discard(event.key)
    if event.choice == Choice.SKIP:
        skip(draft, event.key, "skipped by a person")
    elif event.choice == Choice.FAIL:
        message = record.question.message if record.question else "failed by a person"
        fail_node(draft, event.key, message)
    else:
        chosen = event.backend if event.choice == Choice.BACKEND else record.chosen
        draft.update(event.key, question=None, chosen=chosen)
        draft.hold(event.key)
