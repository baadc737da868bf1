"""Decides the next actions of a graph run. This module does no I/O: the same run and events always
result in the same decision.

When an execution ends, it notifies its successors. Each successor counts down the sources for which
it waits, and starts after the last notification. Thus, the cost of a decision depends on the number
of affected executions, and not on the size of the run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import singledispatch
from typing import Any
from uuid import UUID

from comfyfleet.api.graph_model import (
    APPROVED_PORT,
    INPUT_PORT,
    ITEM_PORT,
    OUTPUT_PORT,
    REJECTED_PORT,
    VALUE_PORT,
    ApproveNode,
    DeadlineChoice,
    Fallback,
    OutputNode,
    RoundEndNode,
    WorkflowNode,
    closes_over,
    items_max,
)
from comfyfleet.errors import Conflict
from comfyfleet.server.graphs.catalogue import WorkflowFacts
from comfyfleet.server.graphs.draft import (
    RerunDecision,
    RunDecision,
    RunDraft,
    cancel_job,
    fail_node,
    fail_run,
    skip_node,
    stop_run,
)
from comfyfleet.server.graphs.nodes import (
    JobNeeded,
    NodeAsks,
    NodeFired,
    NodeImpossible,
    NodeSkipped,
    picked_value,
    run_node,
    value_arriving,
)
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.rerun import EarlierRun, decides_anew
from comfyfleet.server.graphs.run import (
    START,
    AskUser,
    CancelRun,
    Choice,
    Environment,
    Event,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    FailureCause,
    FinishRun,
    GraphRunState,
    GraphRunStatus,
    JobCancelled,
    JobDone,
    JobFailed,
    JobProgressed,
    JobStarted,
    JobWaiting,
    NoBackend,
    Notifying,
    PlacedOn,
    QuestionAnswered,
    RunErrorCode,
    StartJob,
    UserQuestion,
    alternatives,
    is_online,
    is_self_hosted,
    job_id,
    no_backend_message,
    place_job,
)

MOVES_MAX = 10
IN_FLIGHT_MAX = 1_000  # Maximum jobs in flight if the graph sets no limit.
_CODES = {
    FailureCause.NO_TOKENS: RunErrorCode.NO_TOKENS,
    FailureCause.WITHDRAWN: RunErrorCode.WITHDRAWN,
}
_RETRIED = frozenset({FailureCause.ERROR, FailureCause.TIMEOUT, FailureCause.BACKEND_LOST})


@singledispatch
def apply_event(event: Event, draft: RunDraft) -> None:
    raise TypeError(f"unknown event {event!r}")


def _current(draft: RunDraft, key: ExecutionKey, attempt: int) -> ExecutionRecord | None:
    """Returns the record for a job's event. Returns None if a later job has replaced the event's
    job, or if the execution is no longer open."""
    record = draft.record(key)
    is_meant = record.attempt == attempt and attempt > 0
    is_open = record.status.is_in_flight or record.status == ExecutionStatus.STOPPING
    return record if is_meant and is_open else None


@apply_event.register
def _started(event: JobStarted, draft: RunDraft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is not None and record.status == ExecutionStatus.QUEUED:
        at = event.at or draft.environment.now
        draft.update(
            event.key, status=ExecutionStatus.RUNNING, backend=event.backend, started_at=at
        )


@apply_event.register
def _waiting(event: JobWaiting, draft: RunDraft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is not None and record.status == ExecutionStatus.RUNNING:
        draft.update(
            event.key, status=ExecutionStatus.QUEUED, backend=None, started_at=None, progress=0.0
        )


@apply_event.register
def _progressed(event: JobProgressed, draft: RunDraft) -> None:
    if _current(draft, event.key, event.attempt) is not None:
        progress = min(1.0, max(0.0, event.progress))
        draft.update(event.key, progress=progress, current_step=event.current_step)


@apply_event.register
def _done(event: JobDone, draft: RunDraft) -> None:
    """Records a job's output, even if the job completed before its cancellation took effect. Such a
    job is charged, and a retry uses its result."""
    record = _current(draft, event.key, event.attempt)
    if record is not None:
        backend = event.backend or record.backend
        outputs = {OUTPUT_PORT: event.output}
        if event.reused_from is not None:
            _refund(draft, event.key)
            draft.update(event.key, reused_from=event.reused_from)
        if draft.is_running and (why := draft.refusal(event.key, outputs)):
            fail_node(draft, event.key, why)
            return
        draft.end(event.key, ExecutionStatus.DONE, outputs=outputs, backend=backend, progress=1.0)


@apply_event.register
def _failed(event: JobFailed, draft: RunDraft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is None:
        return
    _refund(draft, event.key)
    backend = event.backend or record.backend
    if record.status == ExecutionStatus.STOPPING:
        draft.end(event.key, ExecutionStatus.CANCELLED, error=event.message, backend=backend)
        return
    record = draft.update(event.key, backend=backend, failures=record.failures + 1)
    if _may_try_again(draft, event, record):
        draft.in_flight.discard(event.key)
        draft.hold(event.key)
        return
    is_lost = event.cause == FailureCause.BACKEND_LOST
    need = draft.plan.workflows[event.key.node].need_for(record.inputs or {})
    others = alternatives(need, draft.environment.backends) if is_lost else ()
    code = _CODES.get(event.cause)
    fail_node(draft, event.key, event.message, others, event.traceback, code)


def _may_try_again(draft: RunDraft, event: JobFailed, record: ExecutionRecord) -> bool:
    """Checks whether another attempt is allowed. If the node has a fallback, the loss of a backend
    doesn't count as a retry."""
    node = draft.plan.workflow_node(event.key.node)
    if event.cause == FailureCause.BACKEND_LOST and node.fallback_strategy != Fallback.NONE:
        draft.update(event.key, failures=record.failures - 1, moves=record.moves + 1)
        return record.moves < MOVES_MAX
    return event.cause in _RETRIED and record.failures <= node.retries


@apply_event.register
def _cancelled(event: JobCancelled, draft: RunDraft) -> None:
    record = _current(draft, event.key, event.attempt)
    if record is None:
        return
    _refund(draft, event.key)
    if record.status == ExecutionStatus.STOPPING:
        draft.end(event.key, ExecutionStatus.CANCELLED)
    elif record.status == ExecutionStatus.MOVING and record.moves <= MOVES_MAX:
        draft.in_flight.discard(event.key)
        draft.hold(event.key)
    else:
        code = RunErrorCode.NO_BACKEND if record.moves else None
        fail_node(draft, event.key, _why_cancelled(draft, event.key, record), code=code)


def _why_cancelled(draft: RunDraft, key: ExecutionKey, record: ExecutionRecord) -> str:
    if not record.moves:
        return "the job was cancelled"
    if record.affinity is None:
        return no_backend_message(draft.plan.workflows[key.node])
    return f"Backend {record.affinity} is offline"


def _refund(draft: RunDraft, key: ExecutionKey) -> None:
    draft.tokens -= draft.plan.workflows[key.node].price_tokens


@apply_event.register
def _answered(event: QuestionAnswered, draft: RunDraft) -> None:
    """Applies an answer, unless the question is no longer open."""
    record = draft.record(event.key)
    if record.status != ExecutionStatus.ASKING or not draft.is_running:
        return
    draft.asking.discard(event.key)
    draft.update(event.key, answered_at=draft.environment.now)
    if event.choice in (Choice.APPROVE, Choice.REJECT):
        _judge(draft, event.key, event.choice, event.picked)
    elif event.choice == Choice.SKIP:
        skip_node(draft, event.key, "skipped by the user")
    elif event.choice == Choice.FAIL:
        message = record.question.message if record.question else "failed by the user"
        fail_node(draft, event.key, message)
    else:
        chosen = event.backend if event.choice == Choice.BACKEND else record.chosen
        draft.update(event.key, question=None, chosen=chosen)
        draft.hold(event.key)


def _judge(
    draft: RunDraft, key: ExecutionKey, choice: Choice, picked: Sequence[int] | None = None
) -> None:
    """Ends the execution with the value that a person or a deadline has approved or rejected."""
    record = draft.record(key)
    value = (record.inputs or {})[INPUT_PORT]
    if picked is None and record.question and record.question.pick_from is not None:
        picked = range(record.question.pick_from)  # Picks all items.
    port = APPROVED_PORT if choice == Choice.APPROVE else REJECTED_PORT
    outputs = {port: picked_value(value, picked) if choice == Choice.APPROVE else value}
    if why := draft.refusal(key, outputs):
        fail_node(draft, key, why)
    else:
        draft.end(key, ExecutionStatus.DONE, outputs=outputs, question=None)


def _check_questions(draft: RunDraft) -> None:
    """Answers questions whose deadline has passed, as specified by their nodes."""
    now = draft.environment.now
    for key in sorted(draft.asking):
        question, node = draft.record(key).question, draft.plan.node(key.node)
        if question is None or question.deadline is None or now < question.deadline:
            continue
        if not isinstance(node, ApproveNode) or not draft.is_running:
            continue
        draft.asking.discard(key)
        if node.on_deadline == DeadlineChoice.FAIL:
            fail_node(draft, key, f"the question was not answered within {node.deadline_seconds} s")
        else:
            _judge(draft, key, Choice(node.on_deadline))


def _withdraw_questions(draft: RunDraft) -> None:
    """Withdraws questions about an unavailable backend that is available again, so that the nodes
    can continue."""
    for key in sorted(draft.asking):
        node, record = draft.plan.node(key.node), draft.record(key)
        if isinstance(node, WorkflowNode) and _is_served(draft, node, record):
            draft.asking.discard(key)
            draft.update(key, question=None)
            draft.hold(key)


def _is_served(draft: RunDraft, node: WorkflowNode, record: ExecutionRecord) -> bool:
    """Checks whether the requested backend can run the node now. If no backend is requested, checks
    whether any backend can run it."""
    need = draft.plan.workflows[node.id].need_for(record.inputs or {})
    backends = draft.environment.backends
    requested = record.chosen or node.backend_affinity
    return is_online(requested, need, backends) if requested else bool(alternatives(need, backends))


def new_run(
    plan: RunPlan, run_id: UUID, inputs: Mapping[str, Any], *, max_tokens: int | None = None
) -> GraphRunState:
    """Returns a new run. Its spending limit is the lower of the graph's limit and `max_tokens`."""
    bounds = [limit for limit in (plan.graph.max_tokens, max_tokens) if limit is not None]
    return GraphRunState(run_id, inputs, min(bounds, default=None))


def deadline_from(plan: RunPlan, now: datetime) -> datetime | None:
    """Returns the deadline for a run that starts or is retried now. None means no deadline."""
    seconds = plan.graph.deadline_seconds
    return None if seconds is None else now + timedelta(seconds=seconds)


def next_actions(
    plan: RunPlan,
    run: GraphRunState,
    ended: Iterable[Event],
    environment: Environment,
    *,
    slice_max: int | None = None,
    in_loop_max: int | None = None,
) -> RunDecision:
    """Decides how a run continues after these events or after a change of the environment.

    Events have no effect if they were already applied, or if a later job has replaced their job.
    After `slice_max` notifications, the decision stops and the run is marked as cut. The next
    decision continues from there. The combined result is the same as that of a single decision.
    None means no limit. Raises DecisionTooLong if expressions take more than `in_loop_max` steps.
    """
    draft = RunDraft(plan, run, environment, slice_max=slice_max, in_loop_max=in_loop_max)
    if run.status == GraphRunStatus.PENDING:
        _begin(draft)
    for event in ended:
        apply_event(event, draft)
    return _decided(draft)


def decide_cancel(plan: RunPlan, run: GraphRunState, environment: Environment) -> RunDecision:
    draft = RunDraft(plan, run, environment)
    if not run.status.is_over:
        if run.status == GraphRunStatus.PENDING:
            _begin(draft)
        draft.actions.append(CancelRun())
        stop_run(draft, GraphRunStatus.CANCELLED)
    return draft.finished()


def decide_pause(run: GraphRunState, environment: Environment) -> RunDecision:
    """Pauses an active run. It starts no more jobs, but its submitted jobs continue."""
    if run.status.is_over:
        raise Conflict(f"only an active run can be paused; this one is {run.status}")
    return RunDecision((), replace(run, paused_at=run.paused_at or environment.now), ())


def decide_resume(run: GraphRunState, environment: Environment) -> RunDecision:
    """Resumes a paused run. Its deadline is extended by the duration of the pause."""
    if run.status.is_over:
        raise Conflict(f"only an active run can be resumed; this one is {run.status}")
    deadline_at = run.deadline_at
    if deadline_at and run.paused_at:
        deadline_at += environment.now - run.paused_at
    return RunDecision((), replace(run, paused_at=None, deadline_at=deadline_at), ())


def decide_retry(
    plan: RunPlan, run: GraphRunState, environment: Environment, *, backend: str | None = None
) -> RunDecision:
    """Continues a failed run from the point of failure. Completed and skipped executions don't run
    again."""
    if run.status != GraphRunStatus.FAILED:
        raise Conflict(f"only a failed run can be retried; this one is {run.status}")
    run = replace(run, deadline_at=deadline_from(plan, environment.now), paused_at=None)
    draft = RunDraft(plan, run, environment)
    draft.status, draft.error = GraphRunStatus.RUNNING, None
    again = [key for key in draft.all_keys() if _is_to_be_retried(draft, key)]
    for key in again:
        if backend and draft.record(key).status == ExecutionStatus.FAILED:
            draft.update(key, chosen=backend)
        draft.reopen(key)
    ready = []
    for key in again:
        if not _count_undecided(draft, key):
            ready.append(key)
    for key in ready:
        if draft.is_running:
            _ready(draft, key)
    return _decided(draft)


def decide_rerun(
    plan: RunPlan, run: GraphRunState, earlier: EarlierRun, environment: Environment
) -> RerunDecision:
    """Starts a run with results of an earlier one. The next decision starts the jobs."""
    draft = RunDraft(plan, run, replace(environment, in_queue_max=0), earlier)
    _begin(draft)
    return RerunDecision(_decided(draft), frozenset(draft.unchanged))


def _take_earlier(draft: RunDraft, earlier: EarlierRun, key: ExecutionKey) -> bool:
    """Reuses an execution's result from an earlier run if all of its dependencies are unchanged.
    Returns whether a result was reused."""
    if not _is_as_before(draft, earlier, key):
        return False
    record = earlier.result_of(key)
    if record is None:
        if not decides_anew(draft.plan.node(key.node)):
            draft.unchanged.add(key)  # Computing it again gives the same result.
        return False
    draft.unchanged.add(key)
    if record.status == ExecutionStatus.SKIPPED:
        skip_node(draft, key, "; ".join(record.notes))
    elif why := draft.refusal(key, record.outputs, record.inputs):
        fail_node(draft, key, why)
    else:
        draft.end(
            key,
            ExecutionStatus.DONE,
            waiting=0,
            inputs=record.inputs,
            outputs=record.outputs,
            notes=record.notes,
            progress=record.progress,
            reused_from=earlier.source_of(key),
        )
        _start_next_round(draft, key)
    return True


def _is_as_before(draft: RunDraft, earlier: EarlierRun, key: ExecutionKey) -> bool:
    over = closes_over(draft.plan.node(key.node))
    if key.node in earlier.changed:
        return False
    if over and draft.width(over, key.at) != earlier.width(over, key.at):
        return False  # The loop may have more or fewer rounds now.
    sources = draft.plan.shape.sources[key.node]
    needed = (source_key for source in sources for source_key in _keys_of(draft, source, key))
    return all(
        source_key in draft.unchanged for source_key in (*earlier.rounds_before(key), *needed)
    )


def _is_to_be_retried(draft: RunDraft, key: ExecutionKey) -> bool:
    status = draft.record(key).status
    if status == ExecutionStatus.FAILED:
        node = draft.plan.node(key.node)
        return not (isinstance(node, WorkflowNode) and node.continue_on_error)
    return status in (ExecutionStatus.CANCELLED, ExecutionStatus.STOPPING)


def _begin(draft: RunDraft) -> None:
    draft.status = GraphRunStatus.RUNNING
    for node in draft.plan.shape.order:
        if not draft.plan.scope(node):
            draft.expect(node, 1)
    draft.notifying = Notifying(START, 0)


def _decided(draft: RunDraft) -> RunDecision:
    if draft.is_running and draft.open_count:
        _check_deadline(draft)
    if draft.is_running:
        _check_questions(draft)
    if draft.is_running:
        _withdraw_questions(draft)
        _check_placements(draft)
    while draft.is_running:
        _notify_all(draft)
        _start_held(draft)
        if not draft.unnotified or not draft.has_room:
            break
    if draft.is_running and not draft.open_count:
        _finish(draft)
    elif draft.is_running:
        draft.status = GraphRunStatus.WAITING_FOR_USER if draft.asking else GraphRunStatus.RUNNING
    return draft.finished()


def _check_deadline(draft: RunDraft) -> None:
    deadline_at = draft.was.deadline_at
    is_paused = draft.was.paused_at is not None  # Resuming extends the deadline.
    if deadline_at is None or is_paused or draft.environment.now < deadline_at:
        return
    seconds = draft.plan.graph.deadline_seconds
    open_keys = (key for key in draft.all_keys() if not draft.record(key).status.is_ended)
    at = min(draft.in_flight or draft.asking, default=None) or next(open_keys)
    fail_run(draft, at, f"the run exceeded its deadline of {seconds} s")


def _finish(draft: RunDraft) -> None:
    outputs = {}
    for node in draft.plan.graph.nodes.values():
        record = draft.record(ExecutionKey(node.id))
        if isinstance(node, OutputNode) and record.outputs is not None:
            outputs[node.id] = record.outputs[VALUE_PORT]
    draft.status, draft.outputs = GraphRunStatus.COMPLETED, outputs
    draft.actions.append(FinishRun(outputs))


# Notifying successors


def _notify_all(draft: RunDraft) -> None:
    """Notifies the successors of ended executions until the slice is full. The executions are
    processed in the order in which they ended."""
    while draft.is_running and draft.has_room:
        if draft.notifying is None:
            if not draft.unnotified:
                return
            draft.notifying = Notifying(draft.unnotified.popleft(), draft.next_end)
            draft.next_end += 1
        _notify_targets(draft, draft.notifying)


def _notify_targets(draft: RunDraft, at_work: Notifying) -> None:
    source, number, first, last = at_work
    is_start = source == START
    targets = draft.plan.roots if is_start else draft.plan.shape.targets[source.node]
    for place in range(first, len(targets)):
        for at in draft.indexes(targets[place], source.at, last):
            if not draft.is_running:
                return
            if not draft.has_room:
                draft.notifying = Notifying(source, number, place, last)
                return
            draft.notified += 1
            _notify(draft, ExecutionKey(targets[place], at), number)
            last = at
        last = None
    draft.notifying = None


def _notify(draft: RunDraft, key: ExecutionKey, number: int) -> None:
    """Counts down the sources that an execution waits for. The first notification initializes the
    counter."""
    record = draft.record(key)
    if record.status != ExecutionStatus.PENDING:
        return
    if not draft.is_touched(key):
        waiting = _count_undecided(draft, key)
    elif record.end_number > number:
        return  # This source had already ended when the counter was initialized.
    else:
        waiting = record.waiting - 1
        draft.update(key, waiting=waiting)
    if not waiting:
        _ready(draft, key)


def _count_undecided(draft: RunDraft, key: ExecutionKey) -> int:
    """Counts the sources that an execution waits for, and records the number of the next end,
    because the count already accounts for all earlier ends."""
    waiting = _undecided(draft, key)
    draft.update(key, waiting=waiting, end_number=draft.next_end)
    return waiting


def _undecided(draft: RunDraft, key: ExecutionKey) -> int:
    sources = draft.plan.shape.sources[key.node]
    return sum(
        not draft.is_decided(source_key)
        for source in sources
        for source_key in _keys_of(draft, source, key)
    )


def _keys_of(draft: RunDraft, source: str, key: ExecutionKey) -> Iterator[ExecutionKey]:
    """Yields the executions of a source node that an execution waits for. A merge over items waits
    for several."""
    for at in draft.indexes(source, key.at):
        yield ExecutionKey(source, at)


def _ready(draft: RunDraft, key: ExecutionKey) -> None:
    if draft.earlier and _take_earlier(draft, draft.earlier, key):
        return
    fired = run_node(draft, key)
    if isinstance(fired, NodeFired | JobNeeded | NodeAsks):
        why = draft.refusal(key, *fired.values)
        if not why and isinstance(fired, NodeFired):
            why = draft.refusal_of_items(key, fired.outputs)
        fired = NodeImpossible(why) if why else fired
    match fired:
        case NodeFired(outputs, inputs, notes):
            changes = {"outputs": outputs, "inputs": inputs, "notes": notes}
            draft.end(key, ExecutionStatus.DONE, waiting=0, **changes)
            _start_next_round(draft, key)
        case NodeAsks(question, inputs):
            _ask(draft, key, question, waiting=0, inputs=inputs)
        case JobNeeded(properties):
            draft.update(key, waiting=0, inputs=properties)
            draft.hold(key)
        case NodeSkipped(reason):
            skip_node(draft, key, reason)
        case NodeImpossible(message):
            fail_node(draft, key, message)


def _ask(draft: RunDraft, key: ExecutionKey, question: UserQuestion, **changes: Any) -> None:
    changed = {"question": question, "asked_at": draft.environment.now, "answered_at": None}
    draft.update(key, status=ExecutionStatus.ASKING, **changed, **changes)
    draft.asking.add(key)
    draft.actions.append(AskUser(key, question))


def _start_next_round(draft: RunDraft, key: ExecutionKey) -> None:
    """Opens the next round of a loop, unless the last round has met the condition or the limit is
    reached."""
    judge = draft.plan.node(key.node)
    if not isinstance(judge, RoundEndNode) or (draft.record(key).outputs or {})["done"]:
        return
    rounds = ExecutionKey(judge.rounds, key.at[:-1])
    begun = draft.record(rounds)
    items = list((begun.outputs or {})[ITEM_PORT])
    if len(items) >= items_max(draft.plan.node(judge.rounds)):
        return
    if why := draft.refusal_of_executions(len(draft.plan.members[judge.rounds])):
        fail_node(draft, rounds, why)
        return
    [result] = [
        value_arriving(draft, connection, key) for connection in draft.plan.shape.incoming[key.node]
    ]
    if why := draft.refusal(rounds, result):
        fail_node(draft, rounds, why)
        return
    draft.update(rounds, outputs={**(begun.outputs or {}), ITEM_PORT: [*items, result]})
    members = [
        ExecutionKey(node, (*rounds.at, len(items))) for node in draft.plan.members[rounds.node]
    ]
    for member in members:
        draft.expect(member.node, 1)
    # Nodes that wait for all rounds must also wait for the new one.
    for target in draft.plan.shape.targets[key.node]:
        end = ExecutionKey(target, rounds.at)
        if closes_over(draft.plan.node(target)) == rounds.node and draft.is_touched(end):
            _count_undecided(draft, end)
    for member in members:
        if draft.is_running and not _count_undecided(draft, member):
            _ready(draft, member)


# Starting jobs


def _start_held(draft: RunDraft) -> None:
    if draft.was.paused_at is not None:
        return
    most = min(draft.environment.in_queue_max, draft.plan.graph.at_once or IN_FLIGHT_MAX)
    while draft.is_running and len(draft.in_flight) < most and draft.may_start:
        next_held = draft.next_held()
        if next_held is None:
            return
        row, key = next_held
        if _exceeds_tokens(draft, key) and (draft.in_flight or not _reuses(draft, key)):
            if not draft.in_flight:
                price = draft.plan.workflows[key.node].price_tokens
                fail_run(draft, key, too_dear_message(draft.was.max_tokens, draft.tokens, price))
            return  # Wait, because jobs in flight may still be refunded.
        draft.pop_held(row)
        draft.started += 1
        _start(draft, key)


def too_dear_message(most: int | None, spent: int, price: int) -> str:
    return f"the run has spent {spent} of {most} tokens, and the next job costs {price}"


def _exceeds_tokens(draft: RunDraft, key: ExecutionKey) -> bool:
    most = draft.was.max_tokens
    return most is not None and draft.tokens + draft.plan.workflows[key.node].price_tokens > most


def _reuses(draft: RunDraft, key: ExecutionKey) -> bool:
    """Checks whether the job may be free because it reuses a result. This is only known when the
    job is submitted."""
    return draft.plan.workflow_node(key.node).reuse


def _start(draft: RunDraft, key: ExecutionKey) -> None:
    node, record = draft.plan.workflow_node(key.node), draft.record(key)
    facts = draft.plan.workflows[node.id]
    need = facts.need_for(record.inputs or {})
    is_unserved = _is_unserved(draft, facts, record)
    placement = place_job(
        node, facts, need, draft.environment.backends, record.chosen, is_unserved=is_unserved
    )
    match placement:
        case PlacedOn(affinity):
            _submit(draft, key, node, affinity)
        case NoBackend(message, others):
            fail_node(draft, key, message, others, code=RunErrorCode.NO_BACKEND)
        case UserQuestion():
            _ask(draft, key, placement)


def _submit(draft: RunDraft, key: ExecutionKey, node: WorkflowNode, affinity: str | None) -> None:
    facts = draft.plan.workflows[node.id]
    record = draft.update(
        key,
        status=ExecutionStatus.QUEUED,
        attempt=draft.record(key).attempt + 1,
        affinity=affinity,
        backend=None,
        progress=0.0,
        current_step=None,
        queued_at=draft.environment.now,
        started_at=None,
    )
    draft.in_flight.add(key)
    draft.tokens += facts.price_tokens
    action = StartJob(
        key,
        job_id(draft.was.id, key, record.attempt),
        record.attempt,
        facts.slug,
        facts.version,
        record.inputs or {},
        backend_affinity=affinity,
        priority=max(
            draft.environment.priority_min, min(draft.environment.priority_max, node.priority)
        ),
        timeout_seconds=node.timeout_seconds,
        price_tokens=facts.price_tokens,
        effect=facts.effect,
        reuse=node.reuse,
    )
    draft.actions.append(action)


def _is_unserved(draft: RunDraft, facts: WorkflowFacts, record: ExecutionRecord) -> bool:
    need = facts.need_for(record.inputs or {})
    return is_self_hosted(facts) and draft.environment.is_unserved(
        facts.slug, need, record.queued_at
    )


def _check_placements(draft: RunDraft) -> None:
    """Cancels queued jobs whose worker is offline or that no worker can run.

    A job is placed on another worker only after its cancellation is confirmed, because it may have
    just completed."""
    for key in sorted(draft.in_flight):
        record = draft.record(key)
        if record.status != ExecutionStatus.QUEUED:
            continue
        facts = draft.plan.workflows[key.node]
        if record.affinity is None:
            is_lost = _is_unserved(draft, facts, record)
        else:
            need = facts.need_for(record.inputs or {})
            is_lost = not is_online(record.affinity, need, draft.environment.backends)
        if is_lost:
            draft.update(key, status=ExecutionStatus.MOVING, moves=record.moves + 1)
            cancel_job(draft, key)
