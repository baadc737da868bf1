"""Keeps the first segments of a chain and closes the chain behind them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.convert import convert
from comfyfleet.workflow.model import Mode, Workflow
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.places import join_places
from comfyfleet.workflow.switching.carrying_out import CarriedOut, carry_out
from comfyfleet.workflow.switching.chains import chains_of
from comfyfleet.workflow.switching.choosing import check_count, choose, described
from comfyfleet.workflow.switching.closing import Plan, plan_closing
from comfyfleet.workflow.switching.copies import count_instances
from comfyfleet.workflow.switching.documents import JsonObject, graph_paths
from comfyfleet.workflow.switching.levels import End, Level, read_level
from comfyfleet.workflow.switching.model import Chain, Switched
from comfyfleet.workflow.switching.selectors import place_of
from comfyfleet.workflow.switching.switch import enable_nodes

NODES_LISTED_MAX = 12


def keep_segments(
    document: dict[str, Any],
    count: int,
    *,
    chain: str | None = None,
    object_info: Mapping[str, Any] | None = None,
) -> Switched:
    """Switches off all segments but the first `count`; what came after the chain is fed by the last
    one that is kept. If fewer than `count` are on, the next ones that are off are switched on first.

    Nodes that lead to what comes after the chain are bypassed, dead branches muted. A link is moved
    only where a bypass would pass on nothing, or the wrong thing; nodes behind a moved link are
    muted. Those that are never executed (reroutes, Set and Get, notes) are left as they are. Without
    `object_info` the types of slots are those that were saved. Segments that are off already, and
    dead shells, count only where they are needed. Raises InvalidInput where an input would be fed by nothing.
    """
    workflow = parse(document)
    types = NodeTypes(object_info or {})
    chosen = choose(chains_of(document, workflow, types), chain)
    check_count(chosen, count)
    if count > len(chosen.segments):
        return _with_those_that_are_off(document, chosen, count, object_info)
    if count == len(chosen.segments):
        return Switched(document, (f"kept all of {described(chosen)}",))
    level = read_level(workflow, chosen.graph, types)
    plan = plan_closing(level, [segment.nodes for segment in chosen.segments], count)
    carried_out = carry_out(document, workflow, chosen.graph, plan, level=level, types=types)
    missing = _missing(carried_out, object_info or {})
    if missing:
        title = chosen.segments[count - 1].title
        raise InvalidInput(
            f'{described(chosen)} can\'t be closed behind "{title}": '
            f"nothing would feed {', '.join(missing)}"
        )
    report = _Report(level, workflow)
    return Switched(
        carried_out.document,
        tuple(_done(chosen, count, carried_out, report)),
        tuple(_warnings(chosen, document, plan, report)),
    )


def _with_those_that_are_off(
    document: JsonObject, chain: Chain, count: int, object_info: Mapping[str, Any] | None
) -> Switched:
    """All are switched on first, so that the chain is whole, then those behind the last go off."""
    nodes = {node for segment in chain.off for node in segment.nodes}
    enabled = enable_nodes(document, chain.graph, nodes, chain.name)
    name = f"{chain.kind}:{chain.name}"
    kept = keep_segments(enabled.document, count, chain=name, object_info=object_info)
    first = sorted((*chain.segments, *chain.off), key=lambda segment: segment.number)[:count]
    titles = ", ".join(f'"{segment.title}"' for segment in first if segment in chain.off)
    return kept._replace(
        done=(f"switched on {titles}", *kept.done),
        warnings=(*enabled.warnings, *kept.warnings),
    )


def _missing(carried_out: CarriedOut, object_info: Mapping[str, Any]) -> list[str]:
    """Inputs of the prompt that had a link and have none any more."""
    before = convert(carried_out.only_cut, object_info, unknown="keep")
    after = convert(carried_out.document, object_info, unknown="keep")
    return [
        join_places(f"node {key} {entry['_meta']['title']}", f"input {name}")
        for key, entry in after.items()
        for name, value in before.get(key, entry)["inputs"].items()
        if isinstance(value, list)
        and not isinstance(entry["inputs"].get(name), list)
        and not _is_optional(object_info, entry.get("class_type"), name)
    ]


def _is_optional(object_info: Mapping[str, Any], class_type: Any, name: str) -> bool:
    declared = object_info.get(class_type)
    inputs = declared.get("input") if isinstance(declared, dict) else None
    return isinstance(inputs, dict) and name not in (inputs.get("required") or {})


class _Report(NamedTuple):
    """Names what a plan speaks of."""

    level: Level
    workflow: Workflow

    def node(self, node: str) -> str:
        return place_of(self.level.nodes[node].node, self.workflow)

    def input(self, end: End) -> str:
        return join_places(self.node(end.node), f"input {self.level.input_name(end)}")


def _done(chain: Chain, count: int, carried_out: CarriedOut, report: _Report) -> Iterator[str]:
    first, last = chain.segments[0].title, chain.segments[count - 1].title
    kept = f'"{first}"' if count == 1 else f'"{first}" to "{last}"'
    yield f"kept {kept} of {described(chain)}"
    for mode, word in ((Mode.BYPASSED, "bypassed"), (Mode.MUTED, "muted")):
        nodes = [node for node in report.level.nodes if carried_out.modes.get(node) == mode]
        if nodes:
            more = len(nodes) - NODES_LISTED_MAX
            listed = ", ".join(nodes[:NODES_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
            yield f"{word} node{'' if len(nodes) == 1 else 's'} {listed}"
    for end, source in carried_out.moves.items():
        yield f"{report.input(end)} is now fed by {report.node(source.node_id)}"


def _warnings(chain: Chain, document: JsonObject, plan: Plan, report: _Report) -> Iterator[str]:
    if chain.graph:
        count = count_instances(document, chain.graph, graph_paths(document))
        if count > 1:
            yield f"the chain is in a subgraph with {count} instances: it changes in all of them"
    for node in plan.staying:
        yield f"{report.node(node)} stays on, though its segment goes: it is needed elsewhere"
    for end in plan.lost:
        yield f"{report.input(end)} is not fed any more"
