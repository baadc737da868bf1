"""A choice that brings inputs of its own: when it changes, so do they."""

from typing import Any

from comfyfleet.workflow.nodetypes import DYNAMIC_COMBO, is_widget, widgets_of_spec
from comfyfleet.workflow.setting.entries import BRANCH_DEPTH_MAX, Entry, as_link
from comfyfleet.workflow.setting.problems import problem_with
from comfyfleet.workflow.setting.reading import wrapped
from comfyfleet.workflow.specs import input_spec
from comfyfleet.workflow.widgettypes import ABSENT


def has_branches(declared: Any) -> bool:
    return input_spec("", declared).type == DYNAMIC_COMBO


def rebranched_inputs(entry: Entry, choice: str, key: Any) -> dict[str, Any]:
    """The node's inputs with another choice: what the new branch lacks goes, what it adds gets its default.

    Values that fit the new branch stay, so that another model of a service keeps the text it was given.
    """
    prefix = f"{choice}."
    inputs = {**entry.inputs, choice: key}
    for _ in range(BRANCH_DEPTH_MAX):  # a choice in the branch brings a branch, too
        declared = entry._replace(inputs=inputs).declared()
        renewed = {
            name: value
            for name, value in inputs.items()
            if not name.startswith(prefix) or _fits(declared.get(name), value)
        }
        for name, spec in declared.items():
            if name.startswith(prefix) and name not in renewed:
                renewed.update(_default(name, spec))
        if renewed == inputs:
            break
        inputs = renewed
    return inputs


def _fits(declared: Any, value: Any) -> bool:
    if declared is None:
        return False
    return as_link(value) is not None or problem_with(declared, value) is None


def _default(name: str, declared: Any) -> dict[str, Any]:
    """What the editor fills in; nothing for an input that is a socket."""
    spec = input_spec(name, declared)
    if not is_widget(spec):
        return {}
    widget = next(iter(widgets_of_spec(spec)))
    value = widget.choices[0] if widget.default is None and widget.choices else widget.default
    return {name: wrapped(value)} if widget.sent and value is not ABSENT else {}
