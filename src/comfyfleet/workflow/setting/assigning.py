"""Values are set by the name of their node and input: `3.seed=7`, `Main sampler.steps=30`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.workflow.model import ObjectInfo, Prompt
from comfyfleet.workflow.setting.addressing import (
    Directory,
    ExposedInput,
    Place,
    find_places,
)
from comfyfleet.workflow.setting.changing import Change, change_input, with_entries
from comfyfleet.workflow.setting.entries import read_entries
from comfyfleet.workflow.setting.wording import quoted

ASSIGNMENTS_MAX = 10_000
PROBLEMS_MAX = 20  # each searches all names for the closest
_EXAMPLE = "write node.input=value, such as 3.seed=7"


class Assignment(NamedTuple):
    """`target` is `node.input`; a text as value is read by the declared type of the input."""

    target: str
    value: Any


class Edit(NamedTuple):
    """A prompt after values were set, and in words what was done."""

    prompt: Prompt
    done: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_assignment(text: str) -> Assignment:
    """`node.input=value`; everything behind the first `=` is the value, so a title can't hold one."""
    target, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"{quoted(text)} sets nothing: {_EXAMPLE}")
    if "." not in target.strip(" ."):
        raise InvalidInput(f"{quoted(text)} names no input: {_EXAMPLE}")
    return Assignment(target.strip(), value)


def find_input(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    target: str,
    exposed: Sequence[ExposedInput] = (),
) -> tuple[Place, ...]:
    """The input that `node.input` means in this prompt; several if a subgraph feeds several by it."""
    entries = read_entries(prompt, object_info)
    return find_places(Directory(entries, exposed), entries, target)


def set_values(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    assignments: Sequence[Assignment],
    *,
    check: bool = True,
    exposed: Sequence[ExposedInput] = (),
) -> Edit:
    """All of them or none: what is wrong with several is said together. With `exposed`, inputs can
    also be named as the subgraphs of the workflow show them."""
    if len(assignments) > ASSIGNMENTS_MAX:
        raise LimitExceeded(f"{len(assignments)} values to set, at most {ASSIGNMENTS_MAX}")
    entries = read_entries(prompt, object_info)
    directory = Directory(entries, exposed)
    changes: list[Change] = []
    errors: list[InvalidInput] = []
    for assignment in assignments:
        if len(errors) == PROBLEMS_MAX:
            break
        try:
            for place in find_places(directory, entries, assignment.target):
                change = change_input(entries, place, assignment.value, check=check)
                entries[place.node_id] = change.entry
                changes.append(change)
        except InvalidInput as error:
            errors.append(error)
    if errors:
        raise all_in_one(errors)
    return edit_of(with_entries(prompt, entries, {change.entry.id for change in changes}), changes)


def all_in_one(errors: Sequence[InvalidInput]) -> InvalidInput:
    problems = [error.message for error in errors]
    if len(problems) == PROBLEMS_MAX:
        problems.append("and perhaps more")
    only_values = all(isinstance(error, InvalidValue) for error in errors)
    kind = InvalidValue if only_values else InvalidInput
    return kind("\n".join(problems), problems=problems)


def edit_of(prompt: Prompt, changes: Sequence[Change], warnings: Sequence[str] = ()) -> Edit:
    own = [change.warning for change in changes if change.warning]
    return Edit(prompt, tuple(change.done for change in changes), (*own, *warnings))
