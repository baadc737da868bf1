"""A draft of a run during a decision. Changes are stored separately, and all other data is read
from the original run, which is never modified.

Thus, the cost of a decision depends only on its changes. This module also implements skipping and
failing executions and stopping runs."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from comfyfleet.api.expressions import StepCount
from comfyfleet.api.graph_model import ITEM_PORT, OutputNode, WorkflowNode, opens_scope
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.rerun import EarlierRun
from comfyfleet.server.graphs.run import (
    OUTPUTS_SIZE_MAX,
    RUN_SIZE_MAX,
    VALUE_SIZE_MAX,
    Action,
    CancelJob,
    Environment,
    ExecutionCounts,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    FailNode,
    FailRun,
    GraphRunState,
    GraphRunStatus,
    HeldPlace,
    HeldRange,
    Index,
    RunError,
    RunErrorCode,
    SkipNode,
    ValueSize,
    job_id,
    size_of,
    too_large_message,
)

DECISION_STEPS_MAX = 2_000_000
# A slice ends after the execution that exceeds this number of expression steps.
SLICE_STEPS = 100_000


class RunDecision(NamedTuple):
    """A decision's result: actions, the changed run, and the keys of new or changed records."""

    actions: tuple[Action, ...]
    run: GraphRunState
    changed: tuple[ExecutionKey, ...] = ()


class RerunDecision(NamedTuple):
    """The first decision of a rerun, and the executions that are unchanged since the earlier
    run."""

    decision: RunDecision
    unchanged: frozenset[ExecutionKey]


class DecisionTooLong(Exception):
    """Raised when a decision takes more steps than the event loop may spend on it."""


class DecisionSteps(StepCount):
    """Counts the steps of all expressions in one decision."""

    def __init__(self, before: int, in_loop_max: int | None) -> None:
        """Creates a counter. `before` is the number of steps in earlier slices of the decision."""
        super().__init__(most=DECISION_STEPS_MAX)
        self.count = self.before = before
        self.in_loop_max = in_loop_max

    @property
    def of_slice(self) -> int:
        return self.count - self.before

    def add(self, count: int) -> None:
        super().add(count)
        if self.in_loop_max is not None and self.of_slice > self.in_loop_max:
            raise DecisionTooLong


class RunDraft:
    def __init__(
        self,
        plan: RunPlan,
        run: GraphRunState,
        environment: Environment,
        earlier: EarlierRun | None = None,
        *,
        slice_max: int | None = None,
        in_loop_max: int | None = None,
    ) -> None:
        """Creates a draft. `slice_max` limits the notifications and, separately, the started jobs.
        None means no limit. DecisionTooLong is raised after `in_loop_max` expression steps."""
        self.plan = plan
        self.slice_max = slice_max
        self.notified = self.started = 0
        # The run whose results the first decision of a rerun reuses, and the executions that are
        # unchanged since that run.
        self.earlier = earlier
        self.unchanged: set[ExecutionKey] = set()
        self.was = run
        self.environment = environment
        self.status = run.status
        self.error = run.error
        self.outputs = run.outputs
        self.open_count = run.open_count
        self.executions = sum(tally.expected for tally in run.tallies.values())
        self.tokens = run.tokens
        self.size = run.size
        self.outputs_size = run.outputs_size
        self.in_flight = set(run.in_flight)
        self.asking = set(run.asking)
        self.rows = {(row.priority, row.lane): row for row in run.rows}
        self.records: dict[ExecutionKey, ExecutionRecord] = {}
        self.tallies: dict[str, ExecutionCounts] = {}
        self.held: dict[HeldPlace, ExecutionKey] = {}
        self.no_longer_held: set[HeldPlace] = set()
        self.actions: list[Action] = []
        self.steps = DecisionSteps(run.decision_steps if run.is_cut else 0, in_loop_max)
        # Ended executions that haven't notified their successors yet. Each does so exactly once.
        self.unnotified = deque(run.unnotified)
        self.notifying = run.notifying
        self.next_end = run.next_end or 1

    @property
    def is_running(self) -> bool:
        return self.status in (GraphRunStatus.RUNNING, GraphRunStatus.WAITING_FOR_USER)

    # Records

    def record(self, key: ExecutionKey) -> ExecutionRecord:
        record = self.records.get(key)
        return record if record is not None else self.was.record(key)

    def is_touched(self, key: ExecutionKey) -> bool:
        return key in self.records or key in self.was.records

    def update(self, key: ExecutionKey, **changes: Any) -> ExecutionRecord:
        record = replace(self.record(key), **changes)
        self.records[key] = record
        return record

    def is_decided(self, key: ExecutionKey) -> bool:
        """Checks whether an execution has ended and has started to notify its successors."""
        record = self.record(key)
        return record.status.is_ended and record.end_number < self.next_end

    @property
    def has_room(self) -> bool:
        """Whether this slice may notify another execution."""
        if self.slice_max is None:
            return True
        return self.notified < self.slice_max and self.steps.of_slice < SLICE_STEPS

    @property
    def may_start(self) -> bool:
        return self.slice_max is None or self.started < self.slice_max

    def end(self, key: ExecutionKey, status: ExecutionStatus, **changes: Any) -> None:
        """Ends an execution. Its successors are notified later."""
        record = self.update(
            key,
            status=status,
            ended_at=self.environment.now,
            end_number=self.next_end + len(self.unnotified),
            **changes,
        )
        self.in_flight.discard(key)
        self.asking.discard(key)
        self.open_count -= 1
        self.count(key.node, self.tally(key.node).counted(status))
        self.expect_items(key, record)
        self.unnotified.append(key)

    def forget_ends(self) -> None:
        """Drops all remaining notifications, so that nothing else starts."""
        self.next_end += len(self.unnotified)
        self.unnotified.clear()
        self.notifying = None

    def reopen(self, key: ExecutionKey) -> None:
        """Resets an execution for a retry. It keeps only its attempt number and chosen backend."""
        record = self.record(key)
        if record.status.is_ended:
            self.open_count += 1
            self.count(key.node, self.tally(key.node).counted(record.status, -1))
        self.records[key] = ExecutionRecord(attempt=record.attempt, chosen=record.chosen)

    # Values

    def refusal(self, key: ExecutionKey, *values: Any) -> str:
        """Returns an error message if these values are too large to store. Otherwise, adds their
        size to the run's total and returns an empty string."""
        most = self.size.within(RUN_SIZE_MAX)
        size = size_of(values, ValueSize(*map(min, VALUE_SIZE_MAX, most)))
        if not size.fits(VALUE_SIZE_MAX):
            return f"its values are {too_large_message(VALUE_SIZE_MAX)}"
        if not size.fits(most):
            return f"the values of the run are {too_large_message(RUN_SIZE_MAX)}"
        if isinstance(self.plan.node(key.node), OutputNode):
            together = self.outputs_size.plus(size)
            if not together.fits(OUTPUTS_SIZE_MAX):
                return f"the outputs of the run are {too_large_message(OUTPUTS_SIZE_MAX)}"
            self.outputs_size = together
        self.size = self.size.plus(size)
        return ""

    def refusal_of_items(self, key: ExecutionKey, outputs: Mapping[str, Any]) -> str:
        """Returns an error message if a fan-out has too many items for the nodes inside it, or an
        empty string otherwise."""
        width = items_of(self.plan, key, ExecutionRecord(outputs=outputs))
        more = width * len(self.plan.members[key.node]) if width else 0
        return self.refusal_of_executions(more) if more else ""

    def refusal_of_executions(self, more: int) -> str:
        """Returns an error message if this many more executions would exceed the run's limit, or an
        empty string otherwise."""
        most = self.environment.executions_max
        total = self.executions + more
        if total <= most:
            return ""
        return f"the run would have {total:,} executions, more than its limit of {most:,}"

    # Tallies

    def tally(self, node: str) -> ExecutionCounts:
        tally = self.tallies.get(node)
        return tally if tally is not None else self.was.tally(node)

    def count(self, node: str, tally: ExecutionCounts) -> None:
        self.tallies[node] = tally

    def expect(self, node: str, executions: int) -> None:
        tally = self.tally(node)
        self.count(node, tally._replace(expected=tally.expected + executions))
        self.open_count += executions
        self.executions += executions

    def expect_items(self, key: ExecutionKey, record: ExecutionRecord) -> None:
        """Adds the executions inside a per-item fan-out. Their number was unknown before the
        fan-out ended."""
        width = items_of(self.plan, key, record)
        for member in self.plan.members[key.node] if width else ():
            self.expect(member, width)

    # Indexes

    def width(self, fanout: str, index: Index) -> int:
        key = ExecutionKey(fanout, index)
        return items_of(self.plan, key, self.record(key))

    def indexes(self, node: str, prefix: Index = (), after: Index | None = None) -> Iterator[Index]:
        """Yields all indexes of a node that start with a prefix. If `after` is set, yields only
        later indexes."""
        scope, depth = self.plan.scope(node), len(prefix)
        if depth >= len(scope):
            if after is None:
                yield prefix[: len(scope)]
            return
        first = 0 if after is None else after[depth]
        for number in range(first, self.width(scope[depth], prefix)):
            is_first = after is not None and number == first
            yield from self.indexes(node, (*prefix, number), after if is_first else None)

    def all_keys(self) -> Iterator[ExecutionKey]:
        for node in self.plan.shape.order:
            for index in self.indexes(node):
                yield ExecutionKey(node, index)

    # Held executions

    def hold(self, key: ExecutionKey) -> None:
        priority, lane = held_row(self.plan, key)
        row = self.rows.get((priority, lane), HeldRange(priority, lane, 0, 0))
        self.held[priority, lane, row.end] = key
        self.rows[priority, lane] = row._replace(end=row.end + 1)
        self.update(key, status=ExecutionStatus.HELD, place=row.end)

    def next_held(self) -> tuple[HeldRange, ExecutionKey] | None:
        """Returns the next execution to start, with its row. The highest priority comes first, and
        then the lane with the fewest jobs."""
        full, busy = self._full_lanes(), Counter(self.plan.lane(key.node) for key in self.in_flight)
        waiting = [
            row
            for row in self.rows.values()
            if row.first < row.end and not row.lane.startswith(full)
        ]
        if not waiting:
            return None
        row = max(waiting, key=lambda row: (row.priority, -busy[row.lane], row.lane))
        place = (row.priority, row.lane, row.first)
        return row, self.held[place] if place in self.held else self.was.held[place]

    def _full_lanes(self) -> tuple[str, ...]:
        """Returns the lanes that have reached their job limit. Jobs in nested lanes count as
        well."""
        lanes = self.plan.graph.lanes
        return tuple(
            lane
            for lane, most in lanes.items()
            if sum(key.node.startswith(lane) for key in self.in_flight) >= most
        )

    def pop_held(self, row: HeldRange) -> None:
        self.no_longer_held.add((row.priority, row.lane, row.first))
        self.rows[row.priority, row.lane] = row._replace(first=row.first + 1)

    def clear_held(self) -> None:
        self.held.clear()
        self.no_longer_held.update(self.was.held)
        self.rows.clear()

    # Result

    def finished(self) -> RunDecision:
        if not self.is_running:
            self.forget_ends()
        held = {place: key for place, key in self.held.items() if place not in self.no_longer_held}
        run = replace(
            self.was,
            status=self.status,
            records=self.was.records.changed(self.records) if self.records else self.was.records,
            tallies=self.was.tallies.changed(self.tallies) if self.tallies else self.was.tallies,
            held=self.was.held.changed(held, self.no_longer_held),
            rows=tuple(sorted(row for row in self.rows.values() if row.first < row.end)),
            in_flight=frozenset(self.in_flight),
            asking=frozenset(self.asking),
            open_count=self.open_count,
            tokens=self.tokens,
            size=self.size,
            outputs_size=self.outputs_size,
            error=self.error,
            outputs=self.outputs,
            unnotified=tuple(self.unnotified),
            notifying=self.notifying,
            next_end=self.next_end,
            decision_steps=self.steps.count,
        )
        return RunDecision(tuple(self.actions), run, tuple(self.records))


def held_row(plan: RunPlan, key: ExecutionKey) -> tuple[int, str]:
    """Returns the priority and the lane in which an execution waits."""
    node = plan.node(key.node)
    return (node.priority if isinstance(node, WorkflowNode) else 0, plan.lane(key.node))


def items_of(plan: RunPlan, key: ExecutionKey, record: ExecutionRecord) -> int:
    """Returns the number of items in a per-item fan-out or of rounds in a loop. Returns 0 for other
    nodes."""
    if record.outputs is None or not opens_scope(plan.node(key.node)):
        return 0
    return len(record.outputs[ITEM_PORT])


def skip_node(draft: RunDraft, key: ExecutionKey, reason: str) -> None:
    draft.end(key, ExecutionStatus.SKIPPED, waiting=0, question=None, notes=(reason,))
    draft.actions.append(SkipNode(key, reason))


def fail_node(
    draft: RunDraft,
    key: ExecutionKey,
    message: str,
    others: tuple[str, ...] = (),
    traceback: str | None = None,
    code: RunErrorCode | None = None,
) -> None:
    node = draft.plan.node(key.node)
    draft.end(
        key, ExecutionStatus.FAILED, waiting=0, question=None, error=message, traceback=traceback
    )
    if isinstance(node, WorkflowNode) and node.continue_on_error:
        draft.actions.append(FailNode(key, message))
    else:
        fail_run(draft, key, f"Node {key} failed: {message}", others, code)


def fail_run(
    draft: RunDraft,
    key: ExecutionKey,
    message: str,
    others: tuple[str, ...] = (),
    code: RunErrorCode | None = None,
) -> None:
    record = draft.record(key)
    backend = record.backend or record.affinity
    draft.error = RunError(key.node, key.at, backend, message, others, code)
    draft.actions.append(FailRun(draft.error))
    stop_run(draft, GraphRunStatus.FAILED)


def stop_run(draft: RunDraft, status: GraphRunStatus) -> None:
    """Ends a run. Executions that haven't started are cancelled. Jobs in flight are cancelled as
    well, and their executions end when the cancellation is confirmed."""
    draft.status = status
    draft.clear_held()
    for key in list(draft.all_keys()):
        record = draft.record(key)
        if record.status.is_in_flight:
            if record.status != ExecutionStatus.MOVING:
                cancel_job(draft, key)
            draft.update(key, status=ExecutionStatus.STOPPING)
        elif not record.status.is_ended and record.status != ExecutionStatus.STOPPING:
            draft.end(key, ExecutionStatus.CANCELLED, question=None)
    draft.in_flight.clear()
    draft.asking.clear()
    draft.forget_ends()


def cancel_job(draft: RunDraft, key: ExecutionKey) -> None:
    attempt = draft.record(key).attempt
    draft.actions.append(CancelJob(key, job_id(draft.was.id, key, attempt), attempt))
