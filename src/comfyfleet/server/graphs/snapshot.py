"""Converts plans and runs to JSON and back, without I/O. Values that can be calculated from the
records aren't stored.

Each change of a run writes the run's row and the changed records. A read of a run reads all of its
records."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.api.graph_model import GraphDefinition, OutputNode
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.fleets.model import ModelUse
from comfyfleet.server.graphs.catalogue import EffectTerms, WorkflowFacts, catalogue_of
from comfyfleet.server.graphs.draft import held_row, items_of
from comfyfleet.server.graphs.plan import RunPlan, plan_of, raise_problems
from comfyfleet.server.graphs.run import (
    NEW_RECORD,
    NO_SIZE,
    RUN_SIZE_MAX,
    Choice,
    ExecutionCounts,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    HeldPlace,
    HeldRange,
    Notifying,
    PersistentMap,
    UserQuestion,
    ValueSize,
    size_of,
)


def dump_plan(plan: RunPlan) -> dict[str, Any]:
    """Converts a plan to JSON values."""
    facts = {
        (workflow.name, workflow.slug, workflow.version): workflow
        for workflow in plan.workflows.values()
    }
    graphs = [
        {"name": name, "version": version, "graph": write_graph(graph)}
        for (name, version), graph in plan.library.items()
    ]
    return {
        "graph": write_graph(plan.source),
        "workflows": [_dump_facts(workflow) for workflow in facts.values()],
        **({"graphs": graphs} if graphs else {}),
    }


def load_plan(saved: Mapping[str, Any]) -> RunPlan:
    """Loads a plan. For an expired run, whose plan was deleted, returns a plan without nodes."""
    if not saved:
        return plan_of(GraphDefinition("", {}, ()), catalogue_of(()))
    library = {
        (entry["name"], entry["version"]): _load_graph(entry["graph"])
        for entry in saved.get("graphs", ())
    }
    catalogue = catalogue_of(tuple(map(_load_facts, saved["workflows"])))
    return plan_of(_load_graph(saved["graph"]), catalogue, library)


def _load_graph(document: Mapping[str, Any]) -> GraphDefinition:
    parsed = parse_graph(document)
    raise_problems(list(parsed.problems))
    return parsed.graph


def _dump_facts(facts: WorkflowFacts) -> dict[str, Any]:
    return {
        "slug": facts.slug,
        "version": facts.version,
        "properties": [asdict(prop) for prop in facts.properties],
        "price_tokens": facts.price_tokens,
        "typical_seconds": facts.typical_seconds,
        "required_capabilities": sorted(facts.required_capabilities),
        "is_current": facts.is_current,
        "effect": _dump_effect(facts.effect) if facts.effect else None,
        "locked_choices": [list(choice) for choice in facts.locked_choices],
    }


def _dump_effect(effect: EffectTerms) -> dict[str, Any]:
    return {**asdict(effect), "id": str(effect.id)}


def _load_facts(saved: Mapping[str, Any]) -> WorkflowFacts:
    return WorkflowFacts(
        slug=saved["slug"],
        version=saved["version"],
        properties=tuple(map(_load_property, saved["properties"])),
        price_tokens=saved["price_tokens"],
        typical_seconds=saved["typical_seconds"],
        required_capabilities=frozenset(saved["required_capabilities"]),
        is_current=saved["is_current"],
        effect=_load_effect(saved.get("effect")),
        locked_choices=tuple(ModelUse(*choice) for choice in saved.get("locked_choices", ())),
    )


def _load_effect(saved: Mapping[str, Any] | None) -> EffectTerms | None:
    if saved is None:
        return None
    tuples = {name: tuple(saved[name]) for name in ("locked", "media_types")}
    return EffectTerms(**{**saved, **tuples, "id": UUID(saved["id"])})


def _load_property(saved: Mapping[str, Any]) -> Property:
    choices = saved["choices"]
    return Property(**{**saved, "choices": None if choices is None else tuple(choices)})


_MOMENTS = ("asked_at", "answered_at", "queued_at", "started_at", "ended_at")


def dump_record(record: ExecutionRecord) -> dict[str, Any]:
    """Converts a record to JSON values. Leaves out fields with default values."""
    saved: dict[str, Any] = {}
    for field in fields(ExecutionRecord):
        value = getattr(record, field.name)
        if value != getattr(NEW_RECORD, field.name):
            saved[field.name] = value.isoformat() if isinstance(value, datetime) else value
    if record.question is not None:
        deadline = record.question.deadline
        saved["question"] = {
            **record.question._asdict(),
            "deadline": deadline.isoformat() if deadline else None,
        }
    return saved


def load_record(saved: Mapping[str, Any]) -> ExecutionRecord:
    values = dict(saved)
    values["status"] = ExecutionStatus(values.get("status", ExecutionStatus.PENDING))
    values["notes"] = tuple(values.get("notes", ()))
    for name in _MOMENTS:
        if name in values:
            values[name] = datetime.fromisoformat(values[name])
    if "question" in values:
        values["question"] = _load_question(values["question"])
    return ExecutionRecord(**values)


def _load_question(saved: Mapping[str, Any]) -> UserQuestion:
    deadline = saved.get("deadline")
    return UserQuestion(
        saved["message"],
        tuple(saved["backends"]),
        tuple(Choice(choice) for choice in saved["choices"]),
        datetime.fromisoformat(deadline) if deadline else None,
        saved.get("pick_from"),
    )


def dump_cut(run: GraphRunState) -> dict[str, Any] | None:
    """Converts the point where a decision stopped early to JSON values. Returns None if it didn't
    stop early.

    The ends that remain to be processed aren't included, because the records contain their
    numbers."""
    if not run.is_cut:
        return None
    at = run.notifying
    notifying = at and {
        "node": at.source.node,
        "at": list(at.source.at),
        "number": at.number,
        "target": at.target,
        "last": None if at.last is None else list(at.last),
    }
    return {"next_end": run.next_end, "notifying": notifying, "steps": run.decision_steps}


def _load_cut(
    saved: Mapping[str, Any] | None, records: Mapping[ExecutionKey, ExecutionRecord]
) -> tuple[Notifying | None, int]:
    if not saved:
        return None, 1 + max((record.end_number for record in records.values()), default=0)
    at = saved["notifying"]
    if at is None:
        return None, saved["next_end"]
    source = ExecutionKey(at["node"], tuple(at["at"]))
    last = None if at["last"] is None else tuple(at["last"])
    return Notifying(source, at["number"], at["target"], last), saved["next_end"]


def _unnotified(
    records: Mapping[ExecutionKey, ExecutionRecord], next_end: int
) -> tuple[ExecutionKey, ...]:
    remaining = [
        (record.end_number, key)
        for key, record in records.items()
        if record.end_number >= next_end and record.status.is_ended
    ]
    return tuple(key for _, key in sorted(remaining))


def load_run(
    plan: RunPlan,
    head: GraphRunState,
    records: Mapping[ExecutionKey, ExecutionRecord],
    cut: Mapping[str, Any] | None = None,
) -> GraphRunState:
    """Loads a run. `head` contains the stored fields of the run's row, such as its inputs and
    status."""
    if head.status == GraphRunStatus.PENDING:
        return head
    tallies = _tallies(plan, records)
    held = {
        (*held_row(plan, key), record.place): key
        for key, record in records.items()
        if record.status == ExecutionStatus.HELD
    }
    notifying, next_end = _load_cut(cut, records)
    return replace(
        head,
        unnotified=_unnotified(records, next_end),
        notifying=notifying,
        next_end=next_end,
        decision_steps=cut["steps"] if cut else 0,
        records=PersistentMap(records),
        tallies=PersistentMap(tallies),
        held=PersistentMap(held),
        rows=_rows(held),
        in_flight=frozenset(key for key, record in records.items() if record.status.is_in_flight),
        asking=frozenset(
            key for key, record in records.items() if record.status == ExecutionStatus.ASKING
        ),
        open_count=sum(tally.expected - tally.ended for tally in tallies.values()),
        size=_size(records.values()),
        outputs_size=_size(
            record for key, record in records.items() if isinstance(plan.node(key.node), OutputNode)
        ),
    )


def _size(records: Iterable[ExecutionRecord]) -> ValueSize:
    total = NO_SIZE
    for record in records:
        total = total.plus(size_of((record.inputs, record.outputs), RUN_SIZE_MAX))
    return total


def _tallies(
    plan: RunPlan, records: Mapping[ExecutionKey, ExecutionRecord]
) -> dict[str, ExecutionCounts]:
    expected = Counter({node: 1 for node in plan.shape.order if not plan.scope(node)})
    tallies: dict[str, ExecutionCounts] = {}
    for key, record in records.items():
        width = items_of(plan, key, record)
        for member in plan.members[key.node] if width else ():
            expected[member] += width
        if record.status.is_ended:
            tallies[key.node] = tallies.get(key.node, ExecutionCounts()).counted(record.status)
    return {
        node: tallies.get(node, ExecutionCounts())._replace(expected=count)
        for node, count in expected.items()
    }


def _rows(held: Iterable[HeldPlace]) -> tuple[HeldRange, ...]:
    """Returns the ranges of held executions. Executions are only removed from the front, so a range
    has no gaps."""
    places: dict[tuple[int, str], list[int]] = {}
    for priority, lane, number in held:
        places.setdefault((priority, lane), []).append(number)
    return tuple(
        HeldRange(*row, min(numbers), max(numbers) + 1) for row, numbers in sorted(places.items())
    )
