"""A run as rows and back: what can be counted again from its records is not kept.

Each change of a run writes its head and the records that changed; reading it costs all of its records.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from comfyfleet.graphs.buckets import Buckets
from comfyfleet.graphs.budget import NOTHING, RUN_MAX, Size, size_of
from comfyfleet.graphs.draft import items_of
from comfyfleet.graphs.model import OutputNode, WorkflowNode
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.runs import (
    FRESH,
    Choice,
    Key,
    Question,
    Record,
    Row,
    Run,
    RunStatus,
    Status,
    Tally,
)

_MOMENTS = ("queued_at", "started_at", "ended_at")


def saved_record(record: Record) -> dict[str, Any]:
    """As JSON takes it; what is as in a fresh record is left out."""
    found: dict[str, Any] = {}
    for each in fields(Record):
        value = getattr(record, each.name)
        if value != getattr(FRESH, each.name):
            found[each.name] = value.isoformat() if isinstance(value, datetime) else value
    if record.question is not None:
        found["question"] = record.question._asdict()
    return found


def restored_record(saved: Mapping[str, Any]) -> Record:
    found = dict(saved)
    found["status"] = Status(found.get("status", Status.PENDING))
    found["notes"] = tuple(found.get("notes", ()))
    for name in _MOMENTS:
        if name in found:
            found[name] = datetime.fromisoformat(found[name])
    if "question" in found:
        asked = found["question"]
        choices = tuple(Choice(each) for each in asked["choices"])
        found["question"] = Question(asked["message"], tuple(asked["backends"]), choices)
    return Record(**found)


def restored(plan: Plan, head: Run, records: Mapping[Key, Record]) -> Run:
    """`head` is the run as far as it is kept apart: id, inputs, status, tokens, error, outputs, max_tokens."""
    if head.status == RunStatus.PENDING:
        return head
    tallies = _tallies(plan, records)
    held = {
        _place(plan, key, each): key for key, each in records.items() if each.status == Status.HELD
    }
    return replace(
        head,
        records=Buckets(records),
        tallies=Buckets(tallies),
        held=Buckets(held),
        rows=_rows(held),
        in_flight=frozenset(key for key, each in records.items() if each.status.is_in_flight),
        asking=frozenset(key for key, each in records.items() if each.status == Status.ASKING),
        open_count=sum(each.expected - each.ended for each in tallies.values()),
        size=_size(records.values()),
        outputs_size=_size(
            each for key, each in records.items() if isinstance(plan.node(key.node), OutputNode)
        ),
    )


def _size(records: Iterable[Record]) -> Size:
    total = NOTHING
    for each in records:
        total = total.plus(size_of((each.inputs, each.outputs), RUN_MAX))
    return total


def _tallies(plan: Plan, records: Mapping[Key, Record]) -> dict[str, Tally]:
    expected = Counter({node: 1 for node in plan.shape.order if not plan.scope(node)})
    tallies: dict[str, Tally] = {}
    for key, record in records.items():
        width = items_of(plan, key, record)
        for member in plan.members[key.node] if width else ():
            expected[member] += width
        if record.status.is_ended:
            tallies[key.node] = tallies.get(key.node, Tally()).counted(record.status)
    return {
        node: tallies.get(node, Tally())._replace(expected=count)
        for node, count in expected.items()
    }


def _place(plan: Plan, key: Key, record: Record) -> tuple[int, int]:
    node = plan.node(key.node)
    return (node.priority if isinstance(node, WorkflowNode) else 0, record.place)


def _rows(held: Iterable[tuple[int, int]]) -> tuple[Row, ...]:
    """They are taken from the front only, so that what is left has no gaps."""
    places: dict[int, list[int]] = {}
    for priority, number in held:
        places.setdefault(priority, []).append(number)
    return tuple(
        Row(priority, min(found), max(found) + 1) for priority, found in sorted(places.items())
    )
