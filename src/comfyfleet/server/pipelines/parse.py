"""Parses and validates pipeline documents and run variables, reporting every problem with its step and field."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.api.documents import FieldReader, read_document
from comfyfleet.api.expressions import MISSING, Expression, FieldPath, value_at
from comfyfleet.api.graph_model import DocumentProblem
from comfyfleet.api.graph_parse import read_version, read_work
from comfyfleet.api.templates import (
    fill,
    is_template,
    parse_template,
    parse_templates,
    templates_in,
)
from comfyfleet.errors import FleetError, InvalidInput
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

ROOTS = ("variables", "parent", "seed")


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
    return {name: _fill(step, name, value, names) for name, value in step.properties.items()}


def _fill(step: Step, name: str, value: Any, names: Mapping[str, Any]) -> Any:
    try:
        return fill(
            parse_templates(value, ROOTS), lambda path: value_at(names, (path.root, *path.segments))
        )
    except FleetError as problem:
        message = f"step {step.name!r}, property {name!r}: {problem.message}"
        raise InvalidInput(message, step=step.name, property=name) from None


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


def names_in(template: Any, *, needed: bool = False) -> list[str]:
    """Returns the names in a template, such as `variables.size`, `parent.file` or `seed`; `needed`:
    without those that have a default.
    """
    try:
        found = list(templates_in(parse_templates(template, ROOTS)))
    except FleetError:
        return []  # reported when it was parsed
    return [str(path) for each in found for path in (each.needed_paths if needed else each.paths)]


def whole_name(template: Any) -> str | None:
    """Returns the name if the text is nothing but `{{ name }}`."""
    whole = _whole(template)
    return str(whole) if isinstance(whole, FieldPath) else None


def _whole(template: Any) -> Expression | None:
    """Returns the expression if the text is nothing else."""
    try:
        return parse_template(template, ROOTS).whole if isinstance(template, str) else None
    except FleetError:
        return None  # reported when it was parsed


def template_problems(pipeline: PipelineDefinition) -> list[DocumentProblem]:
    """Returns templates that can't be parsed, or have names that can never have a value."""
    found: list[DocumentProblem] = []
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            wrong = _template_problem(template, is_first=number == 0)
            if wrong:
                found.append(DocumentProblem("invalid_template", wrong, step.name, name))
    return found


def _template_problem(template: Any, *, is_first: bool) -> str:
    try:
        parsed = list(templates_in(parse_templates(template, ROOTS)))
    except FleetError as problem:
        return problem.message
    uses_parent = any(path.root == "parent" for each in parsed for path in each.paths)
    return "the first step has no parent" if is_first and uses_parent else ""


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
    if _template_problem(value, is_first=False):
        return ""  # one that can't be read is told as such, and once
    if whole_name(value) == "seed" and step.seed is not None:
        return value_problem(each, step.seed)
    is_broken = bool(_template_problem(value, is_first=False))  # told already
    takes_text = is_broken or each.type in ("text", "choice")
    if isinstance(value, str) and _whole(value) is None and not takes_text:
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


def media_variables(
    pipeline: PipelineDefinition, facts: Mapping[int, WorkflowFacts]
) -> frozenset[str]:
    """Returns the variables that are a file wherever a step takes one."""
    found: set[str] = set()
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            each = facts[number].property_named(name) if number in facts else None
            root, *path = (whole_name(template) or "").split(".")
            if each and each.is_media and root == "variables" and len(path) == 1:
                found.add(path[0])
    return frozenset(found)


def _missing_variables(template: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    for used in names_in(template, needed=True):
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
