"""The workflow templates in ComfyUI's editor. Templates that the caller's fleets can't
run aren't listed."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

PACKAGE = "comfyui_workflow_templates_json"
OWN_FOLDER = Path(__file__).with_name("editor_files") / "templates"
INDEX = re.compile(r"index(?:\.[A-Za-z-]{2,10})?\.json")
# Nodes that the editor itself resolves, so that no backend needs them.
OF_THE_EDITOR = frozenset({"MarkdownNote", "Note", "PrimitiveNode", "Reroute"})
# LiteGraph's modes of nodes that don't run, which are muted and bypassed.
NOT_RUN = (2, 4)
# Fields that are removed because they refer to files on third-party hosts.
_LEFT_OUT = ("io", "thumbnail", "logos")


@dataclass
class Templates:
    """The templates in several folders, each with an index.

    If a template is in several folders, the first one takes precedence.
    """

    folders: tuple[Path, ...]
    _types: dict[str, frozenset[str] | None] = field(default_factory=dict)

    def index(self, name: str, offered: Collection[str]) -> list[dict[str, Any]]:
        """Returns the runnable templates by category, in the editor's format."""
        categories = []
        for folder in self.folders:
            for category in _read(folder / name) or _read(folder / "index.json") or ():
                entries = [*self._runnable(category.get("templates", ()), offered)]
                if entries:
                    categories.append({**category, "templates": entries})
        return categories

    def document(self, name: str) -> bytes | None:
        """Returns a template's content, or None. `name` must be a file name without a slash."""
        paths = (folder / name for folder in self.folders)
        return next((path.read_bytes() for path in paths if path.is_file()), None)

    def _runnable(
        self, entries: Collection[Mapping[str, Any]], offered: Collection[str]
    ) -> Iterator[dict[str, Any]]:
        for entry in entries:
            needed = self._needed(str(entry.get("name")))
            if needed is not None and all(node_type in offered for node_type in needed):
                yield {key: value for key, value in entry.items() if key not in _LEFT_OUT}

    def _needed(self, name: str) -> frozenset[str] | None:
        if name not in self._types:
            document = self.document(f"{name}.json")
            self._types[name] = None if document is None else node_types(json.loads(document))
        return self._types[name]


def installed_templates() -> Templates:
    spec = util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    theirs = (Path(locations[0]) / "templates",) if locations else ()
    return Templates((OWN_FOLDER, *theirs))


def node_types(workflow: Mapping[str, Any]) -> frozenset[str]:
    """Returns the node types that a workflow in the editor's format needs, including those in its
    subgraphs."""
    subgraphs = (workflow.get("definitions") or {}).get("subgraphs") or ()
    used = {
        node["type"]
        for graph in (workflow, *subgraphs)
        for node in graph.get("nodes") or ()
        if node.get("mode") not in NOT_RUN
    }
    return frozenset(used) - OF_THE_EDITOR - {subgraph["id"] for subgraph in subgraphs}


def _read(path: Path) -> list[dict[str, Any]] | None:
    try:
        content: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
