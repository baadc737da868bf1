"""Small graphs and catalogues for tests."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from comfyfleet.api.documents import read_document
from comfyfleet.engine.nodes import registry
from comfyfleet.server.catalog.draft import draft_workflow
from comfyfleet.server.catalog.model import Property, WorkflowDraft
from comfyfleet.server.graphs.catalogue import (
    BackendState,
    GraphCatalogue,
    WorkflowFacts,
    catalogue_of,
)

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


def _file(slug: str, entry: dict[str, Any]) -> str:
    return str(entry.get("file", f"workflows/{slug}.json"))


@cache
def example_object_info() -> dict[str, Any]:
    """The recorded node types of the examples, and those of the built-in engine."""
    recorded = json.loads((EXAMPLES / "object_info.json").read_text("utf-8"))
    return {**{name: each.info for name, each in registry().items()}, **recorded}


@cache
def example_drafts() -> dict[str, WorkflowDraft]:
    """The example workflows as they would be registered, their properties checked."""
    registered = read_document((EXAMPLES / "properties.yaml").read_text("utf-8"))
    return {
        slug: draft_workflow(
            slug=slug,
            document=json.loads((EXAMPLES / _file(slug, entry)).read_text("utf-8")),
            properties=[Property(**each) for each in entry["properties"]],
            output_node_id=entry["output_node_id"],
            object_info=example_object_info(),
        )
        for slug, entry in registered.items()
    }


def example_catalogue() -> GraphCatalogue:
    drafts = example_drafts().values()
    return catalogue_of(tuple(WorkflowFacts(each.slug, 1, each.properties) for each in drafts))
