"""In which order the nodes of a prompt run.

Nodes may be added while others run (lazy inputs), so this is a graph that dissolves, not a list.
The order is ComfyUI's, which clients see: outputs as soon as they can, then what leads to them.
"""

from collections.abc import Callable

from comfyfleet.engine.inputs import is_link
from comfyfleet.engine.validate import Prompt
from comfyfleet.kernel.errors import NodeFailed

# How far before an output a node is still preferred to others that are ready.
STEPS_BEFORE_OUTPUT_MAX = 2

NodeTest = Callable[[str], bool]


class MissingNode(NodeFailed):
    """An input that nobody checks is linked to a node that is not in the prompt."""

    def __init__(self, node_id: str, missing: str) -> None:
        super().__init__(f"Node {missing} not found", exception_type="graph.NodeNotFoundError")
        self.node_id = node_id


class DependencyCycle(NodeFailed):
    def __init__(self, node_id: str) -> None:
        super().__init__("Dependency cycle detected", exception_type="graph.DependencyCycleError")
        self.node_id = node_id


class Schedule:
    """The nodes that are still to run, and who waits for whom."""

    def __init__(
        self,
        prompt: Prompt,
        *,
        is_cached: NodeTest,
        is_output: NodeTest,
        is_lazy: Callable[[str, str], bool],
    ) -> None:
        self._prompt = prompt
        self._is_cached = is_cached
        self._is_output = is_output
        self._is_lazy = is_lazy
        self._waiters: dict[str, dict[str, None]] = {}
        self._blockers: dict[str, int] = {}
        self._linked: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._blockers)

    def add(self, node_id: str) -> None:
        """Add a node and all that it needs, except what is cached or lazy."""
        stack, links = [node_id], []
        while stack:
            current = stack.pop()
            if current in self._blockers:
                continue
            self._blockers[current] = 0
            self._waiters[current] = {}
            for source in self._eager_sources(current):
                if not self._is_cached(source):
                    stack.append(source)
                links.append((source, current))
        for source, target in links:
            self._connect(source, target)

    def require(self, node_id: str, input_name: str) -> None:
        """Make a lazy input a needed one."""
        link = self._prompt[node_id]["inputs"].get(input_name)
        if not is_link(link):
            raise NodeFailed(
                f"Node {node_id} says it needs input {input_name}, but nothing is linked to it",
                exception_type="graph.NodeInputError",
            )
        self._connect(link[0], node_id)

    def sees(self, node_id: str, source: str) -> bool:
        """Whether the node may use the result of `source`: a lazy link counts once required."""
        return source in self._linked.get(node_id, ())

    def pick(self) -> str:
        """The node to run next."""
        ready = [node_id for node_id, count in self._blockers.items() if count == 0]
        if not ready:
            raise DependencyCycle(next(iter(self._blockers)))
        for steps in range(STEPS_BEFORE_OUTPUT_MAX + 1):
            for node_id in ready:
                if self._leads_to_output(node_id, steps):
                    return node_id
        return ready[0]

    def complete(self, node_id: str) -> None:
        del self._blockers[node_id]
        for waiter in self._waiters.pop(node_id):
            self._blockers[waiter] -= 1

    def _eager_sources(self, node_id: str) -> list[str]:
        sources = []
        for name, value in self._prompt[node_id]["inputs"].items():
            if not is_link(value) or self._is_lazy(node_id, name):
                continue
            if value[0] not in self._prompt:
                raise MissingNode(node_id, value[0])
            sources.append(value[0])
        return sources

    def _connect(self, source: str, target: str) -> None:
        self._linked.setdefault(target, set()).add(source)
        if self._is_cached(source):
            return
        self.add(source)
        if target not in self._waiters[source]:
            self._waiters[source][target] = None
            self._blockers[target] += 1

    def _leads_to_output(self, node_id: str, steps: int) -> bool:
        if steps == 0:
            return self._is_output(node_id)
        return any(self._leads_to_output(next_id, steps - 1) for next_id in self._waiters[node_id])
