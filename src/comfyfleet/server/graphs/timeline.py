"""Calculates the timeline of a run: when its executions waited and ran, and the critical path. This
module does no I/O.

All executions of a node are shown in one row, even if a map has ten thousand items. The critical
path starts at the execution that ended last and goes back to the start of the run. At each step, it
continues with the input that was decided last. If a step on the critical path were faster, the run
would end earlier."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from comfyfleet.api.graph_model import RoundEndNode, RoundsNode, WorkflowNode, is_hidden, kind_of
from comfyfleet.api.graph_reports import (
    SPAN_KINDS,
    CriticalStep,
    KindSeconds,
    NodeTimeline,
    RunTimeline,
    SpanKind,
    TimelineSpan,
)
from comfyfleet.server.graphs.draft import RunDraft
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.progress import node_status
from comfyfleet.server.graphs.run import (
    Environment,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    GraphRunState,
)

SPANS_PER_NODE_MAX = 101
CRITICAL_STEPS_MAX = 200
SECONDS_DIGITS = 3
T = TypeVar("T")


def critical_path(
    last: T,
    ends: Mapping[T, float],
    sources: Callable[[T], Iterable[T]],
    rank: Callable[[T], Any],
) -> list[T]:
    """Returns a chain of dependencies that ends with `last`, in chronological order.

    The predecessor of each step is the source that ended last. If several sources ended at the same
    time, the one with the highest `rank` is used. Thus, the times between the ends add up to the
    duration of the whole chain."""
    path = [last]
    while True:
        until = ends[path[-1]]
        before = [
            source for source in sources(path[-1]) if source in ends and ends[source] <= until
        ]
        if not before:
            return path[::-1]
        path.append(max(before, key=lambda source: (ends[source], rank(source))))


class TimeSpan(NamedTuple):
    kind: SpanKind
    start: float
    end: float


def spans_of(
    record: ExecutionRecord, ready: float, until: float, seconds: "Clock"
) -> list[TimeSpan]:
    """Returns an execution's spans, starting when its inputs were decided. Leaves out spans without
    a duration."""
    waited = SpanKind.RETRIED if record.attempt > 1 else SpanKind.HELD
    marks = [
        (ready, waited),
        (seconds(record.asked_at), SpanKind.ASKING),
        (seconds(record.answered_at), SpanKind.HELD),
        (seconds(record.queued_at), SpanKind.QUEUED),
        (seconds(record.started_at), SpanKind.RUNNING),
    ]
    if record.status == ExecutionStatus.HELD and record.started_at:
        marks = [(ready, SpanKind.RETRIED)]  # The execution is between two attempts.
    known = sorted(
        ((max(ready, at), kind) for at, kind in marks if at is not None), key=lambda mark: mark[0]
    )
    ends = [*(at for at, _ in known[1:]), until]
    return [
        TimeSpan(kind, start, min(end, until))
        for (start, kind), end in zip(known, ends, strict=True)
        if min(end, until) > start
    ]


Clock = Callable[[datetime | None], float | None]


def joined_spans(all_spans: Iterable[TimeSpan], most: int = SPANS_PER_NODE_MAX) -> list[TimeSpan]:
    """Joins the spans of several executions into one row. Where spans of different kinds overlap,
    the kind that comes first in SPAN_KINDS is used. If there are too many spans, short ones are
    joined with their neighbors."""
    changes: dict[float, dict[SpanKind, int]] = {}
    for span in all_spans:
        for at, by in ((span.start, 1), (span.end, -1)):
            counts = changes.setdefault(at, {})
            counts[span.kind] = counts.get(span.kind, 0) + by
    going = dict.fromkeys(SPAN_KINDS, 0)
    row: list[TimeSpan] = []
    moments = sorted(changes)
    least = (moments[-1] - moments[0]) / (most - 1) if moments and len(moments) > most else 0.0
    for start, end in itertools.pairwise(moments):
        for kind, by in changes[start].items():
            going[kind] += by
        shown = next((kind for kind in SPAN_KINDS if going[kind]), None)
        if shown is not None:
            _append(row, TimeSpan(shown, start, end), least)
    return row


def _append(row: list[TimeSpan], span: TimeSpan, least: float) -> None:
    last = row[-1] if row else None
    if last and last.end == span.start and last.kind == span.kind:
        row[-1] = last._replace(end=span.end)
    elif last and span.start - last.start < least:
        # The last span is too short to be visible, so it becomes a part of this span.
        row[-1] = span._replace(start=last.start)
    else:
        row.append(span)


@dataclass(frozen=True)
class RunTimes:
    """A run with the times of its executions, in seconds since the run's start."""

    plan: RunPlan
    run: GraphRunState
    started_at: datetime
    ended_at: datetime | None
    now: datetime
    _sources: dict[ExecutionKey, tuple[ExecutionKey, ...]] = field(default_factory=dict)

    def seconds(self, at: datetime | None) -> float | None:
        return None if at is None else max(0.0, (at - self.started_at).total_seconds())

    @cached_property
    def until(self) -> float:
        return self.seconds(self.ended_at or self.now) or 0.0

    @cached_property
    def place(self) -> Mapping[str, int]:
        return {node: number for number, node in enumerate(self.plan.shape.order)}

    @cached_property
    def _draft(self) -> RunDraft:
        return RunDraft(self.plan, self.run, Environment(self.now))

    @cached_property
    def _judges(self) -> Mapping[str, str]:
        nodes = self.plan.graph.nodes.values()
        return {node.rounds: node.id for node in nodes if isinstance(node, RoundEndNode)}

    def sources(self, key: ExecutionKey) -> tuple[ExecutionKey, ...]:
        """Returns the executions that an execution waits for. Each round of a loop waits for the
        previous round."""
        if key not in self._sources:
            self._sources[key] = tuple(self._find_sources(key))
        return self._sources[key]

    def _find_sources(self, key: ExecutionKey) -> Iterator[ExecutionKey]:
        scope = self.plan.scope(key.node)
        for source in self.plan.shape.sources[key.node]:
            depth = scope.index(source) if source in scope else len(key.at)
            if isinstance(self.plan.node(source), RoundsNode) and any(key.at[depth : depth + 1]):
                before = (*key.at[:depth], key.at[depth] - 1)
                yield ExecutionKey(self._judges[source], before)
            else:
                for at in self._draft.indexes(source, key.at):
                    yield ExecutionKey(source, at)

    @cached_property
    def ends(self) -> dict[ExecutionKey, float]:
        """When each execution ended, in seconds since the start of the run."""
        times = ((key, self.seconds(record.ended_at)) for key, record in self.run.records.items())
        return {
            key: at for key, at in times if at is not None and self.run.record(key).status.is_ended
        }

    def ready(self, key: ExecutionKey) -> float | None:
        """Returns when the inputs of an execution were decided, or None if they aren't decided
        yet."""
        end = self.ends.get(key)
        sources = self.sources(key)
        if end is None and not all(source in self.ends for source in sources):
            return None
        ends = (self.ends.get(source, 0.0) for source in sources)
        return max((at for at in ends if end is None or at <= end), default=0.0)

    def rank(self, key: ExecutionKey) -> tuple[bool, int, tuple[int, ...]]:
        """Ranks executions that ended at the same time. Executions that ran rank above skipped
        ones. Otherwise, their order in the graph decides."""
        is_skipped = self.run.record(key).status == ExecutionStatus.SKIPPED
        return (not is_skipped, self.place[key.node], key.at)


class TimedExecution(NamedTuple):
    key: ExecutionKey
    ready: float
    end: float
    spans: list[TimeSpan]

    @property
    def seconds(self) -> float:
        return self.end - self.ready


def timeline_of(
    plan: RunPlan,
    run: GraphRunState,
    *,
    started_at: datetime,
    ended_at: datetime | None,
    now: datetime,
) -> RunTimeline:
    timed = RunTimes(plan, run, started_at, ended_at, now)
    executions = {execution.key: execution for execution in _executions(timed)}
    path = _path(timed, executions)
    by_node: dict[str, list[TimedExecution]] = {}
    for execution in executions.values():
        by_node.setdefault(execution.key.node, []).append(execution)
    critical = {key.node for key in path}
    shown = [node for node in plan.shape.order if not is_hidden(plan.node(node))]
    steps = _steps(timed, path, executions)
    return RunTimeline(
        run_id=run.id,
        name=plan.graph.name,
        status=run.status,
        started_at=started_at,
        seconds=_rounded(timed.until),
        nodes=tuple(
            _row(timed, node, by_node.get(node, []), is_critical=node in critical) for node in shown
        ),
        critical_path=_longest(steps),
        critical_total=len(steps),
    )


def _executions(timed: RunTimes) -> Iterator[TimedExecution]:
    for key, record in timed.run.records.items():
        ready = timed.ready(key)
        if ready is None:
            continue
        end = timed.ends.get(key, max(ready, timed.until))
        # Nodes without jobs or questions take no time.
        takes_time = record.asked_at or isinstance(timed.plan.node(key.node), WorkflowNode)
        spans = spans_of(record, ready, end, timed.seconds) if takes_time else []
        yield TimedExecution(key, ready, end, spans)


def _path(timed: RunTimes, executions: Mapping[ExecutionKey, TimedExecution]) -> list[ExecutionKey]:
    """Returns the critical path. In an active run, it ends with the execution that has been active
    for the longest time."""
    going = [execution for execution in executions.values() if execution.key not in timed.ends]
    if going:
        last = min(
            going,
            key=lambda execution: (
                execution.ready,
                timed.place[execution.key.node],
                execution.key.at,
            ),
        )
        ends = {**timed.ends, last.key: last.end}
        return critical_path(last.key, ends, timed.sources, timed.rank)
    if not timed.ends:
        return []
    over = max(timed.ends, key=lambda key: (timed.ends[key], timed.rank(key)))
    return critical_path(over, timed.ends, timed.sources, timed.rank)


def _steps(
    timed: RunTimes,
    path: Sequence[ExecutionKey],
    executions: Mapping[ExecutionKey, TimedExecution],
) -> list[CriticalStep]:
    """Returns the visible steps of a path. The time of a hidden step is added to the next step."""
    steps: list[CriticalStep] = []
    start = 0.0
    for key in path:
        if is_hidden(timed.plan.node(key.node)):
            continue
        one = executions[key]
        steps.append(
            CriticalStep(
                node=key.node,
                index=key.at,
                start=_rounded(start),
                end=_rounded(one.end),
                seconds=_summed(one.spans),
            )
        )
        start = one.end
    return steps


def _longest(steps: Sequence[CriticalStep]) -> tuple[CriticalStep, ...]:
    by_length = sorted(range(len(steps)), key=lambda at: steps[at].start - steps[at].end)
    return tuple(steps[at] for at in sorted(by_length[:CRITICAL_STEPS_MAX]))


def _row(
    timed: RunTimes, node: str, executions: Sequence[TimedExecution], *, is_critical: bool
) -> NodeTimeline:
    graph_node = timed.plan.node(node)
    tally = timed.run.tally(node)
    last = max(executions, key=lambda execution: (execution.end, execution.key.at), default=None)
    longest = max(
        executions, key=lambda execution: (execution.seconds, execution.key.at), default=None
    )
    ended = [timed.ends[execution.key] for execution in executions if execution.key in timed.ends]
    is_over = bool(ended) and len(ended) == len(executions) >= tally.expected
    return NodeTimeline(
        id=node,
        type=kind_of(graph_node),
        name=graph_node.name if isinstance(graph_node, WorkflowNode) else None,
        status=_status(timed, node),
        executions=len(executions),
        expected=tally.expected,
        after=_after(timed, last.key if last else ExecutionKey(node)),
        ready=_rounded(min(execution.ready for execution in executions)) if executions else None,
        ended=_rounded(max(ended)) if is_over else None,
        spans=tuple(
            TimelineSpan(kind=joined.kind, start=_rounded(joined.start), end=_rounded(joined.end))
            for joined in joined_spans(span for one in executions for span in one.spans)
        ),
        seconds=_summed(span for execution in executions for span in execution.spans),
        longest=longest.key.at if longest and len(executions) > 1 else None,
        is_critical=is_critical,
    )


def _status(timed: RunTimes, node: str) -> ExecutionStatus:
    is_asking = any(key.node == node for key in timed.run.asking)
    return ExecutionStatus.ASKING if is_asking else node_status(timed.plan, timed.run, node)


def _after(timed: RunTimes, key: ExecutionKey) -> str | None:
    """Returns the node that an execution waited for last. If the execution is still waiting,
    returns a node that hasn't ended."""
    for _ in range(len(timed.plan.shape.order)):
        sources = timed.sources(key) if len(key.at) == len(timed.plan.scope(key.node)) else ()
        if not sources:
            return None
        is_open = [source for source in sources if source not in timed.ends]
        key = max(
            is_open or sources, key=lambda source: (timed.ends.get(source, 0.0), timed.rank(source))
        )
        if not is_hidden(timed.plan.node(key.node)):
            return key.node
    return None


def _summed(spans: Iterable[TimeSpan]) -> KindSeconds:
    totals = dict.fromkeys(SPAN_KINDS, 0.0)
    for span in spans:
        totals[span.kind] += span.end - span.start
    return KindSeconds(**{kind.value: _rounded(total) for kind, total in totals.items()})


def _rounded(seconds: float) -> float:
    return round(seconds, SECONDS_DIGITS)
