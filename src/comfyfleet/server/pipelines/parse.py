"""Parses and validates pipeline documents and run variables, reporting every problem with its step and field."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.api.graph_conditions import MISSING, value_at
from comfyfleet.api.graph_model import DocumentProblem
from comfyfleet.api.graph_parse import FieldReader, read_document, read_version, read_work
from comfyfleet.errors import InvalidInput
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.graphs.catalogue import GraphCatalogue, WorkflowFacts
from comfyfleet.server.graphs.plan import is_required
from comfyfleet.server.graphs.validate import value_problem
from comfyfleet.server.pipelines.model import (
    PipelineCandidate,
    PipelineDefinition,
    Step,
    step_folder,
)

DEPTH_MAX = 10
TEXT_CHARACTERS_MAX = 100_000
ROOTS = ("variables", "parent", "seed")
_NAME = re.compile(r"\{\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}\}")
_BRACES = re.compile(r"\{\{.*?(?:\}\}|$)", re.DOTALL)


def render(
    step: Step, *, variables: Mapping[str, Any], parent: PipelineCandidate | None, seed: int
) -> dict[str, Any]:
    """Fills the templates of a step's properties; InvalidInput names the step and the property."""
    names: dict[str, Any] = {
        "variables": variables,
        "seed": seed if step.seed is None else step.seed,
    }
    if parent is not None:
        names["parent"] = parent_values(parent)
    return {
        name: _fill(value, names, _TemplateLocation(step.name, name))
        for name, value in step.properties.items()
    }


def parent_values(parent: PipelineCandidate) -> dict[str, Any]:
    """Returns the values that templates can use as `parent`."""
    return {
        "id": str(parent.id),
        "file": parent.file,
        "text": parent.text,
        "seed": parent.seed,
        "score": parent.score,
        "properties": parent.properties,
    }


class _TemplateLocation:
    def __init__(self, step: str, name: str) -> None:
        self.step, self.name = step, name

    def refuse(self, what: str) -> InvalidInput:
        message = f"step {self.step!r}, property {self.name!r}: {what}"
        return InvalidInput(message, step=self.step, property=self.name)


def _fill(template: Any, names: Mapping[str, Any], place: _TemplateLocation, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise place.refuse(f"nested deeper than {DEPTH_MAX} levels")
    if isinstance(template, str):
        return _fill_text(template, names, place)
    if isinstance(template, Mapping):
        return {key: _fill(each, names, place, depth + 1) for key, each in template.items()}
    if isinstance(template, list | tuple):
        return [_fill(each, names, place, depth + 1) for each in template]
    return template


def _fill_text(template: str, names: Mapping[str, Any], place: _TemplateLocation) -> Any:
    whole = _NAME.fullmatch(template.strip())
    if whole:
        return _value(whole[1], names, place)
    text = _NAME.sub(lambda found: _value_as_text(found[1], names, place), template)
    if len(text) > TEXT_CHARACTERS_MAX:
        raise place.refuse(f"the text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    return text


def _value(name: str, names: Mapping[str, Any], place: _TemplateLocation) -> Any:
    root, *path = name.split(".")
    if root == "parent" and root not in names:
        raise place.refuse("there is no parent: the first step makes candidates out of nothing")
    value = value_at(names, (root, *path))
    if value is MISSING:
        raise place.refuse(f"there is no {name}")
    return value


def _value_as_text(name: str, names: Mapping[str, Any], place: _TemplateLocation) -> str:
    value = _value(name, names, place)
    if not isinstance(value, str | int | float):
        raise place.refuse(f"{name} can't be written into a text")
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_in(template: Any) -> list[str]:
    """Returns the names in a template, such as `variables.size`, `parent.file` or `seed`."""
    return [name for text in _texts(template) for name in _NAME.findall(text)]


def whole_name(template: Any) -> str | None:
    """Returns the name if the text is nothing but `{{ name }}`."""
    found = _NAME.fullmatch(template.strip()) if isinstance(template, str) else None
    return found[1] if found else None


def is_template(value: Any) -> bool:
    return bool(names_in(value))


def template_problems(pipeline: PipelineDefinition) -> list[DocumentProblem]:
    """Returns templates with names that can never have a value."""
    found: list[DocumentProblem] = []
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            for text in _texts(template):
                found += [
                    DocumentProblem("invalid_template", what, step.name, name)
                    for what in _template_errors(text, number)
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


def _template_errors(text: str, step: int) -> Iterator[str]:
    for braces in _BRACES.findall(text):
        name = _NAME.fullmatch(braces)
        root = name[1].split(".")[0] if name else ""
        if root not in ROOTS:
            yield f"{braces!r:.60} must be {{{{ variables.NAME }}}}, {{{{ parent.NAME }}}} or {{{{ seed }}}}"
        elif root == "parent" and step == 0:
            yield "the first step has no parent"


STEPS_MAX = 50
CHILDREN_MAX = 10_000
IMAGES_MAX = 100
SEED_MAX = 2**64 - 1
TIMEOUT_SECONDS_MAX = 7 * 24 * 3600


class ParsedPipeline(NamedTuple):
    pipeline: PipelineDefinition
    problems: tuple[DocumentProblem, ...] = ()


def parse_pipeline_text(text: str) -> ParsedPipeline:
    return parse_pipeline(read_document(text))


def parse_pipeline(document: Any) -> ParsedPipeline:
    if not isinstance(document, dict):
        problem = DocumentProblem("invalid_document", "a pipeline must be an object")
        return ParsedPipeline(PipelineDefinition("", ()), (problem,))
    problems: list[DocumentProblem] = []
    fields = FieldReader(document, _reporter(problems, ""))
    name = fields.text("name", required=True)
    rows = fields.take("steps", [])
    if not isinstance(rows, list) or not 1 <= len(rows) <= STEPS_MAX:
        problems.append(
            DocumentProblem("invalid_field", f"steps must be a list of 1 to {STEPS_MAX}")
        )
        rows = []
    fields.refuse_others()
    steps = [_step(row, number, problems) for number, row in enumerate(rows)]
    pipeline = PipelineDefinition(name, tuple(steps))
    problems += _duplicate_names(steps)
    problems += template_problems(pipeline)
    return ParsedPipeline(pipeline, tuple(problems))


def _reporter(problems: list[DocumentProblem], step: str) -> Callable[[str, str, str], None]:
    def report(code: str, message: str, field: str) -> None:
        problems.append(DocumentProblem(code, message, step, field if step else ""))

    return report


def _step(row: Any, number: int, problems: list[DocumentProblem]) -> Step:
    row = row if isinstance(row, dict) else {}
    name = row.get("name")
    fields = FieldReader(
        row, _reporter(problems, name if isinstance(name, str) else f"step {number + 1}")
    )
    workflow, effect = read_work(fields)
    step = Step(
        name=fields.text("name", required=True),
        workflow=workflow,
        effect=effect,
        version=read_version(fields),
        properties=fields.mapping("properties"),
        children_per_parent=fields.whole("children_per_parent", 1, least=1, most=CHILDREN_MAX),
        keep=fields.optional_whole("keep", least=1, most=CHILDREN_MAX),
        needs_approval=fields.truth("needs_approval", False),
        images_per_job=fields.whole("images_per_job", 1, least=1, most=IMAGES_MAX),
        seed=fields.optional_whole("seed", least=0, most=SEED_MAX),
        timeout_seconds=fields.whole("timeout", 300, least=1, most=TIMEOUT_SECONDS_MAX),
    )
    if number and step.children_per_parent % step.images_per_job:
        message = f"must be a multiple of images_per_job ({step.images_per_job})"
        fields.report("invalid_field", f"children_per_parent {message}", "children_per_parent")
    fields.refuse_others()
    return step


def _duplicate_names(steps: list[Step]) -> list[DocumentProblem]:
    """Returns problems with steps whose names give the same folder."""
    found: list[DocumentProblem] = []
    seen: set[str] = set()
    for step in steps:
        try:
            folder = step_folder(step.name) if step.name else ""
        except InvalidInput as problem:
            found.append(DocumentProblem("invalid_field", problem.message, step.name, "name"))
            continue
        if folder and folder in seen:
            found.append(
                DocumentProblem(
                    "repeated_name", f"two steps are called {folder}", step.name, "name"
                )
            )
        seen.add(folder)
    return found


def validate(
    pipeline: PipelineDefinition, catalogue: GraphCatalogue
) -> tuple[DocumentProblem, ...]:
    """Returns unknown workflows and properties, values that don't fit, and missing required
    properties."""
    found: list[DocumentProblem] = []
    for step in pipeline.steps:
        if not (step.workflow or step.effect):
            continue  # reported when it was parsed
        facts = catalogue.facts_for(step)
        if facts is None:
            why = catalogue.why_unknown(step)
            found.append(DocumentProblem("unknown_workflow", why, step.name, step.work_field))
        else:
            found += _property_problems(step, facts)
    return tuple(found)


def _property_problems(step: Step, facts: WorkflowFacts) -> Iterator[DocumentProblem]:
    for name, value in step.properties.items():
        each = facts.property_named(name)
        if each is None:
            known = ", ".join(known.name for known in facts.properties) or "none"
            message = f"{facts.name} has no property {name!r}; it has {known}"
            yield DocumentProblem("unknown_property", message, step.name, name)
        elif wrong := _mismatch(step, each, value):
            yield DocumentProblem("type_mismatch", wrong, step.name, name)
    for each in facts.properties:
        if is_required(each) and each.name not in step.properties:
            yield DocumentProblem("missing_input", "needs a value", step.name, each.name)


def _mismatch(step: Step, each: Property, value: Any) -> str:
    """Returns why a property can't take a value or a template's result; empty if it can, or if it
    isn't known yet."""
    if not is_template(value):
        return value_problem(each, value)
    if whole_name(value) == "seed" and step.seed is not None:
        return value_problem(each, step.seed)
    if isinstance(value, str) and whole_name(value) is None and each.type not in ("text", "choice"):
        return f"takes {each.type}; a text around {{{{ }}}} makes a text"
    return ""


def variable_problems(
    pipeline: PipelineDefinition,
    variables: Mapping[str, Any],
    facts: Mapping[int, WorkflowFacts] | None = None,
) -> tuple[DocumentProblem, ...]:
    """Returns variables that the templates use and that are missing, or that the property can't
    take."""
    found: list[DocumentProblem] = []
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            missing = [
                DocumentProblem("missing_variable", message, step.name, name)
                for message in _missing_variables(template, variables)
            ]
            found += missing
            each = (facts or {})[number].property_named(name) if number in (facts or {}) else None
            if each and not missing and (wrong := _variable_mismatch(each, template, variables)):
                found.append(DocumentProblem("type_mismatch", wrong, step.name, name))
    return tuple(dict.fromkeys(found))


def _missing_variables(template: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    for used in names_in(template):
        root, *path = used.split(".")
        if root == "variables" and (not path or value_at(variables, tuple(path)) is MISSING):
            yield f"the run has no variable {'.'.join(path)!r}"


def _variable_mismatch(each: Property, template: Any, variables: Mapping[str, Any]) -> str:
    """Checks a variable that is used alone, so that its value becomes the property's."""
    root, *path = (whole_name(template) or "").split(".")
    if root != "variables" or each.is_media:
        return ""
    wrong = value_problem(each, value_at(variables, tuple(path)))
    return f"the variable {'.'.join(path)!r}: {wrong}" if wrong else ""
