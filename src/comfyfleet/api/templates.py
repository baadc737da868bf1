"""Templates: texts with expressions in `{{ }}`, wherever they stand in a value of JSON."""

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
    """A text with expressions in it; one that is nothing but an expression keeps its value's kind."""

    text: str
    parts: tuple[str | Expression, ...]

    @property
    def whole(self) -> Expression | None:
        """The expression, if there is nothing else."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return None if isinstance(only, str) else only

    @property
    def paths(self) -> tuple[FieldPath, ...]:
        return self._paths(needed=False)

    @property
    def needed_paths(self) -> tuple[FieldPath, ...]:
        """The paths without which there is no value."""
        return self._paths(needed=True)

    def _paths(self, *, needed: bool) -> tuple[FieldPath, ...]:
        expressions = (part for part in self.parts if not isinstance(part, str))
        found = (each for part in expressions for each in paths_of(part, needed=needed))
        return tuple(dict.fromkeys(found))


_OPEN, _CLOSE = "{{", "}}"
# Up to the braces that close it; braces inside a text in quotes don't.
_BRACES = re.compile(r"""\{\{((?:[^"'}]|\}(?!\})|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)\}\}""")


def is_template(value: Any) -> bool:
    """Whether a value of JSON has a template somewhere."""
    if isinstance(value, Mapping):
        return any(map(is_template, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_template, value))
    return isinstance(value, str) and _OPEN in value


def template_characters(value: Any) -> int:
    """Returns how long the templates of a value of JSON are together."""
    if isinstance(value, Mapping):
        return sum(map(template_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(template_characters, value))
    return len(value) if is_template(value) else 0


def parse_template(text: str, roots: Collection[str] | None) -> Template:
    """Parses a template; InvalidInput says what is wrong and at which character, counted from 1."""
    if len(text) > TEMPLATE_CHARACTERS_MAX:
        raise LimitExceeded(f"the template is longer than {TEMPLATE_CHARACTERS_MAX:,} characters")
    parts: list[str | Expression] = []
    at = 0
    while (opened := text.find(_OPEN, at)) >= 0:
        found = _BRACES.match(text, opened)
        if found is None:
            refuse("{{ is not closed by }}", opened)
        parts += [text[at:opened]] if opened > at else []
        parts.append(
            parse_expression(found[1], roots, what="expression in {{ }}", offset=opened + 2)
        )
        at = found.end()
    # Spaces around the only expression don't make a text of it.
    rest = text[at:]
    outside = "".join(part for part in parts if isinstance(part, str)) + rest
    if len(parts) - sum(isinstance(part, str) for part in parts) == 1 and not outside.strip():
        return Template(text, tuple(part for part in parts if not isinstance(part, str)))
    return Template(text, (*parts, rest) if rest else tuple(parts))


def parse_templates(value: Any, roots: Collection[str] | None) -> Any:
    """Returns a value of JSON with its templates parsed, wherever they stand; others are kept."""
    if isinstance(value, str):
        return parse_template(value, roots) if _OPEN in value else value
    if isinstance(value, Mapping):
        return {key: parse_templates(each, roots) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [parse_templates(each, roots) for each in value]
    return value


def is_filled(value: Any) -> bool:
    """Whether a parsed value has no template."""
    return next(templates_in(value), None) is None


def templates_in(value: Any) -> Iterator[Template]:
    """Yields the templates of a parsed value."""
    if isinstance(value, Template):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from templates_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from templates_in(each)


def write_templates(value: Any) -> Any:
    """Returns a parsed value as it was written."""
    if isinstance(value, Template):
        return value.text
    if isinstance(value, Mapping):
        return {key: write_templates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [write_templates(each) for each in value]
    return value


def fill(value: Any, read: Read, steps: StepCount | None = None) -> Any:
    """Returns a parsed value with its templates filled; InvalidInput says what one lacks."""
    return _fill(value, read, steps or StepCount())


def _fill(value: Any, read: Read, steps: StepCount) -> Any:
    if isinstance(value, Template):
        return _fill_template(value, read, steps)
    if isinstance(value, Mapping):
        return {key: _fill(each, read, steps) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(each, read, steps) for each in value]
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
