"""Templates: strings with expressions in `{{ }}`, anywhere in a JSON value."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from comfyfleet.api.expressions import (
    Expression,
    FieldPath,
    FunctionCall,
    Read,
    StepCount,
    compute,
    parse_expression,
    paths_of,
    refuse,
)
from comfyfleet.api.functions import TEXT_CHARACTERS_MAX
from comfyfleet.errors import InvalidInput, LimitExceeded

TEMPLATE_CHARACTERS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Template:
    """A string with expressions. If it consists of a single expression, the result keeps the type
    of the expression's value."""

    text: str
    parts: tuple[str | Expression, ...]

    @property
    def whole(self) -> Expression | None:
        """Returns the expression, if the template contains nothing else."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return None if isinstance(only, str) else only

    @property
    def paths(self) -> tuple[FieldPath, ...]:
        return self._paths(needed=False)

    @property
    def needed_paths(self) -> tuple[FieldPath, ...]:
        """Returns the paths that must exist for the template to have a value."""
        return self._paths(needed=True)

    def _paths(self, *, needed: bool) -> tuple[FieldPath, ...]:
        expressions = (part for part in self.parts if not isinstance(part, str))
        paths = (path for part in expressions for path in paths_of(part, needed=needed))
        return tuple(dict.fromkeys(paths))


_OPEN, _CLOSE = "{{", "}}"
# Matches up to the closing braces. Braces inside a quoted text don't count.
_BRACES = re.compile(r"""\{\{((?:[^"'}]|\}(?!\})|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)\}\}""")


def is_template(value: Any) -> bool:
    """Checks whether a JSON value contains a template."""
    if isinstance(value, Mapping):
        return any(map(is_template, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_template, value))
    return isinstance(value, str) and _OPEN in value


def template_characters(value: Any) -> int:
    """Returns the total length of the templates in a JSON value."""
    if isinstance(value, Mapping):
        return sum(map(template_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(template_characters, value))
    return len(value) if is_template(value) else 0


def parse_template(text: str, roots: Collection[str] | None) -> Template:
    """Parses a template. Raises InvalidInput with the problem and its position, counted from 1."""
    if len(text) > TEMPLATE_CHARACTERS_MAX:
        raise LimitExceeded(f"the template is longer than {TEMPLATE_CHARACTERS_MAX:,} characters")
    parts: list[str | Expression] = []
    at = 0
    while (opened := text.find(_OPEN, at)) >= 0:
        match = _BRACES.match(text, opened)
        if match is None:
            refuse("{{ is not closed by }}", opened)
        parts += [text[at:opened]] if opened > at else []
        parts.append(
            parse_expression(match[1], roots, what="expression in {{ }}", offset=opened + 2)
        )
        at = match.end()
    # Spaces around a single expression don't turn the result into a string.
    rest = text[at:]
    outside = "".join(part for part in parts if isinstance(part, str)) + rest
    if len(parts) - sum(isinstance(part, str) for part in parts) == 1 and not outside.strip():
        return Template(text, tuple(part for part in parts if not isinstance(part, str)))
    return Template(text, (*parts, rest) if rest else tuple(parts))


def parse_templates(value: Any, roots: Collection[str] | None) -> Any:
    """Returns a JSON value with its templates parsed. Other values are not changed."""
    if isinstance(value, str):
        return parse_template(value, roots) if _OPEN in value else value
    if isinstance(value, Mapping):
        return {key: parse_templates(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [parse_templates(item, roots) for item in value]
    return value


def is_filled(value: Any) -> bool:
    """Checks whether a parsed value contains no template."""
    return next(templates_in(value), None) is None


def templates_in(value: Any) -> Iterator[Template]:
    """Yields the templates of a parsed value."""
    if isinstance(value, Template):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from templates_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from templates_in(item)


def write_templates(value: Any) -> Any:
    """Returns a parsed value in its original form."""
    if isinstance(value, Template):
        return value.text
    if isinstance(value, Mapping):
        return {key: write_templates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [write_templates(item) for item in value]
    return value


def fill(value: Any, read: Read, steps: StepCount | None = None) -> Any:
    """Returns a parsed value with its templates filled. Raises InvalidInput if a template has no
    value."""
    return _fill(value, read, steps or StepCount())


def _fill(value: Any, read: Read, steps: StepCount) -> Any:
    if isinstance(value, Template):
        return _fill_template(value, read, steps)
    if isinstance(value, Mapping):
        return {key: _fill(item, read, steps) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(item, read, steps) for item in value]
    return value


def _fill_template(template: Template, read: Read, steps: StepCount) -> Any:
    if template.whole is not None:
        return compute(template.whole, read, steps)
    texts = [
        part if isinstance(part, str) else compute(FunctionCall("text", (part,)), read, steps)
        for part in template.parts
    ]
    if sum(map(len, texts)) > TEXT_CHARACTERS_MAX:
        raise InvalidInput(f"the text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    return "".join(texts)
