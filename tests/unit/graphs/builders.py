"""Small graphs and catalogues for tests."""

from pathlib import Path
from typing import Any

from comfyfleet.effects.model import Property
from comfyfleet.graphs.catalogue import (
    BackendState,
    Catalogue,
    WorkflowFacts,
    catalogue_of,
)
from comfyfleet.graphs.documents import read_document

EXAMPLES = Path(__file__).parents[3] / "examples"
IMAGE = Property("input", "image", required=True)
# Takes two pictures, either of which may be absent, and a number.
BLEND = WorkflowFacts(
    "blend",
    1,
    (
        Property("left", "image"),
        Property("right", "image"),
        Property("strength", "number", default=1.0, minimum=0, maximum=2),
    ),
    price_tokens=5,
    typical_seconds=4.0,
)
DRAW = WorkflowFacts(
    "draw", 3, (Property("text", "text", default="x"),), price_tokens=10, typical_seconds=10.0
)
FIX = WorkflowFacts(
    "fix",
    2,
    (
        IMAGE,
        Property("mode", "choice", default="a", choices=("a", "b")),
        Property("text", "text", default=""),
    ),
    price_tokens=2,
    typical_seconds=1.0,
    required_capabilities=frozenset({"gpu"}),
)
ALL = frozenset({"draw", "fix", "blend"})
WORKERS = (
    BackendState("a", "main/production", workflows=ALL),
    BackendState("b", "main/production", workflows=ALL, queue_depth=3),
    BackendState("c", "spare/production", workflows=frozenset({"fix"}), queue_depth=1),
)
CATALOGUE = catalogue_of((DRAW, FIX, BLEND), WORKERS)


def document(*nodes: dict[str, Any], links: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Links are written `a.port > b.port`."""
    connections = [dict(zip(("from", "to"), link.split(" > "), strict=True)) for link in links]
    return {"name": "test", "nodes": list(nodes), "connections": connections, **more}


def node(node_id: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": node_id, "type": kind, **fields}


def work(node_id: str, workflow: str = "fix", **fields: Any) -> dict[str, Any]:
    return node(node_id, "workflow", workflow=workflow, **fields)


def example_catalogue() -> Catalogue:
    registered = read_document((EXAMPLES / "properties.yaml").read_text("utf-8"))
    return catalogue_of(
        tuple(
            WorkflowFacts(slug, 1, tuple(_facts(each) for each in entry["properties"]))
            for slug, entry in registered.items()
        )
    )


def _facts(entry: dict[str, Any]) -> Property:
    names = ("name", "type", "default", "required", "minimum", "maximum")
    return Property(**{name: entry[name] for name in names if name in entry})
