"""The properties of a step, filled in from the run's variables and the parent.

A text that is nothing but `{{ name }}` becomes the value itself, a number stays a number; inside a longer
text the value is written out. Values are put into values, never into JSON, and what was put in is never
read as a template again: a variable can't break out of its place.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.verdicts import MISSING, follow
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.pipelines.model import Candidate, Pipeline, Step

DEPTH_MAX = 10
TEXT_CHARACTERS_MAX = 100_000
ROOTS = ("variables", "parent", "seed")
_NAME = re.compile(r"\{\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}\}")
_BRACES = re.compile(r"\{\{.*?(?:\}\}|$)", re.DOTALL)


def render(
    step: Step, *, variables: Mapping[str, Any], parent: Candidate | None, seed: int
) -> dict[str, Any]:
    """InvalidInput names the step and the property."""
    names: dict[str, Any] = {
        "variables": variables,
        "seed": seed if step.seed is None else step.seed,
    }
    if parent is not None:
        names["parent"] = parent_values(parent)
    return {
        name: _filled(value, names, _Place(step.name, name))
        for name, value in step.properties.items()
    }


def parent_values(parent: Candidate) -> dict[str, Any]:
    """What a template may say about the parent."""
    return {
        "id": str(parent.id),
        "file": parent.file,
        "text": parent.text,
        "seed": parent.seed,
        "score": parent.score,
        "properties": parent.properties,
    }


class _Place:
    def __init__(self, step: str, name: str) -> None:
        self.step, self.name = step, name

    def refuse(self, what: str) -> InvalidInput:
        message = f"step {self.step!r}, property {self.name!r}: {what}"
        return InvalidInput(message, step=self.step, property=self.name)


def _filled(template: Any, names: Mapping[str, Any], place: _Place, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise place.refuse(f"nested deeper than {DEPTH_MAX} levels")
    if isinstance(template, str):
        return _filled_text(template, names, place)
    if isinstance(template, Mapping):
        return {key: _filled(each, names, place, depth + 1) for key, each in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(each, names, place, depth + 1) for each in template]
    return template


def _filled_text(template: str, names: Mapping[str, Any], place: _Place) -> Any:
    whole = _NAME.fullmatch(template.strip())
    if whole:
        return _value(whole[1], names, place)
    text = _NAME.sub(lambda found: _written(found[1], names, place), template)
    if len(text) > TEXT_CHARACTERS_MAX:
        raise place.refuse(f"the text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    return text


def _value(name: str, names: Mapping[str, Any], place: _Place) -> Any:
    root, *path = name.split(".")
    if root == "parent" and root not in names:
        raise place.refuse("there is no parent: the first step makes candidates out of nothing")
    value = follow(names, (root, *path))
    if value is MISSING:
        raise place.refuse(f"there is no {name}")
    return value


def _written(name: str, names: Mapping[str, Any], place: _Place) -> str:
    value = _value(name, names, place)
    if not isinstance(value, str | int | float):
        raise place.refuse(f"{name} can't be written into a text")
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_in(template: Any) -> list[str]:
    """What a template asks for: `variables.size`, `parent.file`, `seed`."""
    return [name for text in _texts(template) for name in _NAME.findall(text)]


def whole_name(template: Any) -> str | None:
    """The name, of a text that is nothing but `{{ name }}`."""
    found = _NAME.fullmatch(template.strip()) if isinstance(template, str) else None
    return found[1] if found else None


def is_template(value: Any) -> bool:
    return bool(names_in(value))


def template_problems(pipeline: Pipeline) -> list[Problem]:
    """What can be told before a run is there: names that nothing can stand for."""
    found: list[Problem] = []
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            for text in _texts(template):
                found += [
                    Problem("invalid_template", what, step.name, name)
                    for what in _wrong(text, number)
                ]
    return found


def _texts(template: Any) -> Iterator[str]:
    waiting = [template]
    while waiting:
        current = waiting.pop()
        if isinstance(current, str):
            yield current
        elif isinstance(current, Mapping):
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)


def _wrong(text: str, step: int) -> Iterator[str]:
    for braces in _BRACES.findall(text):
        name = _NAME.fullmatch(braces)
        root = name[1].split(".")[0] if name else ""
        if root not in ROOTS:
            yield f"{braces!r:.60} must be {{{{ variables.NAME }}}}, {{{{ parent.NAME }}}} or {{{{ seed }}}}"
        elif root == "parent" and step == 0:
            yield "the first step has no parent"
