"""Plans and runs as JSON rows and back. Pure; what can be counted again from the records is not kept.

Each change of a run writes its row and the records that changed; reading it costs all of its records."""

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
    facts = {(each.name, each.slug, each.version): each for each in plan.workflows.values()}
    graphs = [
        {"name": name, "version": version, "graph": write_graph(graph)}
        for (name, version), graph in plan.library.items()
    ]
    return {
        "graph": write_graph(plan.source),
        "workflows": [_dump_facts(each) for each in facts.values()],
        **({"graphs": graphs} if graphs else {}),
    }


def load_plan(saved: Mapping[str, Any]) -> RunPlan:
    """Loads a plan. An expired run has none left, which is a graph without nodes."""
    if not saved:
        return plan_of(GraphDefinition("", {}, ()), catalogue_of(()))
    library = {
        (each["name"], each["version"]): _load_graph(each["graph"])
        for each in saved.get("graphs", ())
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
        "properties": [asdict(each) for each in facts.properties],
        "price_tokens": facts.price_tokens,
        "typical_seconds": facts.typical_seconds,
        "required_capabilities": sorted(facts.required_capabilities),
        "is_current": facts.is_current,
        "effect": _dump_effect(facts.effect) if facts.effect else None,
        "locked_choices": [list(each) for each in facts.locked_choices],
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
        locked_choices=tuple(ModelUse(*each) for each in saved.get("locked_choices", ())),
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
    """Converts a record to JSON values; fields with their default are left out."""
    found: dict[str, Any] = {}
    for each in fields(ExecutionRecord):
        value = getattr(record, each.name)
        if value != getattr(NEW_RECORD, each.name):
            found[each.name] = value.isoformat() if isinstance(value, datetime) else value
    if record.question is not None:
        deadline = record.question.deadline
        found["question"] = {
            **record.question._asdict(),
            "deadline": deadline.isoformat() if deadline else None,
        }
    return found


def load_record(saved: Mapping[str, Any]) -> ExecutionRecord:
    found = dict(saved)
    found["status"] = ExecutionStatus(found.get("status", ExecutionStatus.PENDING))
    found["notes"] = tuple(found.get("notes", ()))
    for name in _MOMENTS:
        if name in found:
            found[name] = datetime.fromisoformat(found[name])
    if "question" in found:
        found["question"] = _load_question(found["question"])
    return ExecutionRecord(**found)


def _load_question(saved: Mapping[str, Any]) -> UserQuestion:
    deadline = saved.get("deadline")
    return UserQuestion(
        saved["message"],
        tuple(saved["backends"]),
        tuple(Choice(each) for each in saved["choices"]),
        datetime.fromisoformat(deadline) if deadline else None,
        saved.get("pick_from"),
    )


def dump_cut(run: GraphRunState) -> dict[str, Any] | None:
    """Converts the place at which a decision has stopped to JSON values; None if it did not stop.

    Which ends are left is in the records, by their numbers.
    """
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
        return None, 1 + max((each.end_number for each in records.values()), default=0)
    at = saved["notifying"]
    if at is None:
        return None, saved["next_end"]
    source = ExecutionKey(at["node"], tuple(at["at"]))
    last = None if at["last"] is None else tuple(at["last"])
    return Notifying(source, at["number"], at["target"], last), saved["next_end"]


def _unnotified(
    records: Mapping[ExecutionKey, ExecutionRecord], next_end: int
) -> tuple[ExecutionKey, ...]:
    left = [
        (each.end_number, key)
        for key, each in records.items()
        if each.end_number >= next_end and each.status.is_ended
    ]
    return tuple(key for _, key in sorted(left))


def load_run(
    plan: RunPlan,
    head: GraphRunState,
    records: Mapping[ExecutionKey, ExecutionRecord],
    cut: Mapping[str, Any] | None = None,
) -> GraphRunState:
    """Loads a run; `head` is its stored part: id, inputs, status, tokens, error, outputs,
    max_tokens.
    """
    if head.status == GraphRunStatus.PENDING:
        return head
    tallies = _tallies(plan, records)
    held = {
        (*held_row(plan, key), each.place): key
        for key, each in records.items()
        if each.status == ExecutionStatus.HELD
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
        in_flight=frozenset(key for key, each in records.items() if each.status.is_in_flight),
        asking=frozenset(
            key for key, each in records.items() if each.status == ExecutionStatus.ASKING
        ),
        open_count=sum(each.expected - each.ended for each in tallies.values()),
        size=_size(records.values()),
        outputs_size=_size(
            each for key, each in records.items() if isinstance(plan.node(key.node), OutputNode)
        ),
    )


def _size(records: Iterable[ExecutionRecord]) -> ValueSize:
    total = NO_SIZE
    for each in records:
        total = total.plus(size_of((each.inputs, each.outputs), RUN_SIZE_MAX))
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
    """Returns the held ranges. They are taken from the front only, so what is left has no gaps."""
    places: dict[tuple[int, str], list[int]] = {}
    for priority, lane, number in held:
        places.setdefault((priority, lane), []).append(number)
    return tuple(
        HeldRange(*row, min(found), max(found) + 1) for row, found in sorted(places.items())
    )
