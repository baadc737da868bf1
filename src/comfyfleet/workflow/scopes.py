"""Pass 2, second half: the tree of graphs as it is executed, one scope per instance of a subgraph."""

from collections.abc import Mapping

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.limits import Limits
from comfyfleet.workflow.places import graph_place, join_places, node_place
from comfyfleet.workflow.wiring import WiredGraph, WiredNode


class Scope:
    """A graph in its place. `prefix` starts the ids of its nodes: `57:` for instance 57."""

    __slots__ = ("children", "instance", "parent", "prefix", "wired")

    def __init__(
        self, wired: WiredGraph, parent: "Scope | None" = None, instance: WiredNode | None = None
    ) -> None:
        self.wired = wired
        self.parent = parent
        self.instance = instance
        self.prefix: str = f"{parent.prefix}{instance.node.id}:" if parent and instance else ""
        self.children: dict[str, Scope] = {}

    def place_of(self, node: WiredNode) -> str:
        return join_places(graph_place(self.wired.graph), node_place(node.node))


def expand(graphs: Mapping[str, WiredGraph], limits: Limits) -> list[Scope]:
    """All scopes in the order of the file, the root first.

    What is inside a muted or bypassed instance at the root is gone. Deeper down such an instance
    only stops feeding others: its inner nodes are still sent, as the editor does it.
    """
    scopes = [Scope(graphs[""])]
    budget = limits.nodes_max
    pending = [(scopes[0], 0)]
    while pending:
        scope, depth = pending.pop()
        budget -= len(scope.wired.nodes)
        if depth > limits.subgraph_depth_max or budget < 0:
            _refuse(scope, limits)
        inner = []
        for node in scope.wired.nodes.values():
            if node.definition is None or (depth == 0 and node.node.is_inactive):
                continue
            child = Scope(graphs[node.definition], scope, node)
            scope.children[node.node.id] = child
            scopes.append(child)
            inner.append((child, depth + 1))
        pending.extend(reversed(inner))
    return scopes


def _refuse(scope: Scope, limits: Limits) -> None:
    raise LimitExceeded(
        f"{graph_place(scope.wired.graph)}: more than {limits.nodes_max} nodes or "
        f"{limits.subgraph_depth_max} levels of subgraphs when expanded"
    )
