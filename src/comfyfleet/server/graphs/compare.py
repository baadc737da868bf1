"""Compares the inputs, graphs, prices, durations and outputs of two runs. This module does no I/O.

Each value has a name and a text. Files are compared by content hash, or by id if the hash is
unknown."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from comfyfleet.api.graph_parse import write_graph
from comfyfleet.api.graph_reports import (
    ComparedRun,
    ComparedValue,
    CompareSection,
    NodeTimeline,
    RunComparison,
    RunTimeline,
)
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.run import ExecutionStatus, GraphRunState, RunRow

VALUE_CHARACTERS_MAX = 300
VALUES_MAX = 2_000  # Maximum number of values in a report.
LEAVES_MAX = 10_000  # Maximum number of values compared separately in each part of a run.
DEPTH_MAX = 30
NAME_CHARACTERS_MAX = 64  # Maximum length of a path segment.
HASH_DIGITS = 12  # Number of digits to show of a content hash.
# Durations count as equal if they differ by at most this many seconds, or by at most the fraction
# SAME_PART.
SAME_SECONDS = 0.1
SAME_PART = 0.1
# Fields that always differ between two runs.
_OWN_FIELDS = frozenset({"prompt_id", "execution_time"})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run's data for a comparison."""

    head: RunRow
    plan: RunPlan
    run: GraphRunState
    timeline: RunTimeline


class Leaf(NamedTuple):
    """A single value. `identity` is used for comparisons, and `text` for display."""

    identity: Any
    text: str


Hashes = Mapping[str, str]  # Content hashes by file id.


def compare_runs(
    a: RunFacts, b: RunFacts, hashes: Hashes, *, with_same: bool = False
) -> RunComparison:
    """Compares two runs. `hashes` contains the known content hashes of the files in both runs. If
    `with_same` is set, equal values are listed as well."""
    compared = list(_compared(_values(a, hashes), _values(b, hashes)))
    listed = [value for value in compared if with_same or not value.is_same]
    same = sum(value.is_same for value in compared)
    return RunComparison(
        a=_compared_run(a),
        b=_compared_run(b),
        values=tuple(listed[:VALUES_MAX]),
        same=same,
        different=len(compared) - same,
        left_out=max(0, len(listed) - VALUES_MAX),
    )


def _compared_run(facts: RunFacts) -> ComparedRun:
    head = facts.head
    return ComparedRun(
        id=head.id,
        graph_id=head.graph_id,
        graph_version=head.graph_version,
        name=facts.plan.graph.name,
        status=facts.run.status,
        created_at=head.created_at,
        is_expired=head.is_expired,
    )


Values = Mapping[CompareSection, Mapping[str, Leaf]]


def _values(facts: RunFacts, hashes: Hashes) -> Values:
    outputs = facts.run.outputs or {}
    return {
        CompareSection.RUN: _of_run(facts),
        CompareSection.INPUTS: _leaves(facts.head.inputs, hashes),
        CompareSection.NODES: _of_nodes(facts.plan, hashes),
        CompareSection.CONNECTIONS: _of_connections(facts.plan),
        CompareSection.WORKFLOWS: _of_workflows(facts.plan),
        CompareSection.STATES: {node.id: _leaf(_state(node)) for node in facts.timeline.nodes},
        CompareSection.PRICES: _prices(facts),
        CompareSection.TIMES: _times(facts.timeline),
        CompareSection.OUTPUTS: _leaves(outputs, hashes),
    }


def _compared(a: Values, b: Values) -> Iterator[ComparedValue]:
    for section in CompareSection:
        ours, theirs = a[section], b[section]
        for name in dict.fromkeys((*ours, *theirs)):
            one, two = ours.get(name), theirs.get(name)
            yield ComparedValue(
                section=section,
                name=_cut(name),
                a=_cut(one.text) if one else None,
                b=_cut(two.text) if two else None,
                is_same=_is_same(section, one, two),
            )


def _is_same(section: CompareSection, one: Leaf | None, two: Leaf | None) -> bool:
    if one is None or two is None:
        return False
    if section == CompareSection.TIMES:
        apart = abs(one.identity - two.identity)
        return bool(apart <= max(SAME_SECONDS, SAME_PART * max(one.identity, two.identity)))
    # In Python, True equals 1. In graphs, a boolean never equals a number.
    return isinstance(one.identity, bool) == isinstance(two.identity, bool) and bool(
        one.identity == two.identity
    )


def _cut(text: str) -> str:
    most = VALUE_CHARACTERS_MAX
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _leaf(value: Any) -> Leaf:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return Leaf(value, text)


def _of_run(facts: RunFacts) -> dict[str, Leaf]:
    head, run = facts.head, facts.run
    fields = {
        "graph": facts.plan.graph.name,
        "graph_id": str(head.graph_id),
        "version": head.graph_version,
        "status": run.status.value,
        "tokens": run.tokens,
        "max_tokens": run.max_tokens,
        "error": run.error.message if run.error else None,
    }
    return {name: _leaf(value) for name, value in fields.items() if value is not None}


def _of_nodes(plan: RunPlan, hashes: Hashes) -> dict[str, Leaf]:
    """Returns the fields of the nodes in the graph's document, and the graph's settings."""
    document = write_graph(plan.source)
    nodes = {node["id"]: node for node in document.pop("nodes", ())}
    for name in ("name", "connections", "layout"):
        document.pop(name, None)
    fields = {
        name: {key: value for key, value in node.items() if key != "id"}
        for name, node in nodes.items()
    }
    return _leaves({**document, **fields}, hashes)


def _of_connections(plan: RunPlan) -> dict[str, Leaf]:
    return {
        f"{connection.source} → {connection.target}": Leaf(True, "connected")
        for connection in plan.source.connections
    }


def _of_workflows(plan: RunPlan) -> dict[str, Leaf]:
    """Returns the versions of all workflows and subgraphs, including nested ones."""
    workflows = {
        node: _leaf(f"{plan.workflows[node].name} v{plan.workflows[node].version}")
        for node in plan.shape.order
        if node in plan.workflows
    }
    graphs = {f"graph {name}": _leaf(f"v{version}") for name, version in plan.library}
    return {**workflows, **graphs}


def _state(node: NodeTimeline) -> str:
    return (
        f"{node.status.value}, {node.executions} of {node.expected}"
        if node.expected > 1
        else node.status.value
    )


def _prices(facts: RunFacts) -> dict[str, Leaf]:
    """Returns the total price of each node's completed jobs. Reused results are free."""
    jobs = dict.fromkeys(
        (node for node in facts.plan.shape.order if node in facts.plan.workflows), 0
    )
    for key, record in facts.run.records.items():
        if key.node in jobs and record.status == ExecutionStatus.DONE and not record.reused_from:
            jobs[key.node] += 1
    return {
        node: Leaf(cost, f"{cost:,} tokens")
        for node, count in jobs.items()
        for cost in [count * facts.plan.workflows[node].price_tokens]
    }


def _times(timeline: RunTimeline) -> dict[str, Leaf]:
    """Returns the duration of the run, and the seconds that each node spent on each activity."""
    times = {"run": timeline.seconds}
    for node in timeline.nodes:
        for kind, seconds in node.seconds.model_dump().items():
            if seconds:
                times[f"{node.id} {kind}"] = seconds
    return {name: Leaf(seconds, f"{seconds:.1f} s") for name, seconds in times.items()}


def _leaves(value: Mapping[str, Any], hashes: Hashes) -> dict[str, Leaf]:
    """Returns all inner values of a value by their paths. Values beyond the limit are combined into
    one."""
    walk = _walk(value, (), hashes) if value else iter(())
    leaves = dict(islice(walk, LEAVES_MAX))
    rest = [leaf.identity for _, leaf in walk]
    if rest:
        leaves["…"] = Leaf(rest, f"{len(rest):,} more values")
    return leaves


def _short(name: str) -> str:
    """Shortens a long name, because it may occur in thousands of paths. A hash keeps shortened
    names distinct."""
    if len(name) <= NAME_CHARACTERS_MAX:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{name[:NAME_CHARACTERS_MAX]}…{digest[:HASH_DIGITS]}"


def _walk(value: Any, path: tuple[str, ...], hashes: Hashes) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, Mapping) and "file_id" in value:
        yield ".".join(path), _file(value, hashes)
    elif len(path) < DEPTH_MAX and isinstance(value, Mapping) and value:
        for name, inner in _result_fields(value):
            yield from _walk(inner, (*path, _short(str(name))), hashes)
    elif len(path) < DEPTH_MAX and isinstance(value, list | tuple) and value:
        for number, inner in enumerate(value):
            yield from _walk(inner, (*path, str(number)), hashes)
    else:
        yield ".".join(path), _leaf(value)


def _result_fields(value: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Returns the fields of an object. For the result of a job, leaves out fields that are unique
    to the run, and lists each file only once."""
    if not {"images", "files"} <= value.keys():
        return value.items()
    skipped = _OWN_FIELDS | ({"images"} if value["images"] == value["files"] else frozenset())
    return [(name, inner) for name, inner in value.items() if name not in skipped]


def _file(value: Mapping[str, Any], hashes: Hashes) -> Leaf:
    file_id = str(value["file_id"])
    name = str(value.get("filename") or file_id)
    digest = hashes.get(file_id)
    if digest is None:
        return Leaf(("id", file_id), f"{name} (id {file_id})")
    return Leaf(("hash", digest), f"{name} ({digest[:HASH_DIGITS]})")
