"""The parts that a workflow is made of: groups, subgraphs, and what is switched off."""

from collections import Counter
from collections.abc import Iterator, Mapping

from comfyfleet.workflow.inspection.model import NodeRef, SubgraphSummary, SwitchedOff
from comfyfleet.workflow.model import Graph, Mode
from comfyfleet.workflow.naming import title_of
from comfyfleet.workflow.scopes import Scope


def subgraphs_in(
    definitions: Mapping[str, Graph], scopes: list[Scope]
) -> Iterator[SubgraphSummary]:
    instances = Counter(scope.wired.graph.id for scope in scopes)
    for key, graph in definitions.items():
        yield SubgraphSummary(
            name=graph.name,
            nodes=len(graph.nodes),
            instances=instances[key],
            inputs=tuple(port.name for port in graph.inputs),
            outputs=tuple(port.name for port in graph.outputs),
        )


def switched_off(scopes: list[Scope], definitions: Mapping[str, Graph]) -> Iterator[SwitchedOff]:
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if not node.node.is_inactive:
                continue
            definition = definitions.get(node.definition or "")
            class_type = definition.name if definition else node.node.type
            title = node.node.title or class_type if definition else title_of(node)
            ref = NodeRef(f"{scope.prefix}{node.node.id}", class_type, title)
            yield SwitchedOff(ref, "muted" if node.node.mode == Mode.MUTED else "bypassed")
