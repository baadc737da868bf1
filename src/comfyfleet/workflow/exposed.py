"""Inputs that subgraphs show on their instances, as the artist sees and names them."""

from collections.abc import Iterator
from typing import NamedTuple

from comfyfleet.workflow.model import SUBGRAPH_INPUT_ID, Prompt
from comfyfleet.workflow.scopes import Scope
from comfyfleet.workflow.setting import ExposedInput, Place
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.wiring import WiredNode


class ShownAt(NamedTuple):
    """An instance that shows an input of a node inside it; `around` is the graph it stands in."""

    around: Scope
    instance: WiredNode
    title: str
    slot: Input
    label: str

    @property
    def instance_id(self) -> str:
        return f"{self.around.prefix}{self.instance.node.id}"


def exposed_inputs(scopes: list[Scope], prompt: Prompt) -> Iterator[ExposedInput]:
    """One for each input of the prompt that an instance shows, at each level that shows it."""
    for scope in scopes:
        if scope.instance is None:
            continue
        for node in scope.wired.nodes.values():
            key = scope.prefix + node.node.id
            inputs = prompt[key]["inputs"] if key in prompt else {}
            for slot in node.inputs:
                if slot.name not in inputs or isinstance(inputs[slot.name], list):
                    continue
                for shown in instances_showing(scope, slot):
                    yield ExposedInput(
                        shown.instance_id,
                        shown.title,
                        shown.slot.name,
                        shown.label,
                        Place(key, slot.name),
                    )


def instances_showing(scope: Scope, slot: Input) -> list[ShownAt]:
    """Innermost first; none if in the end a link feeds the input."""
    found: list[ShownAt] = []
    while slot.link is not None and slot.link.origin == SUBGRAPH_INPUT_ID:
        instance, place = scope.instance, slot.link.origin_slot
        if instance is None or scope.parent is None or place >= len(instance.inputs):
            return []
        ports, slot = scope.wired.graph.inputs, instance.inputs[place]
        label = ports[place].label if place < len(ports) else ""
        title = instance.node.title or scope.wired.graph.name
        found.append(ShownAt(scope.parent, instance, title, slot, label or slot.name))
        scope = scope.parent
    return [] if slot.link is not None else found
