"""Random graphs that can be planned: conditions, fan-outs inside each other, merges, failures."""

from random import Random
from typing import Any, NamedTuple

from tests.unit.graphs.builders import document, node

from comfyfleet.server.catalog.model import Property
from comfyfleet.server.graphs.catalogue import BackendState, WorkflowFacts, catalogue_of

ANY: Any = "any"
ANYTHING = WorkflowFacts(
    "anything",
    1,
    (
        Property("must", ANY, required=True),
        Property("may", ANY),
        Property("might", ANY),
    ),
    price_tokens=3,
)
BACKENDS = (
    BackendState("here", "f/s", workflows=frozenset({"anything"})),
    BackendState("gone", "f/s", is_online=False, workflows=frozenset({"anything"})),
)
RANDOM_CATALOGUE = catalogue_of((ANYTHING,), BACKENDS)
CONDITIONS = ("output.width > 500", "output.exists", "NOT output.width >= 300", "output.count > 1")
DEPTH_MAX = 2


class Spring(NamedTuple):
    """A port that something may be connected to."""

    ref: str
    scope: tuple[str, ...]
    level: int = 0  # 1: a list; 2: a list of lists


class GraphMaker:
    def __init__(self, rng: Random, size: int, *, may_fail: bool) -> None:
        self.rng = rng
        self.may_fail = may_fail
        self.nodes: list[dict[str, Any]] = []
        self.links: list[str] = []
        self.springs: list[Spring] = []
        self.add("picture", "input", [("value", 0)])
        self.add("list", "input", [("value", 2)])
        while len(self.nodes) < size:
            self.grow()
        self.close()

    def document(self) -> dict[str, Any]:
        return document(*self.nodes, links=tuple(self.links))

    def add(
        self,
        name: str,
        kind: str,
        ports: list[tuple[str, int]],
        scope: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        self.nodes.append(node(name, kind, **fields))
        self.springs += [Spring(f"{name}.{port}", scope, level) for port, level in ports]

    def grow(self) -> None:
        name = f"n{len(self.nodes)}"
        main = self.rng.choice(self.springs[-12:] if self.rng.random() < 0.7 else self.springs)
        make = self.rng.choice([
            self.work, self.work, self.work, self.condition, self.broadcast, self.merge, self.merge, self.chunks, self.items,
            self.over,
        ])  # fmt: skip
        make(name, main)

    def others(self, scope: tuple[str, ...], count: int) -> list[Spring]:
        """Of the same items or of what is around them."""
        fitting = [each for each in self.springs if scope[: len(each.scope)] == each.scope]
        return self.rng.choices(fitting, k=count)

    def work(self, name: str, main: Spring) -> None:
        fields: dict[str, Any] = {"workflow": "anything", "retries": self.rng.randint(0, 2)}
        if self.rng.random() < 0.2:
            strategies = ["ask_user", "auto_select"]
            fields |= {
                "backend_affinity": "worker:gone",
                "fallback_strategy": self.rng.choice(strategies),
            }
        fields["continue_on_error"] = not self.may_fail or self.rng.random() < 0.85
        self.links.append(f"{main.ref} > {name}.must")
        for port, other in zip(
            ("may", "might"), self.others(main.scope, self.rng.randint(0, 2)), strict=False
        ):
            self.links.append(f"{other.ref} > {name}.{port}")
        self.add(name, "workflow", [("output", 0)], main.scope, **fields)

    def condition(self, name: str, main: Spring) -> None:
        self.links.append(f"{main.ref} > {name}.input")
        text = self.rng.choice(CONDITIONS)
        self.add(
            name,
            "condition",
            [("true", main.level), ("false", main.level)],
            main.scope,
            condition=text,
        )

    def broadcast(self, name: str, main: Spring) -> None:
        count = self.rng.randint(1, 3)
        self.links.append(f"{main.ref} > {name}.input")
        ports = [(f"output_{number}", main.level) for number in range(count)]
        self.add(name, "fanout", ports, main.scope, output_count=count)

    def merge(self, name: str, main: Spring) -> None:
        merged = [main, *self.others(main.scope, self.rng.randint(0, 3))]
        self.links += [f"{each.ref} > {name}.input_{number}" for number, each in enumerate(merged)]
        self.add(name, "merge", [("output", 0)], main.scope)

    def chunks(self, name: str, main: Spring) -> None:
        lists = [each for each in self.springs if each.level]
        source = self.rng.choice(lists)
        self.links.append(f"{source.ref} > {name}.items")
        ports = [("output_0.items", source.level), ("output_1.items", source.level)]
        self.add(name, "fanout", ports, source.scope, mode="distribute")

    def items(self, name: str, main: Spring) -> None:
        lists = [each for each in self.springs if each.level and len(each.scope) < DEPTH_MAX]
        source = self.rng.choice(lists)
        self.links.append(f"{source.ref} > {name}.items")
        self.add(
            name,
            "fanout",
            [("item", source.level - 1)],
            (*source.scope, name),
            mode="distribute",
            per_item=True,
        )

    def over(self, name: str, main: Spring) -> None:
        if not main.scope:
            self.work(name, main)
            return
        inside = [each for each in self.springs if each.scope == main.scope]
        merged = self.rng.choices(inside, k=self.rng.randint(1, 3))
        self.links += [f"{each.ref} > {name}.input_{number}" for number, each in enumerate(merged)]
        self.add(name, "merge", [("output", 0)], main.scope[:-1], over=main.scope[-1])

    def close(self) -> None:
        for number, spring in enumerate(each for each in tuple(self.springs) if not each.scope):
            if self.rng.random() < 0.3:
                self.links.append(f"{spring.ref} > out{number}.value")
                self.add(f"out{number}", "output", [])
