"""Which outputs of a prompt can run, and what is wrong with the others.

The answers have the types, texts and shapes of ComfyUI 0.28.0. The prompt itself is not touched:
values that ComfyUI coerces in place come back as a new prompt.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfyfleet.engine.faults import Fault, fault, trace, type_name
from comfyfleet.engine.inputs import Declared, Kind, declared_inputs, fits
from comfyfleet.engine.node import Folders, NodeType
from comfyfleet.engine.refusals import (
    bad_link,
    mismatch,
    missing_input,
    missing_type,
    not_offered,
    out_of_range,
    unconvertible,
)
from comfyfleet.kernel.errors import NodeFailed

Prompt = Mapping[str, Mapping[str, Any]]

COERCIONS: Mapping[str, Callable[[Any], Any]] = {
    "INT": int,
    "FLOAT": float,
    "STRING": str,
    "BOOLEAN": bool,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error` is None when at least one output can run; `node_errors` may name others even then."""

    prompt: Prompt
    outputs: tuple[str, ...] = ()
    error: Fault | None = None
    node_errors: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A node with nothing wrong of its own is still not valid when one before it isn't."""

    valid: bool = True
    faults: tuple[Fault, ...] = ()


def validate(
    prompt: Prompt,
    *,
    nodes: Mapping[str, NodeType],
    folders: Folders,
    targets: Collection[str] | None = None,
) -> Verdict:
    """Judge a prompt; with `targets`, only these of its output nodes count."""
    for node_id, node in prompt.items():
        if missing := missing_type(node_id, node, nodes):
            return Verdict(prompt, error=missing, node_errors={})
    outputs = [
        node_id
        for node_id, node in prompt.items()
        if nodes[node["class_type"]].is_output and (targets is None or node_id in targets)
    ]
    if not outputs:
        error = fault("prompt_no_outputs", "Prompt has no outputs")
        return Verdict(prompt, error=error, node_errors={})
    return _judge_outputs(_Validation(prompt, nodes, folders), outputs)


def _judge_outputs(validation: "_Validation", outputs: Sequence[str]) -> Verdict:
    node_errors: dict[str, Any] = {}
    good: list[str] = []
    lines: list[str] = []
    for output in outputs:
        checked = validation.check_output(output)
        if checked.valid:
            good.append(output)
            continue
        lines += [f"{found['message']}: {found['details']}" for found in checked.faults]
        _blame(validation, output, node_errors)
    prompt = validation.coerced_prompt()
    if good:
        return Verdict(prompt, outputs=tuple(good), node_errors=node_errors)
    error = fault(
        "prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(lines)
    )
    return Verdict(prompt, error=error, node_errors=node_errors)


def _blame(validation: "_Validation", output: str, node_errors: dict[str, Any]) -> None:
    """Every faulty node known so far is said to concern this output, as ComfyUI does it."""
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
    """One walk from the outputs up; each node is judged once."""

    def __init__(self, prompt: Prompt, nodes: Mapping[str, NodeType], folders: Folders) -> None:
        self.prompt = prompt
        self.checked: dict[str, Checked] = {}
        self._nodes = nodes
        self._folders = folders
        self._visiting: list[str] = []
        self._coerced: dict[str, dict[str, Any]] = {}

    def coerced_prompt(self) -> Prompt:
        return {
            node_id: {**node, "inputs": {**node["inputs"], **self._coerced[node_id]}}
            if self._coerced.get(node_id)
            else node
            for node_id, node in self.prompt.items()
        }

    def check_output(self, output: str) -> Checked:
        try:
            return self.check(output)
        except Exception as error:  # noqa: BLE001 - whatever a node's own check raises is told
            found = fault(
                "exception_during_validation",
                "Exception when validating node",
                str(error),
                exception_type=type_name(error),
                traceback=trace(error),
            )
            self.checked[output] = Checked(valid=False, faults=(found,))
            return self.checked[output]

    def check(self, node_id: str) -> Checked:
        if node_id in self.checked:
            return self.checked[node_id]
        if node_id in self._visiting:
            return self._note_cycle(node_id)
        self._visiting.append(node_id)
        try:
            own = self._check_inputs(node_id)
        finally:
            self._visiting.pop()
        # A cycle through this node has been noted on it meanwhile.
        noted = self.checked.get(node_id, Checked())
        faults = noted.faults + tuple(f for f in own.faults if f not in noted.faults)
        valid = noted.valid and own.valid and not own.faults
        self.checked[node_id] = Checked(valid, faults)
        return self.checked[node_id]

    def _note_cycle(self, node_id: str) -> Checked:
        around = self._visiting[self._visiting.index(node_id) :]
        path = " -> ".join(f"{n} ({self.prompt[n]['class_type']})" for n in [*around, node_id])
        for member in around:
            found = fault(
                "dependency_cycle",
                "Dependency cycle detected",
                path,
                node_id=member,
                cycle_nodes=around,
            )
            self.checked[member] = Checked(valid=False, faults=(found,))
        return self.checked[node_id]

    def _check_inputs(self, node_id: str) -> Checked:
        given = self.prompt[node_id]["inputs"]
        node_type = self._type_of(node_id)
        self._coerced[node_id] = {}
        faults: list[Fault] = []
        valid = True
        declared = declared_inputs(node_type.describe(self._folders)["input"], given)
        for name, declaration in declared.items():
            if name not in given:
                faults += missing_input(name, declaration)
            elif isinstance(given[name], list):
                found, upstream_valid = self._check_link(name, given[name], declaration)
                faults += found
                valid = valid and upstream_valid
            else:
                faults += self._check_value(node_id, name, given[name], declaration)
        faults += self._check_custom(node_id, node_type, declared)
        return Checked(valid, tuple(faults))

    def _type_of(self, node_id: str) -> NodeType:
        return self._nodes[self.prompt[node_id]["class_type"]]

    def _check_link(
        self, name: str, link: list[Any], declared: Declared
    ) -> tuple[list[Fault], bool]:
        if len(link) != 2:
            return [bad_link(name, link, declared)], True
        source, slot = link
        received = _output_types(self._type_of(source))[slot]
        if not fits(received, declared.kind):
            return [mismatch(name, link, received, declared)], True
        return [], self._check_upstream(name, link, declared)

    def _check_upstream(self, name: str, link: list[Any], declared: Declared) -> bool:
        try:
            return self.check(link[0]).valid
        except Exception as error:  # noqa: BLE001 - whatever a node's own check raises is told
            found = fault(
                "exception_during_inner_validation",
                "Exception when validating inner node",
                str(error),
                input_name=name,
                input_config=declared.config,
                exception_message=str(error),
                exception_type=type_name(error),
                traceback=trace(error),
                linked_node=link,
            )
            self.checked[link[0]] = Checked(valid=False, faults=(found,))
            return False

    def _check_value(self, node_id: str, name: str, value: Any, declared: Declared) -> list[Fault]:
        if isinstance(value, dict) and "__value__" in value:
            value = self._coerced[node_id][name] = value["__value__"]
        try:
            coerced = _coerce(declared.kind, value)
        except (TypeError, ValueError, OverflowError) as error:
            return [unconvertible(name, value, declared, error)]
        if coerced is not value:
            self._coerced[node_id][name] = coerced
        if name in self._type_of(node_id).validated:
            return []
        found = out_of_range(name, coerced, declared) or not_offered(name, coerced, declared)
        return [found] if found else []

    def _check_custom(
        self, node_id: str, node_type: NodeType, declared: Mapping[str, Declared]
    ) -> list[Fault]:
        """The node's own check; it sees a linked input as None, as ComfyUI's nodes do."""
        if node_type.validate is None:
            return []
        given = {**self.prompt[node_id]["inputs"], **self._coerced[node_id]}
        for name in node_type.validated:
            if name not in given:
                raise _no_argument(node_type, name)
        constants = {
            name: None if isinstance(value, list) else value
            for name, value in given.items()
            if name in declared
        }
        message = node_type.validate(self._folders, constants)
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


def _output_types(node_type: NodeType) -> Sequence[Kind]:
    types: Sequence[Kind] = node_type.info["output"]
    # ComfyUI's older nodes hold them in a tuple, and the text of an IndexError says so.
    return list(types) if is_newer(node_type) else tuple(types)


def is_newer(node_type: NodeType) -> bool:
    """Whether ComfyUI has this node in its newer form; some texts and hidden inputs differ."""
    return "price_badge" in node_type.info


def _no_argument(node_type: NodeType, name: str) -> NodeFailed:
    function = "validate_inputs" if is_newer(node_type) else "VALIDATE_INPUTS"
    return NodeFailed(
        f"{node_type.name}.{function}() missing 1 required positional argument: '{name}'",
        exception_type="TypeError",
    )
