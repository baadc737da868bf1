"""Generates workflows of any size from the parts of real ones."""

from typing import Any

WIDGETS = {"steps": ["INT", {"default": 20, "min": 1, "max": 100}], "method": [["euler", "ddim"]]}
CLASSES: dict[str, Any] = {
    "Make": {"input": {"required": {"size": ["INT", {"default": 64}]}}, "output": ["IMAGE"]},
    "Work": {"input": {"required": {"image": ["IMAGE"], **WIDGETS}}, "output": ["IMAGE"]},
    "Keep": {"input": {"required": {"image": ["IMAGE"]}}, "output": [], "output_node": True},
}
# The nodes of a chain. It contains a named wire, and one of its nodes is bypassed.
CHAIN = ("Work", "Reroute", "SetNode", "GetNode", "Work", "Work")
BYPASSED = 5


def generated(size: int) -> dict[str, Any]:
    """Returns a workflow of `size` nodes. One source feeds chains that end in output nodes."""
    nodes: list[dict[str, Any]] = [saved(1, "Make", None, [64])]
    links: list[list[Any]] = []

    def link(origin: int, target: int) -> int:
        links.append([len(links) + 1, origin, 0, target, 0, "IMAGE"])
        return len(links)

    while len(nodes) < size:
        previous = 1
        for place, kind in enumerate((*CHAIN, "Keep")):
            if len(nodes) >= size:
                break
            number = len(nodes) + 1
            values = [f"wire {len(nodes) // 8}"] if kind in ("SetNode", "GetNode") else [25, "ddim"]
            source = None if kind == "GetNode" else link(previous, number)
            mode = 4 if place == BYPASSED else 0
            nodes.append(saved(number, kind, source, values, mode))
            previous = number
    return {"version": 0.4, "nodes": nodes, "links": links, "last_node_id": len(nodes)}


def saved(
    number: int, kind: str, link: int | None, values: list[Any], mode: int = 0
) -> dict[str, Any]:
    inputs = [{"name": "image", "type": "IMAGE", "link": link}] if link else []
    outputs = [{"name": "IMAGE", "type": "IMAGE"}]
    return {
        "id": number, "type": kind, "mode": mode, "inputs": inputs, "outputs": outputs,
        "widgets_values": values,
    }  # fmt: skip
