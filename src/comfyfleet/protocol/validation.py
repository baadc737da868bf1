"""Validates a prompt: finds the outputs that can run, and reports the errors of the others.

The responses have the types, texts and structure of ComfyUI 0.28.0. The prompt itself is not
changed: values that ComfyUI coerces in place are returned in a new prompt.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from comfyfleet.errors import FleetError, NodeFailed

# An error in ComfyUI's format: an entry of `node_errors[id].errors`, or the `error` of a refused
# prompt.
Fault = dict[str, Any]


class NodeInterface(Protocol):
    """The known properties of a node type: its `/object_info` entry, and ComfyUI's
    VALIDATE_INPUTS."""

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def is_output(self) -> bool: ...
    @property
    def validated(self) -> Sequence[str]:
        """Returns the inputs that only `check_values` validates, without a list or range check."""

    @property
    def may_waive_types(self) -> bool:
        """Checks whether the backend itself validates the types of linked outputs."""

    def may_waive(self, value: Any) -> bool:
        """Checks whether the backend itself validates the list or range of an input with this
        value."""

    def declared_inputs(self) -> Mapping[str, Any]:
        """Returns the groups of inputs, with current lists of files."""

    def check_values(self, values: Mapping[str, Any]) -> str | None:
        """Returns an error message, or None if the values are valid. Linked inputs have the value
        None."""


def fault(kind: str, message: str, details: str = "", **extra_info: Any) -> Fault:
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


def type_name(error: BaseException) -> str:
    """Returns the exception's type in ComfyUI's format. Our own errors appear as the error that a
    ComfyUI node would raise."""
    if isinstance(error, FleetError):
        return str(error.details.get("exception_type", "Exception"))
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


# This path is removed from tracebacks, so that clients don't see where comfyfleet is installed.
_PACKAGES = f"{Path(__file__).resolve().parents[2]}{os.sep}"


def traceback_lines(error: BaseException) -> list[str]:
    return [line.replace(_PACKAGES, "") for line in traceback.format_tb(error.__traceback__)]


# The key that wraps a value which could otherwise be mistaken for a link.
WRAPPED = "__value__"
GROWING = "COMFY_AUTOGROW_V3"
DEPENDENT = "COMFY_DYNAMICCOMBO_V3"
# Maximum number of slots in a growing group of inputs. ComfyUI itself allows at most 100.
SLOTS_MAX = 1_000
ANYTHING = {"*", "COMFY_MATCHTYPE_V3"}

Kind = str | list[Any]


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """A declared input. `kind` is a type name or a list of choices."""

    kind: Kind
    options: Mapping[str, Any]
    required: bool

    @property
    def config(self) -> list[Any]:
        return [self.kind, dict(self.options)]

    @property
    def choices(self) -> list[Any] | None:
        """Returns the valid choices, or None if the input has none."""
        if isinstance(self.kind, list):
            return self.kind
        return list(self.options.get("options", [])) if self.kind == "COMBO" else None


def is_link(value: object) -> TypeGuard[list[Any]]:
    """Checks whether the executor treats this value as a link to another node."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], int | float)


def declared_inputs(
    groups: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, DeclaredInput]:
    """Returns all inputs that a node has with these values, by full name."""
    return dict(_entries(groups, values, prefix=""))


def _entries(
    groups: Mapping[str, Any], values: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, DeclaredInput]]:
    for category in ("required", "optional"):
        for name, config in groups.get(category, {}).items():
            yield from _entry(prefix + name, _declare(config, category), values)


def _entry(
    name: str, declared: DeclaredInput, values: Mapping[str, Any]
) -> Iterator[tuple[str, DeclaredInput]]:
    if declared.kind == GROWING:
        yield from _slots(name, declared.options["template"])
    elif declared.kind == DEPENDENT:
        yield from _chosen(name, declared, values)
    else:
        yield name, declared


def _declare(config: list[Any], category: str) -> DeclaredInput:
    options = config[1] if len(config) > 1 else {}
    return DeclaredInput(kind=config[0], options=options, required=category == "required")


def _slots(name: str, template: Mapping[str, Any]) -> Iterator[tuple[str, DeclaredInput]]:
    """Yields the slots of a growing group: `images.image0`, `images.image1` …"""
    category, inputs = next((c, i) for c, i in template["input"].items() if i)
    slot = _declare(next(iter(inputs.values())), category)
    for index, slot_name in enumerate(_slot_names(template)):
        required = slot.required and index < template["min"]
        yield f"{name}.{slot_name}", DeclaredInput(slot.kind, slot.options, required)


def _slot_names(template: Mapping[str, Any]) -> list[str]:
    if "names" in template:
        return list(template["names"])
    return [f"{template['prefix']}{index}" for index in range(min(template["max"], SLOTS_MAX))]


def _chosen(
    name: str, declared: DeclaredInput, values: Mapping[str, Any]
) -> Iterator[tuple[str, DeclaredInput]]:
    """Yields the inputs that the selected option of a dynamic choice adds, followed by the choice
    itself. An unknown option yields nothing."""
    for option in declared.options["options"]:
        if name in values and option["key"] == values[name]:
            yield from _entries(option["inputs"], values, prefix=f"{name}.")
            yield name, declared
            return


def fits(received: Kind, expected: Kind) -> bool:
    """Checks whether an output of type `received` may be linked to an input of type `expected`."""
    if received == expected:
        return True
    kinds = [kind for kind in (received, expected) if isinstance(kind, str)]
    if ANYTHING & set(kinds):
        return True
    if isinstance(received, list):
        return expected == "COMBO"
    return isinstance(expected, str) and _overlap(received, expected)


def _overlap(received: str, expected: str) -> bool:
    received_parts, expected_parts = (
        {part.strip() for part in kinds.split(",")} for kinds in (received, expected)
    )
    return "*" in received_parts | expected_parts or bool(received_parts & expected_parts)


# An error lists the valid choices only if there are at most this many. Longer lists are usually
# files.
CHOICES_SHOWN_MAX = 20


SHOWN_CHARACTERS_MAX = 200


def _shortened(value: Any) -> Any:
    return value[:SHOWN_CHARACTERS_MAX] if isinstance(value, str) else value


def missing_type_fault(
    node_id: str, node: Mapping[str, Any], nodes: Mapping[str, NodeInterface]
) -> Fault | None:
    class_type = node.get("class_type")
    if class_type in nodes:
        return None
    title = _shortened(node.get("_meta", {}).get("title", class_type))
    class_type = _shortened(class_type)
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


def missing_input_fault(name: str, declared: DeclaredInput) -> list[Fault]:
    if not declared.required:
        return []
    details = name.rpartition(".")[2]
    return [fault("required_input_missing", "Required input is missing", details, input_name=name)]


def bad_link_fault(name: str, link: list[Any], declared: DeclaredInput) -> Fault:
    return fault(
        "bad_linked_input",
        "Bad linked input, must be a length-2 list of [node_id, slot_index]",
        name,
        input_name=name,
        input_config=declared.config,
        received_value=link,
    )


def type_mismatch_fault(
    name: str, link: list[Any], received: Kind, declared: DeclaredInput
) -> Fault:
    return fault(
        "return_type_mismatch",
        "Return type mismatch between linked nodes",
        f"{name}, received_type({received}) mismatch input_type({declared.kind})",
        input_name=name,
        input_config=declared.config,
        received_type=received,
        linked_node=link,
    )


def conversion_fault(name: str, value: Any, declared: DeclaredInput, error: Exception) -> Fault:
    return fault(
        "invalid_input_type",
        f"Failed to convert an input value to a {declared.kind} value",
        f"{name}, {value}, {error}",
        input_name=name,
        input_config=declared.config,
        received_value=value,
        exception_message=str(error),
    )


def range_fault(name: str, value: Any, declared: DeclaredInput) -> Fault | None:
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


def choice_fault(name: str, value: Any, declared: DeclaredInput) -> Fault | None:
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


UNDECLARED = DeclaredInput("*", {}, required=False)
Prompt = Mapping[str, Mapping[str, Any]]

# Maximum number of faulty outputs to report. Each one is also listed at every faulty node that was
# found before it, so the size of the response grows quickly.
BLAMED_OUTPUTS_MAX = 100
# Maximum number of cycles to report. Each one lists all of its nodes.
CYCLES_REPORTED_MAX = 100
# Prompts with more nodes are checked without recursion, because a chain of nodes may exceed
# Python's recursion limit.
CHAIN_NODES_MAX = 100
COERCIONS: Mapping[str, Callable[[Any], Any]] = {
    "INT": int,
    "FLOAT": float,
    "STRING": str,
    "BOOLEAN": bool,
}


@dataclass(frozen=True, slots=True)
class PromptValidation:
    """The result of a validation. `error` is set only if no output can run. Otherwise,
    `node_errors` may still contain the errors of some outputs."""

    prompt: Prompt
    outputs: tuple[str, ...] = ()
    error: Fault | None = None
    node_errors: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CheckedNode:
    """The result for a node. A node without faults is still invalid if a node before it is
    invalid."""

    valid: bool = True
    faults: tuple[Fault, ...] = ()


def validate(
    prompt: Prompt,
    *,
    nodes: Mapping[str, NodeInterface],
    targets: Collection[str] | None = None,
    follows_all: bool = False,
) -> PromptValidation:
    """Validates a prompt. If `targets` is given, only those output nodes count.

    `follows_all` also validates nodes that are linked to undeclared inputs. ComfyUI runs those
    without validating them.
    """
    for node_id, node in prompt.items():
        if missing := missing_type_fault(node_id, node, nodes):
            return PromptValidation(prompt, error=missing, node_errors={})
    outputs = [
        node_id
        for node_id, node in prompt.items()
        if nodes[node["class_type"]].is_output and (targets is None or node_id in targets)
    ]
    if not outputs:
        error = fault("prompt_no_outputs", "Prompt has no outputs")
        return PromptValidation(prompt, error=error, node_errors={})
    return _validate_outputs(_Validation(prompt, nodes, follows_all=follows_all), outputs)


def _validate_outputs(validation: "_Validation", outputs: Sequence[str]) -> PromptValidation:
    node_errors: dict[str, Any] = {}
    good: list[str] = []
    lines: list[str] = []
    bad = 0
    for output in outputs:
        checked = validation.check_output(output)
        if checked.valid:
            good.append(output)
            continue
        bad += 1
        if bad > BLAMED_OUTPUTS_MAX:
            continue
        lines += [
            f"{node_fault['message']}: {node_fault['details']}" for node_fault in checked.faults
        ]
        _add_dependent_output(validation, output, node_errors)
    prompt = validation.coerced_prompt()
    if good:
        return PromptValidation(prompt, outputs=tuple(good), node_errors=node_errors)
    error = fault(
        "prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(lines)
    )
    return PromptValidation(prompt, error=error, node_errors=node_errors)


def _add_dependent_output(
    validation: "_Validation", output: str, node_errors: dict[str, Any]
) -> None:
    """Adds the output to the dependent outputs of every faulty node found so far, as in ComfyUI."""
    for node_id, checked in validation.checked.items():
        if checked.valid or not checked.faults:
            continue
        entry = node_errors.setdefault(
            node_id,
            {
                "errors": list(checked.faults),
                "dependent_outputs": [],
                "class_type": validation.prompt[node_id]["class_type"],
            },
        )
        entry["dependent_outputs"].append(output)


class _Validation:
    """Checks the nodes of a prompt, starting at the outputs and following links upstream. Each node
    is checked once."""

    def __init__(
        self, prompt: Prompt, nodes: Mapping[str, NodeInterface], *, follows_all: bool = False
    ) -> None:
        self.prompt = prompt
        self.checked: dict[str, CheckedNode] = {}
        self._nodes = nodes
        self._follows_all = follows_all
        self._visiting: list[str] = []
        self._coerced: dict[str, dict[str, Any]] = {}
        self._cycles = 0

    def coerced_prompt(self) -> Prompt:
        return {
            node_id: {**node, "inputs": {**node["inputs"], **self._coerced[node_id]}}
            if self._coerced.get(node_id)
            else node
            for node_id, node in self.prompt.items()
        }

    def check_output(self, output: str) -> CheckedNode:
        try:
            for node_id in self._upstream_of(output):
                # Errors are ignored here. They are raised again and reported below.
                with contextlib.suppress(Exception):
                    self.check(node_id)
            return self.check(output)
        except Exception as error:  # noqa: BLE001 - any error of a node's own check is reported
            node_fault = fault(
                "exception_during_validation",
                "Exception when validating node",
                str(error),
                exception_type=type_name(error),
                traceback=traceback_lines(error),
            )
            self.checked[output] = CheckedNode(valid=False, faults=(node_fault,))
            return self.checked[output]

    def _upstream_of(self, output: str) -> list[str]:
        """Returns the nodes that `output` depends on, in checking order, so that checks don't
        recurse. Returns an empty list for small prompts, whose checks may recurse.
        """
        if len(self.prompt) <= CHAIN_NODES_MAX:
            return []
        order: list[str] = []
        seen = {output}
        stack = [(output, iter(self._sources_of(output)))]
        while stack:
            node_id, sources = stack[-1]
            source = next((candidate for candidate in sources if candidate not in seen), None)
            if source is None:
                order.append(node_id)
                stack.pop()
            else:
                seen.add(source)
                stack.append((source, iter(self._sources_of(source))))
        return order[:-1]

    def _sources_of(self, node_id: str) -> list[str]:
        """Returns the nodes that are linked to declared inputs and haven't been checked yet."""
        node = self.prompt[node_id]
        inputs = node.get("inputs", {})
        links = [name for name, value in inputs.items() if isinstance(value, list)]
        if not links:
            return []
        declared = declared_inputs(self._type_of(node_id).declared_inputs(), inputs)
        followed = links if self._follows_all else [name for name in declared if name in links]
        sources = [inputs[name][0] for name in followed if inputs[name]]
        return [
            source
            for source in sources
            if isinstance(source, str) and source in self.prompt and source not in self.checked
        ]

    def check(self, node_id: str) -> CheckedNode:
        if node_id in self.checked:
            return self.checked[node_id]
        if node_id in self._visiting:
            return self._note_cycle(node_id)
        self._visiting.append(node_id)
        try:
            result = self._check_inputs(node_id)
        finally:
            self._visiting.pop()
        # While the inputs were checked, a cycle through this node may have been recorded.
        noted = self.checked.get(node_id, CheckedNode())
        faults = noted.faults + tuple(f for f in result.faults if f not in noted.faults)
        valid = noted.valid and result.valid and not result.faults
        self.checked[node_id] = CheckedNode(valid, faults)
        return self.checked[node_id]

    def _note_cycle(self, node_id: str) -> CheckedNode:
        self._cycles += 1
        if self._cycles > CYCLES_REPORTED_MAX:
            return CheckedNode(valid=False)
        cycle = self._visiting[self._visiting.index(node_id) :]
        path = " -> ".join(f"{n} ({self.prompt[n]['class_type']})" for n in [*cycle, node_id])
        for member in cycle:
            cycle_fault = fault(
                "dependency_cycle",
                "Dependency cycle detected",
                path,
                node_id=member,
                cycle_nodes=cycle,
            )
            self.checked[member] = CheckedNode(valid=False, faults=(cycle_fault,))
        return self.checked[node_id]

    def _check_inputs(self, node_id: str) -> CheckedNode:
        inputs = self.prompt[node_id]["inputs"]
        node_type = self._type_of(node_id)
        self._coerced[node_id] = {}
        faults: list[Fault] = []
        valid = True
        declared = declared_inputs(node_type.declared_inputs(), inputs)
        for name, declaration in declared.items():
            if name not in inputs:
                faults += missing_input_fault(name, declaration)
            elif isinstance(inputs[name], list):
                link_faults, upstream_valid = self._check_link(
                    name, inputs[name], declaration, may_differ=node_type.may_waive_types
                )
                faults += link_faults
                valid = valid and upstream_valid
            else:
                faults += self._check_value(node_id, name, inputs[name], declaration)
        faults += self._check_custom(node_id, node_type, declared)
        valid = valid and (not self._follows_all or self._check_undeclared(inputs, declared))
        return CheckedNode(valid, tuple(faults))

    def _check_undeclared(
        self, inputs: Mapping[str, Any], declared: Mapping[str, DeclaredInput]
    ) -> bool:
        links = [
            (name, value)
            for name, value in inputs.items()
            if name not in declared and is_link(value) and value[0] in self.prompt
        ]
        return all(self._check_upstream(name, link, UNDECLARED) for name, link in links)

    def _type_of(self, node_id: str) -> NodeInterface:
        return self._nodes[self.prompt[node_id]["class_type"]]

    def _check_link(
        self, name: str, link: list[Any], declared: DeclaredInput, *, may_differ: bool
    ) -> tuple[list[Fault], bool]:
        if len(link) != 2:
            return [bad_link_fault(name, link, declared)], True
        source, slot = link
        received = _output_types(self._type_of(source))[slot]
        if not may_differ and not fits(received, declared.kind):
            return [type_mismatch_fault(name, link, received, declared)], True
        return [], self._check_upstream(name, link, declared)

    def _check_upstream(self, name: str, link: list[Any], declared: DeclaredInput) -> bool:
        try:
            return self.check(link[0]).valid
        except Exception as error:  # noqa: BLE001 - any error of a node's own check is reported
            link_fault = fault(
                "exception_during_inner_validation",
                "Exception when validating inner node",
                str(error),
                input_name=name,
                input_config=declared.config,
                exception_message=str(error),
                exception_type=type_name(error),
                traceback=traceback_lines(error),
                linked_node=link,
            )
            self.checked[link[0]] = CheckedNode(valid=False, faults=(link_fault,))
            return False

    def _check_value(
        self, node_id: str, name: str, value: Any, declared: DeclaredInput
    ) -> list[Fault]:
        if isinstance(value, dict) and WRAPPED in value:
            value = self._coerced[node_id][name] = value[WRAPPED]
        try:
            coerced = _coerce(declared.kind, value)
        except (TypeError, ValueError, OverflowError) as error:
            return [conversion_fault(name, value, declared, error)]
        if coerced is not value:
            self._coerced[node_id][name] = coerced
        node_type = self._type_of(node_id)
        if name in node_type.validated or node_type.may_waive(coerced):
            return []
        value_fault = range_fault(name, coerced, declared) or choice_fault(name, coerced, declared)
        return [value_fault] if value_fault else []

    def _check_custom(
        self, node_id: str, node_type: NodeInterface, declared: Mapping[str, DeclaredInput]
    ) -> list[Fault]:
        """Runs the node type's own check. It gets None for linked inputs, like in ComfyUI."""
        if not node_type.validated:
            return []
        inputs = {**self.prompt[node_id]["inputs"], **self._coerced[node_id]}
        for name in node_type.validated:
            if name not in inputs:
                raise _no_argument(node_type, name)
        constants = {
            name: None if isinstance(value, list) else value
            for name, value in inputs.items()
            if name in declared
        }
        message = node_type.check_values(constants)
        if message is None:
            return []
        return [
            fault(
                "custom_validation_failed",
                "Custom validation failed for node",
                f"{name} - {message}",
                input_name=name,
            )
            for name in node_type.validated
        ]


def _coerce(kind: Kind, value: Any) -> Any:
    convert = COERCIONS.get(kind) if isinstance(kind, str) else None
    return convert(value) if convert else value


def _output_types(node_type: NodeInterface) -> Sequence[Kind]:
    types: Sequence[Kind] = node_type.info["output"]
    # ComfyUI's older nodes store the types in a tuple. This affects the message of an IndexError.
    return list(types) if is_newer_node(node_type) else tuple(types)


def is_newer_node(node_type: NodeInterface) -> bool:
    """Checks whether ComfyUI implements this node with its newer API, which changes some messages
    and hidden inputs.
    """
    return "price_badge" in node_type.info


def _no_argument(node_type: NodeInterface, name: str) -> NodeFailed:
    function = "validate_inputs" if is_newer_node(node_type) else "VALIDATE_INPUTS"
    return NodeFailed(
        f"{node_type.name}.{function}() missing 1 required positional argument: '{name}'",
        exception_type="TypeError",
    )
