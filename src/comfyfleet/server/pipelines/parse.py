"""Parses and validates pipeline documents and run variables. Reports every problem with its step
and field."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from comfyfleet.api.documents import FieldReader
from comfyfleet.api.expressions import MISSING, Expression, FieldPath, value_at
from comfyfleet.api.graph_model import DocumentProblem, told_names
from comfyfleet.api.graph_parse import (
    EXPRESSION_CHARACTERS_MAX,
    read_judge,
    read_version,
    read_work,
)
from comfyfleet.api.templates import (
    fill,
    is_template,
    parse_template,
    parse_templates,
    template_characters,
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
    StepJudge,
    WorkKey,
    step_folder,
)

ROOTS = ("variables", "parent", "seed")
PARENT_FILE = "{{ parent.file }}"


def render(
    step: Step, *, variables: Mapping[str, Any], parent: PipelineCandidate | None, seed: int
) -> dict[str, Any]:
    """Fills the templates of a step's properties. An InvalidInput error names the step and the
    property."""
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
        "judge_score": parent.judge_score,
        "properties": parent.properties,
    }


def names_in(template: Any, *, needed: bool = False) -> list[str]:
    """Returns the names in a template, such as `variables.size`, `parent.file` or `seed`. With
    `needed`, leaves out names that have a default."""
    try:
        templates = list(templates_in(parse_templates(template, ROOTS)))
    except FleetError:
        return []  # already reported by the parser
    return [
        str(path)
        for template in templates
        for path in (template.needed_paths if needed else template.paths)
    ]


def whole_name(template: Any) -> str | None:
    """Returns the name if the string contains only `{{ name }}`."""
    whole = _whole(template)
    return str(whole) if isinstance(whole, FieldPath) else None


def _whole(template: Any) -> Expression | None:
    """Returns the expression if the string consists of a single `{{ … }}`."""
    try:
        return parse_template(template, ROOTS).whole if isinstance(template, str) else None
    except FleetError:
        return None  # already reported by the parser


def template_problems(pipeline: PipelineDefinition) -> list[DocumentProblem]:
    """Returns the problems of templates that can't be parsed, or that use names that can never have
    a value."""
    properties = [work.properties for work in pipeline.works.values()]
    if template_characters(properties) > EXPRESSION_CHARACTERS_MAX:
        says = f"all templates together can have at most {EXPRESSION_CHARACTERS_MAX:,} characters"
        return [DocumentProblem("too_large", says)]
    problems: list[DocumentProblem] = []
    for key, work in pipeline.works.items():
        for name, template in work.properties.items():
            wrong = _template_problem(template, is_first=key.step == 0)
            if wrong:
                problems.append(_problem(pipeline, key, "invalid_template", wrong, name))
    return problems


def _problem(
    pipeline: PipelineDefinition, key: WorkKey, code: str, message: str, field: str
) -> DocumentProblem:
    """Returns a problem with a field of a step or of its judge."""
    where = f"judge.{field}" if key.is_judge else field
    return DocumentProblem(code, message, pipeline.steps[key.step].name, where)


def _template_problem(template: Any, *, is_first: bool) -> str:
    try:
        parsed = list(templates_in(parse_templates(template, ROOTS)))
    except FleetError as problem:
        return problem.message
    uses_parent = any(path.root == "parent" for template in parsed for path in template.paths)
    return "the first step has no parent" if is_first and uses_parent else ""


STEPS_MAX = 50
CHILDREN_MAX = 10_000
IMAGES_MAX = 100
SEED_MAX = 2**64 - 1
TIMEOUT_SECONDS_MAX = 7 * 24 * 3600


class ParsedPipeline(NamedTuple):
    pipeline: PipelineDefinition
    problems: tuple[DocumentProblem, ...] = ()


def parse_pipeline(document: Any) -> ParsedPipeline:
    """Parses a pipeline and all its templates. This is slow for a large pipeline."""
    parsed = parse_definition(document)
    return parsed._replace(problems=(*parsed.problems, *template_problems(parsed.pipeline)))


def with_our_spelling(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts alternative spellings of a pipeline to the standard ones. Only the standard ones are
    stored."""
    steps = document.get("steps")
    if not isinstance(steps, list):
        return document
    return {**document, "steps": [_with_workflow(step) for step in steps]}


def _with_workflow(step: Any) -> Any:
    if not isinstance(step, dict) or "workflow_id" not in step or "workflow" in step:
        return step
    return {"workflow" if name == "workflow_id" else name: step[name] for name in step}


def with_parent_files(
    document: Mapping[str, Any], pipeline: PipelineDefinition, catalogue: GraphCatalogue
) -> Mapping[str, Any]:
    """Binds the only media input of each later step to the parent's file, unless it already has a
    value."""
    properties = {
        number: {**step.properties, name: PARENT_FILE}
        for number, step in enumerate(pipeline.steps)
        if number and (name := _open_media_input(step, catalogue.facts_for(step)))
    }
    if not properties:
        return document
    steps = [
        {**step, "properties": properties[number]} if number in properties else step
        for number, step in enumerate(document["steps"])
    ]
    return {**document, "steps": steps}


def _open_media_input(step: Step, facts: WorkflowFacts | None) -> str:
    media = [prop for prop in facts.properties if prop.is_media] if facts else []
    if len(media) != 1 or media[0].name in step.properties or not is_required(media[0]):
        return ""
    return media[0].name


def parse_definition(document: Any) -> ParsedPipeline:
    """Parses a pipeline without its templates, which were checked when the pipeline was stored."""
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
        timeout_seconds=fields.optional_whole("timeout", least=1, most=TIMEOUT_SECONDS_MAX),
        judge=_judge(fields),
    )
    if step.judge:
        if fields.values.get("needs_approval") is False:
            message = "a step with a judge needs approval, by the judge or by a person"
            fields.report("invalid_field", message, "needs_approval")
        step = replace(step, needs_approval=True)
    if number and step.children_per_parent % step.images_per_job:
        message = f"must be a multiple of images_per_job ({step.images_per_job})"
        fields.report("invalid_field", f"children_per_parent {message}", "children_per_parent")
    fields.refuse_others()
    return step


def _judge(step_fields: FieldReader) -> StepJudge | None:
    row = step_fields.take("judge")
    if row is None:
        return None
    if not isinstance(row, dict):
        step_fields.wrong("judge", "an object")
        return None

    def report(code: str, message: str, field: str) -> None:
        step_fields.report(code, message, f"judge.{field}")

    fields = FieldReader(row, report)
    read = read_judge(fields, ("workflow", "effect", "version"))
    work_fields = FieldReader(read.work, report)
    workflow, effect = read_work(work_fields)
    name = step_fields.values.get("name")
    judge = StepJudge(
        Step(
            name=f"{name}, judge",
            workflow=workflow,
            effect=effect,
            version=read_version(work_fields),
            properties=read.work["properties"],
            timeout_seconds=fields.optional_whole("timeout", least=1, most=TIMEOUT_SECONDS_MAX),
        ),
        read.into,
        read.score,
        fields.optional_number("approve_above"),
        fields.optional_number("reject_below"),
        read.measure,
    )
    _check_thresholds(judge, fields)
    fields.refuse_others()
    return judge


def _check_thresholds(judge: StepJudge, fields: FieldReader) -> None:
    """Checks that at least one threshold is set, and that reject_below is not above
    approve_above."""
    highest, lowest = judge.approve_above, judge.reject_below
    if all(fields.values.get(name) is None for name in ("approve_above", "reject_below")):
        message = "approve_above or reject_below is required, so that the judge can decide"
        fields.report("missing_field", message, "approve_above")
    if highest is not None and lowest is not None and lowest > highest:
        message = f"reject_below ({lowest:g}) must not be above approve_above ({highest:g})"
        fields.report("invalid_field", message, "reject_below")


def _duplicate_names(steps: list[Step]) -> list[DocumentProblem]:
    """Returns problems with steps whose names result in the same folder."""
    problems: list[DocumentProblem] = []
    seen: set[str] = set()
    for step in steps:
        try:
            folder = step_folder(step.name) if step.name else ""
        except InvalidInput as problem:
            problems.append(DocumentProblem("invalid_field", problem.message, step.name, "name"))
            continue
        if folder and folder in seen:
            problems.append(
                DocumentProblem(
                    "repeated_name", f"two steps have the name {folder}", step.name, "name"
                )
            )
        seen.add(folder)
    return problems


def validate(
    pipeline: PipelineDefinition, catalogue: GraphCatalogue
) -> tuple[DocumentProblem, ...]:
    """Returns unknown workflows and properties, invalid values, and missing required properties."""
    all_problems: list[DocumentProblem] = []
    for key, work in pipeline.works.items():
        if not (work.workflow or work.effect):
            continue  # already reported by the parser
        judge = pipeline.steps[key.step].judge if key.is_judge else None
        facts = catalogue.facts_for(work)
        if facts is None:
            named = "measure" if judge and judge.measure else work.work_field
            why = catalogue.why_unknown(work)
            all_problems.append(_problem(pipeline, key, "unknown_workflow", why, named))
            continue
        problems = [*(_picture_problems(judge, facts) if judge else ())]
        filled_property = judge.picture_property if judge else None
        is_child = key.step > 0 and judge is None
        problems += _property_problems(work, facts, filled_property, is_child=is_child)
        all_problems += [_problem(pipeline, key, *problem) for problem in problems]
    return tuple(all_problems)


def repeated_results(
    pipeline: PipelineDefinition, facts: Mapping[WorkKey, WorkflowFacts]
) -> tuple[str, ...]:
    """Returns a warning for each step that makes several identical candidates."""
    return tuple(
        f"step {step.name!r} makes identical candidates, and each is charged: it has no seed that "
        "changes, and nothing else in its properties differs"
        for number, step in enumerate(pipeline.steps)
        if _is_repeated(number, step, facts.get(WorkKey(number)))
    )


def _is_repeated(number: int, step: Step, facts: WorkflowFacts | None) -> bool:
    if facts is None or (number > 0 and step.children_per_parent == 1):
        return False  # each parent has a single child, so the results differ
    if step.seed is not None:
        return True
    has_open_seed = any(
        prop.type == "seed" and prop.name not in step.properties for prop in facts.properties
    )
    used = (name for template in step.properties.values() for name in names_in(template))
    return not has_open_seed and "seed" not in used


def _picture_problems(judge: StepJudge, facts: WorkflowFacts) -> Iterator[tuple[str, str, str]]:
    """Yields a problem, as its code, message and field, if the judge can't accept an image."""
    name = judge.picture_property
    prop = facts.property_named(name)
    if prop is None:
        yield "unknown_property", _no_property(facts, name), "property"
    elif prop.type != "image":
        message = f"{facts.name} takes {prop.type} as {name!r}; a judge must take an image"
        yield "type_mismatch", message, "property"


def _no_property(facts: WorkflowFacts, name: str) -> str:
    known = told_names(known.name for known in facts.properties)
    return f"{facts.name} has no property {name!r}; available properties: {known}"


def _property_problems(
    work: Step, facts: WorkflowFacts, filled_property: str | None, *, is_child: bool
) -> Iterator[tuple[str, str, str]]:
    """Yields problems with properties, each as its code, message and field. The property
    `filled_property` is set automatically."""
    for name, value in work.properties.items():
        prop = facts.property_named(name)
        if prop is None:
            yield "unknown_property", _no_property(facts, name), name
        elif wrong := _mismatch(work, prop, value):
            yield "type_mismatch", wrong, name
    for prop in facts.properties:
        if is_required(prop) and prop.name not in work.properties and prop.name != filled_property:
            how = f", such as {PARENT_FILE!r}" if prop.is_media and is_child else ""
            yield "missing_input", f"needs a value{how}", prop.name


def _mismatch(step: Step, prop: Property, value: Any) -> str:
    """Returns why a property can't accept a value or the result of a template. Returns an empty
    string if it can, or if that isn't known yet."""
    if not is_template(value):
        return value_problem(prop, value)
    if _template_problem(value, is_first=False):
        return ""  # an unreadable template is reported elsewhere, only once
    if whole_name(value) == "seed" and step.seed is not None:
        return value_problem(prop, step.seed)
    is_broken = bool(_template_problem(value, is_first=False))  # already reported
    takes_text = is_broken or prop.type in ("text", "choice")
    if isinstance(value, str) and _whole(value) is None and not takes_text:
        return f"takes {prop.type}, but a template with text around {{{{ }}}} always gives text"
    return ""


def variable_problems(
    pipeline: PipelineDefinition,
    variables: Mapping[str, Any],
    facts: Mapping[WorkKey, WorkflowFacts] | None = None,
) -> tuple[DocumentProblem, ...]:
    """Returns problems with variables that the templates use: missing ones, and values that a
    property can't accept."""
    known, problems = facts or {}, list[DocumentProblem]()
    for key, work in pipeline.works.items():
        for name, template in work.properties.items():
            missing = [
                _problem(pipeline, key, "missing_variable", message, name)
                for message in _missing_variables(template, variables)
            ]
            problems += missing
            prop = known[key].property_named(name) if key in known else None
            if prop and not missing and (wrong := _variable_mismatch(prop, template, variables)):
                problems.append(_problem(pipeline, key, "type_mismatch", wrong, name))
    return tuple(dict.fromkeys(problems))


def media_variables(
    pipeline: PipelineDefinition, facts: Mapping[WorkKey, WorkflowFacts]
) -> frozenset[str]:
    """Returns the variables whose value must be a file, because a media property uses them."""
    names: set[str] = set()
    for key, work in pipeline.works.items():
        for name, template in work.properties.items():
            prop = facts[key].property_named(name) if key in facts else None
            root, *path = (whole_name(template) or "").split(".")
            if prop and prop.is_media and root == "variables" and len(path) == 1:
                names.add(path[0])
    return frozenset(names)


def _missing_variables(template: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    for used in names_in(template, needed=True):
        root, *path = used.split(".")
        if root == "variables" and (not path or value_at(variables, tuple(path)) is MISSING):
            yield f"the run has no variable {'.'.join(path)!r}"


def _variable_mismatch(prop: Property, template: Any, variables: Mapping[str, Any]) -> str:
    """Checks a variable that is the whole template, so that its value becomes the property's
    value."""
    root, *path = (whole_name(template) or "").split(".")
    if root != "variables" or prop.is_media:
        return ""
    wrong = value_problem(prop, value_at(variables, tuple(path)))
    return f"the variable {'.'.join(path)!r}: {wrong}" if wrong else ""
