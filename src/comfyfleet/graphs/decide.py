"""What happens next in a graph run. Pure: the same run and the same news give the same decision.

Ended executions are told to those behind them, which count down what they wait for; the last one
told starts the node. So a decision costs what it touches, however large the run is.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from comfyfleet.graphs.catalogue import WorkflowFacts
from comfyfleet.graphs.draft import Advance, Draft
from comfyfleet.graphs.ending import cancel_job, fail_node, fail_run, skip, stop
from comfyfleet.graphs.events import (
    AskUser,
    CancelRun,
    Event,
    FinishRun,
    StartJob,
    Surroundings,
)
from comfyfleet.graphs.firing import Fired, Impossible, Skipped, Wanting, fire
from comfyfleet.graphs.model import VALUE_PORT, OutputNode, WorkflowNode
from comfyfleet.graphs.news import take
from comfyfleet.graphs.placing import Nowhere, Placed, is_online, is_ours, place
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.runs import Key, Question, Record, Run, RunStatus, Status, job_id
from comfyfleet.kernel.errors import Conflict


def new_run(
    plan: Plan, run_id: UUID, inputs: Mapping[str, Any], *, max_tokens: int | None = None
) -> Run:
    """May spend what the graph allows, or less."""
    bounds = [each for each in (plan.graph.max_tokens, max_tokens) if each is not None]
    return Run(run_id, inputs, min(bounds, default=None))


def next_actions(
    plan: Plan, run: Run, ended: Iterable[Event], surroundings: Surroundings
) -> Advance:
    """The way on from what just happened; with nothing in `ended`, from how the world is now.

    News of a job that is no longer the execution's latest, or that was told before, changes nothing.
    """
    draft = Draft(plan, run, surroundings)
    if run.status == RunStatus.PENDING:
        _begin(draft)
    for event in ended:
        take(event, draft)
    return _decided(draft)


def cancel_run(plan: Plan, run: Run, surroundings: Surroundings) -> Advance:
    draft = Draft(plan, run, surroundings)
    if not run.status.is_over:
        if run.status == RunStatus.PENDING:
            _begin(draft)
        draft.actions.append(CancelRun())
        stop(draft, RunStatus.CANCELLED)
    return draft.finished()


def retry_run(
    plan: Plan, run: Run, surroundings: Surroundings, *, backend: str | None = None
) -> Advance:
    """Goes on from where it failed; what was done or skipped stays so and is not run again."""
    if run.status != RunStatus.FAILED:
        raise Conflict(f"only a failed run can be retried; this one is {run.status}")
    draft = Draft(plan, run, surroundings)
    draft.status, draft.error = RunStatus.RUNNING, None
    again = [key for key in draft.all_keys() if _is_to_be_retried(draft, key)]
    for key in again:
        if backend and draft.record(key).status == Status.FAILED:
            draft.update(key, chosen=backend)
        draft.reopen(key)
    ready = []
    for key in again:
        if not draft.update(key, waiting=_undecided(draft, key)).waiting:
            ready.append(key)
    for key in ready:
        if draft.is_running:
            _ready(draft, key)
    return _decided(draft)


def _is_to_be_retried(draft: Draft, key: Key) -> bool:
    status = draft.record(key).status
    if status == Status.FAILED:
        node = draft.plan.node(key.node)
        return not (isinstance(node, WorkflowNode) and node.continue_on_error)
    return status in (Status.CANCELLED, Status.STOPPING)


def _begin(draft: Draft) -> None:
    draft.status = RunStatus.RUNNING
    for node in draft.plan.shape.order:
        if not draft.plan.scope(node):
            draft.expect(node, 1)
    for node in draft.plan.roots:
        _ready(draft, Key(node))


def _decided(draft: Draft) -> Advance:
    if draft.is_running:
        _judge_places(draft)
    while draft.is_running:
        _tell(draft)
        _start_held(draft)
        if not draft.news:
            break
    if draft.is_running and not draft.open_count:
        _finish(draft)
    elif draft.is_running:
        draft.status = RunStatus.WAITING_FOR_USER if draft.asking else RunStatus.RUNNING
    return draft.finished()


def _finish(draft: Draft) -> None:
    outputs = {}
    for node in draft.plan.graph.nodes.values():
        record = draft.record(Key(node.id))
        if isinstance(node, OutputNode) and record.outputs is not None:
            outputs[node.id] = record.outputs[VALUE_PORT]
    draft.status, draft.outputs = RunStatus.COMPLETED, outputs
    draft.actions.append(FinishRun(outputs))


# Telling those that wait


def _tell(draft: Draft) -> None:
    while draft.news and draft.is_running:
        key = draft.news.popleft()
        draft.untold.discard(key)
        for target in draft.plan.shape.targets[key.node]:
            for at in draft.indexes(target, key.at):
                _told(draft, Key(target, at))


def _told(draft: Draft, key: Key) -> None:
    """What an execution waits for is counted when it is told for the first time."""
    record = draft.record(key)
    if record.status != Status.PENDING:
        return
    waiting = record.waiting - 1 if draft.is_touched(key) else _undecided(draft, key)
    if waiting:
        draft.update(key, waiting=waiting)
    else:
        _ready(draft, key)


def _undecided(draft: Draft, key: Key) -> int:
    sources = draft.plan.shape.sources[key.node]
    return sum(
        not draft.is_decided(each) for source in sources for each in _keys_of(draft, source, key)
    )


def _keys_of(draft: Draft, source: str, key: Key) -> Iterator[Key]:
    """The executions of a source that one execution waits for: many, for a merge over items."""
    for at in draft.indexes(source, key.at):
        yield Key(source, at)


def _ready(draft: Draft, key: Key) -> None:
    fired = fire(draft, key)
    if isinstance(fired, Fired | Wanting) and (why := draft.refusal(key, *fired.values)):
        fired = Impossible(why)
    match fired:
        case Fired(outputs, inputs, notes):
            changes = {"outputs": outputs, "inputs": inputs, "notes": notes}
            draft.end(key, Status.DONE, waiting=0, **changes)
        case Wanting(properties):
            draft.update(key, waiting=0, inputs=properties)
            draft.hold(key)
        case Skipped(reason):
            skip(draft, key, reason)
        case Impossible(message):
            fail_node(draft, key, message)


# Starting jobs


def _start_held(draft: Draft) -> None:
    while draft.is_running and len(draft.in_flight) < draft.world.in_queue_max:
        found = draft.next_held()
        if found is None:
            return
        row, key = found
        if _is_too_dear(draft, key):
            if not draft.in_flight:
                most = f"the run may spend {draft.was.max_tokens} tokens"
                price = draft.plan.workflows[key.node].price_tokens
                fail_run(draft, key, f"{most}, {draft.tokens} are spent, and it costs {price}")
            return  # what is in flight may be refunded yet
        draft.take_held(row)
        _start(draft, key)


def _is_too_dear(draft: Draft, key: Key) -> bool:
    most = draft.was.max_tokens
    return most is not None and draft.tokens + draft.plan.workflows[key.node].price_tokens > most


def _start(draft: Draft, key: Key) -> None:
    node, record = draft.plan.workflow_node(key.node), draft.record(key)
    facts = draft.plan.workflows[node.id]
    need = facts.need_for(record.inputs or {})
    is_unserved = _is_unserved(draft, facts, record)
    found = place(node, facts, need, draft.world.backends, record.chosen, is_unserved=is_unserved)
    match found:
        case Placed(affinity):
            _submit(draft, key, node, affinity)
        case Nowhere(message, others):
            fail_node(draft, key, message, others)
        case Question():
            draft.update(key, status=Status.ASKING, question=found)
            draft.asking.add(key)
            draft.actions.append(AskUser(key, found))


def _submit(draft: Draft, key: Key, node: WorkflowNode, affinity: str | None) -> None:
    facts = draft.plan.workflows[node.id]
    record = draft.update(
        key,
        status=Status.QUEUED,
        attempt=draft.record(key).attempt + 1,
        affinity=affinity,
        backend=None,
        progress=0.0,
        current_step=None,
        queued_at=draft.world.now,
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
        priority=max(draft.world.priority_min, min(draft.world.priority_max, node.priority)),
        timeout_seconds=node.timeout_seconds,
        price_tokens=facts.price_tokens,
        effect=facts.effect,
    )
    draft.actions.append(action)


def _is_unserved(draft: Draft, facts: WorkflowFacts, record: Record) -> bool:
    need = facts.need_for(record.inputs or {})
    return is_ours(facts) and draft.world.is_unserved(need, record.queued_at)


def _judge_places(draft: Draft) -> None:
    """A job that waits for a worker that went away, or that nobody can run, is taken back.

    It is placed anew only once its cancellation is certain: it might have been done in this moment.
    """
    for key in sorted(draft.in_flight):
        record = draft.record(key)
        if record.status != Status.QUEUED:
            continue
        facts = draft.plan.workflows[key.node]
        if record.affinity is None:
            is_lost = _is_unserved(draft, facts, record)
        else:
            need = facts.need_for(record.inputs or {})
            is_lost = not is_online(record.affinity, need, draft.world.backends)
        if is_lost:
            draft.update(key, status=Status.MOVING, moves=record.moves + 1)
            cancel_job(draft, key)
