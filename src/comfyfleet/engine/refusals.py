"""The texts with which ComfyUI refuses a value, a link or a node."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.engine.faults import Fault, fault
from comfyfleet.engine.inputs import Declared, Kind
from comfyfleet.engine.node import NodeType

# Longer lists of choices (files, mostly) are not repeated in an error.
CHOICES_SHOWN_MAX = 20


def missing_type(
    node_id: str, node: Mapping[str, Any], nodes: Mapping[str, NodeType]
) -> Fault | None:
    class_type = node.get("class_type")
    if class_type in nodes:
        return None
    title = node.get("_meta", {}).get("title", class_type)
    if "class_type" in node:
        message = f"Node '{title}' not found. The custom node may not be installed."
    else:
        name = title or f"ID #{node_id}"
        message = (
            f"Node '{name}' has no class_type. "
            "The workflow may be corrupted or a custom node is missing."
        )
    return fault(
        "missing_node_type",
        message,
        f"Node ID '#{node_id}'",
        node_id=node_id,
        class_type=class_type,
        node_title=title,
    )


def missing_input(name: str, declared: Declared) -> list[Fault]:
    if not declared.required:
        return []
    details = name.rpartition(".")[2]
    return [fault("required_input_missing", "Required input is missing", details, input_name=name)]


def bad_link(name: str, link: list[Any], declared: Declared) -> Fault:
    return fault(
        "bad_linked_input",
        "Bad linked input, must be a length-2 list of [node_id, slot_index]",
        name,
        input_name=name,
        input_config=declared.config,
        received_value=link,
    )


def mismatch(name: str, link: list[Any], received: Kind, declared: Declared) -> Fault:
    return fault(
        "return_type_mismatch",
        "Return type mismatch between linked nodes",
        f"{name}, received_type({received}) mismatch input_type({declared.kind})",
        input_name=name,
        input_config=declared.config,
        received_type=received,
        linked_node=link,
    )


def unconvertible(name: str, value: Any, declared: Declared, error: Exception) -> Fault:
    return fault(
        "invalid_input_type",
        f"Failed to convert an input value to a {declared.kind} value",
        f"{name}, {value}, {error}",
        input_name=name,
        input_config=declared.config,
        received_value=value,
        exception_message=str(error),
    )


def out_of_range(name: str, value: Any, declared: Declared) -> Fault | None:
    least, most = declared.options.get("min"), declared.options.get("max")
    if least is not None and value < least:
        kind, message = "value_smaller_than_min", f"Value {value} smaller than min of {least}"
    elif most is not None and value > most:
        kind, message = "value_bigger_than_max", f"Value {value} bigger than max of {most}"
    else:
        return None
    return fault(
        kind,
        message,
        name,
        input_name=name,
        input_config=declared.config,
        received_value=value,
    )


def not_offered(name: str, value: Any, declared: Declared) -> Fault | None:
    choices = declared.choices
    if choices is None:
        return None
    several = declared.options.get("multiselect", False) and isinstance(value, list)
    unknown = [choice for choice in (value if several else [value]) if choice not in choices]
    if not unknown:
        return None
    shown = len(choices) <= CHOICES_SHOWN_MAX
    offered = str(choices) if shown else f"(list of length {len(choices)})"
    return fault(
        "value_not_in_list",
        "Value not in list",
        f"{name}: {', '.join(map(repr, unknown))} not in {offered}",
        input_name=name,
        input_config=declared.config if shown else None,
        received_value=value,
    )
