"""A run while it is being decided: reads fall through to the run as it was, writes are kept aside.

So a decision costs what it changes, not what there is, and the run that came in is never modified.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from comfyfleet.graphs.budget import OUTPUTS_MAX, RUN_MAX, VALUE_MAX, Size, size_of, too_large
from comfyfleet.graphs.events import Action, Surroundings
from comfyfleet.graphs.model import ITEM_PORT, FanOutNode, OutputNode, WorkflowNode
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.runs import Index, Key, Record, Row, Run, RunStatus, Status, Tally


class Advance(NamedTuple):
    """What is to be done, the run afterwards, and which of its records are new or other."""

    actions: tuple[Action, ...]
    run: Run
    changed: tuple[Key, ...] = ()


class Draft:
    def __init__(self, plan: Plan, run: Run, surroundings: Surroundings) -> None:
        self.plan = plan
        self.was = run
        self.world = surroundings
        self.status = run.status
        self.error = run.error
        self.outputs = run.outputs
        self.open_count = run.open_count
        self.tokens = run.tokens
        self.size = run.size
        self.outputs_size = run.outputs_size
        self.in_flight = set(run.in_flight)
        self.asking = set(run.asking)
        self.rows = {row.priority: row for row in run.rows}
        self.records: dict[Key, Record] = {}
        self.tallies: dict[str, Tally] = {}
        self.held: dict[tuple[int, int], Key] = {}
        self.no_longer_held: set[tuple[int, int]] = set()
        self.actions: list[Action] = []
        # Ended, and those behind them have not been told; each is told once.
        self.news: deque[Key] = deque()
        self.untold: set[Key] = set()

    @property
    def is_running(self) -> bool:
        return self.status in (RunStatus.RUNNING, RunStatus.WAITING_FOR_USER)

    # Records

    def record(self, key: Key) -> Record:
        found = self.records.get(key)
        return found if found is not None else self.was.record(key)

    def is_touched(self, key: Key) -> bool:
        return key in self.records or key in self.was.records

    def update(self, key: Key, **changes: Any) -> Record:
        record = replace(self.record(key), **changes)
        self.records[key] = record
        return record

    def is_decided(self, key: Key) -> bool:
        return self.record(key).status.is_ended and key not in self.untold

    def end(self, key: Key, status: Status, **changes: Any) -> None:
        """An execution ends once; those behind it are told when their turn comes."""
        record = self.update(key, status=status, ended_at=self.world.now, **changes)
        self.in_flight.discard(key)
        self.asking.discard(key)
        self.open_count -= 1
        self.count(key.node, self.tally(key.node).counted(status))
        self.expect_items(key, record)
        self.news.append(key)
        self.untold.add(key)

    def reopen(self, key: Key) -> None:
        """For a retry: as it was before, but for the number of its last job."""
        record = self.record(key)
        if record.status.is_ended:
            self.open_count += 1
            self.count(key.node, self.tally(key.node).counted(record.status, -1))
        self.records[key] = Record(attempt=record.attempt, chosen=record.chosen)

    # Values

    def refusal(self, key: Key, *values: Any) -> str:
        """Why these values are too large to be kept; empty if they are not, and then they count."""
        most = self.size.within(RUN_MAX)
        size = size_of(values, Size(*map(min, VALUE_MAX, most)))
        if not size.fits(VALUE_MAX):
            return f"its values are {too_large(VALUE_MAX)}"
        if not size.fits(most):
            return f"the values of the run are {too_large(RUN_MAX)}"
        if isinstance(self.plan.node(key.node), OutputNode):
            together = self.outputs_size.plus(size)
            if not together.fits(OUTPUTS_MAX):
                return f"the outputs of the run are {too_large(OUTPUTS_MAX)}"
            self.outputs_size = together
        self.size = self.size.plus(size)
        return ""

    # Tallies

    def tally(self, node: str) -> Tally:
        found = self.tallies.get(node)
        return found if found is not None else self.was.tally(node)

    def count(self, node: str, tally: Tally) -> None:
        self.tallies[node] = tally

    def expect(self, node: str, executions: int) -> None:
        tally = self.tally(node)
        self.count(node, tally._replace(expected=tally.expected + executions))
        self.open_count += executions

    def expect_items(self, key: Key, record: Record) -> None:
        """Only now is it known how often the nodes behind a per-item fan-out will run."""
        width = items_of(self.plan, key, record)
        for member in self.plan.members[key.node] if width else ():
            self.expect(member, width)

    # Indexes

    def width(self, fanout: str, index: Index) -> int:
        key = Key(fanout, index)
        return items_of(self.plan, key, self.record(key))

    def indexes(self, node: str, prefix: Index = ()) -> Iterator[Index]:
        """All that a node has at present, beginning with a prefix."""
        scope = self.plan.scope(node)
        if len(prefix) >= len(scope):
            yield prefix[: len(scope)]
            return
        for number in range(self.width(scope[len(prefix)], prefix)):
            yield from self.indexes(node, (*prefix, number))

    def all_keys(self) -> Iterator[Key]:
        for node in self.plan.shape.order:
            for index in self.indexes(node):
                yield Key(node, index)

    # Held executions

    def hold(self, key: Key) -> None:
        node = self.plan.node(key.node)
        priority = node.priority if isinstance(node, WorkflowNode) else 0
        row = self.rows.get(priority, Row(priority, 0, 0))
        self.held[priority, row.end] = key
        self.rows[priority] = row._replace(end=row.end + 1)
        self.update(key, status=Status.HELD, place=row.end)

    def next_held(self) -> tuple[Row, Key] | None:
        waiting = [row for row in self.rows.values() if row.first < row.end]
        if not waiting:
            return None
        row = max(waiting)
        place = (row.priority, row.first)
        return row, self.held[place] if place in self.held else self.was.held[place]

    def take_held(self, row: Row) -> None:
        self.no_longer_held.add((row.priority, row.first))
        self.rows[row.priority] = row._replace(first=row.first + 1)

    def hold_none(self) -> None:
        self.held.clear()
        self.no_longer_held.update(self.was.held)
        self.rows.clear()

    # The end of it

    def finished(self) -> Advance:
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
        )
        return Advance(tuple(self.actions), run, tuple(self.records))


def items_of(plan: Plan, key: Key, record: Record) -> int:
    """How many items a per-item fan-out has given; 0 for everything else."""
    node = plan.node(key.node)
    if not isinstance(node, FanOutNode) or not node.per_item or record.outputs is None:
        return 0
    return len(record.outputs[ITEM_PORT])
