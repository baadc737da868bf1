"""The parts that a workflow is made of: groups, subgraphs, chains, and what is switched off."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.inspection.model import (
    ChainSummary,
    GroupSummary,
    NodeRef,
    SubgraphSummary,
    SwitchedOff,
)
from comfyfleet.workflow.limits import Limits
from comfyfleet.workflow.model import Graph, Mode
from comfyfleet.workflow.naming import title_of
from comfyfleet.workflow.parse import parse_groups
from comfyfleet.workflow.scopes import Scope
from comfyfleet.workflow.switching import Chain, dead_shells, find_segments
from comfyfleet.workflow.switching.documents import graph_at, graph_paths, nodes_of
from comfyfleet.workflow.switching.insides import Canvas


class Parts(NamedTuple):
    groups: tuple[GroupSummary, ...] = ()
    subgraphs: tuple[SubgraphSummary, ...] = ()
    chains: tuple[ChainSummary, ...] = ()
    switched_off: tuple[SwitchedOff, ...] = ()
    dead_shells: tuple[NodeRef, ...] = ()


def parts_of(
    document: dict[str, Any], definitions: Mapping[str, Graph], scopes: list[Scope], limits: Limits
) -> Parts:
    """`definitions` and `scopes` are what became of the document; group nodes are subgraphs there."""
    return Parts(
        tuple(_groups(document, definitions)),
        tuple(_subgraphs(definitions, scopes)),
        tuple(_chain(chain) for chain in find_segments(document)),
        tuple(_switched_off(scopes, definitions)),
        tuple(
            NodeRef(shell.id, shell.definition, shell.title)
            for shell in dead_shells(document, limits=limits)
        ),
    )


def _groups(document: dict[str, Any], definitions: Mapping[str, Graph]) -> Iterator[GroupSummary]:
    for graph_id, path in graph_paths(document).items():
        graph = graph_at(document, path)
        canvas = Canvas(nodes_of(graph))
        for group in parse_groups(graph):
            name = definitions[graph_id].name if graph_id else None
            yield GroupSummary(group.title, len(canvas.inside(group)), name)


def _chain(chain: Chain) -> ChainSummary:
    return ChainSummary(
        chain.name,
        chain.kind,
        tuple(segment.title for segment in chain.segments),
        tuple(segment.title for segment in chain.off),
    )


def _subgraphs(definitions: Mapping[str, Graph], scopes: list[Scope]) -> Iterator[SubgraphSummary]:
    instances = Counter(scope.wired.graph.id for scope in scopes)
    for key, graph in definitions.items():
        yield SubgraphSummary(
            name=graph.name,
            nodes=len(graph.nodes),
            instances=instances[key],
            inputs=tuple(port.name for port in graph.inputs),
            outputs=tuple(port.name for port in graph.outputs),
        )


def _switched_off(scopes: list[Scope], definitions: Mapping[str, Graph]) -> Iterator[SwitchedOff]:
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if not node.node.is_inactive:
                continue
            definition = definitions.get(node.definition or "")
            class_type = definition.name if definition else node.node.type
            title = node.node.title or class_type if definition else title_of(node)
            ref = NodeRef(f"{scope.prefix}{node.node.id}", class_type, title)
            yield SwitchedOff(ref, "muted" if node.node.mode == Mode.MUTED else "bypassed")
