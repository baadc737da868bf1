"""Compares two runs, value by value: what went in, what the graphs say, what it cost, how long it took, what came out. Pure.

Values are texts by name. Files are compared by their content hash, or by their id where that is not known."""

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
VALUES_MAX = 2_000  # that are listed
LEAVES_MAX = 10_000  # of the inputs, nodes or outputs of one run that are compared one by one
DEPTH_MAX = 30
NAME_CHARACTERS_MAX = 64  # of one part of a path
HASH_DIGITS = 12  # that are shown
SAME_SECONDS = 0.1  # times that differ by less are the same,
SAME_PART = 0.1  # as are those that differ by less than this part
# They are of one run, and so never the same in two.
_OWN_FIELDS = frozenset({"prompt_id", "execution_time"})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is compared of a run."""

    head: RunRow
    plan: RunPlan
    run: GraphRunState
    timeline: RunTimeline


class Leaf(NamedTuple):
    """One value: what it is told apart by, and how it is shown."""

    identity: Any
    text: str


Hashes = Mapping[str, str]  # content hashes by file id


def compare_runs(
    a: RunFacts, b: RunFacts, hashes: Hashes, *, with_same: bool = False
) -> RunComparison:
    """`hashes` has the content hashes of the files in both runs, as far as they are known."""
    found = list(_compared(_values(a, hashes), _values(b, hashes)))
    listed = [each for each in found if with_same or not each.is_same]
    same = sum(each.is_same for each in found)
    return RunComparison(
        a=_compared_run(a),
        b=_compared_run(b),
        values=tuple(listed[:VALUES_MAX]),
        same=same,
        different=len(found) - same,
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
        CompareSection.STATES: {each.id: _leaf(_state(each)) for each in facts.timeline.nodes},
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
    # 1 equals True in Python, and 1.0 equals 1 in graphs.
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
    told = {
        "graph": facts.plan.graph.name,
        "graph_id": str(head.graph_id),
        "version": head.graph_version,
        "status": run.status.value,
        "tokens": run.tokens,
        "max_tokens": run.max_tokens,
        "error": run.error.message if run.error else None,
    }
    return {name: _leaf(value) for name, value in told.items() if value is not None}


def _of_nodes(plan: RunPlan, hashes: Hashes) -> dict[str, Leaf]:
    """Fields of the nodes as they are written, and settings of the graph."""
    document = write_graph(plan.source)
    nodes = {each["id"]: each for each in document.pop("nodes", ())}
    for name in ("name", "connections", "layout"):
        document.pop(name, None)
    fields = {
        name: {key: value for key, value in each.items() if key != "id"}
        for name, each in nodes.items()
    }
    return _leaves({**document, **fields}, hashes)


def _of_connections(plan: RunPlan) -> dict[str, Leaf]:
    return {
        f"{each.source} → {each.target}": Leaf(True, "connected")
        for each in plan.source.connections
    }


def _of_workflows(plan: RunPlan) -> dict[str, Leaf]:
    """Versions of workflows, also of those inside maps, loops and graphs, and of the graphs inside."""
    workflows = {
        node: _leaf(f"{plan.workflows[node].name} v{plan.workflows[node].version}")
        for node in plan.shape.order
        if node in plan.workflows
    }
    graphs = {f"graph {name}": _leaf(f"v{version}") for name, version in plan.library}
    return {**workflows, **graphs}


def _state(each: NodeTimeline) -> str:
    return (
        f"{each.status.value}, {each.executions} of {each.expected}"
        if each.expected > 1
        else each.status.value
    )


def _prices(facts: RunFacts) -> dict[str, Leaf]:
    """What each node has cost: its jobs that are done; those that were reused cost nothing."""
    jobs = dict.fromkeys(
        (each for each in facts.plan.shape.order if each in facts.plan.workflows), 0
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
    """How long the run took, and what each node did in that time."""
    found = {"run": timeline.seconds}
    for each in timeline.nodes:
        for kind, seconds in each.seconds.model_dump().items():
            if seconds:
                found[f"{each.id} {kind}"] = seconds
    return {name: Leaf(seconds, f"{seconds:.1f} s") for name, seconds in found.items()}


def _leaves(value: Mapping[str, Any], hashes: Hashes) -> dict[str, Leaf]:
    """Returns the values inside a value by their paths; if there are too many, the rest as one."""
    walk = _walk(value, (), hashes) if value else iter(())
    found = dict(islice(walk, LEAVES_MAX))
    rest = [leaf.identity for _, leaf in walk]
    if rest:
        found["…"] = Leaf(rest, f"{len(rest):,} more values")
    return found


def _short(name: str) -> str:
    """Cuts a name so that no two become the same: thousands of values may have it in their paths."""
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
    """The fields of a value; of a workflow's result, what it made, and each file once."""
    if not {"images", "files"} <= value.keys():
        return value.items()
    gone = _OWN_FIELDS | ({"images"} if value["images"] == value["files"] else frozenset())
    return [(name, each) for name, each in value.items() if name not in gone]


def _file(value: Mapping[str, Any], hashes: Hashes) -> Leaf:
    file_id = str(value["file_id"])
    name = str(value.get("filename") or file_id)
    found = hashes.get(file_id)
    if found is None:
        return Leaf(("id", file_id), f"{name} (id {file_id})")
    return Leaf(("hash", found), f"{name} ({found[:HASH_DIGITS]})")
