"""Documents become pipelines: every problem at once, each with its step and field."""

from collections.abc import Callable
from typing import Any, NamedTuple

from comfyfleet.graphs.documents import read_document
from comfyfleet.graphs.fields import Fields
from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.parsing import named_work, read_version
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.pipelines.model import Pipeline, Step
from comfyfleet.pipelines.naming import step_folder
from comfyfleet.pipelines.templates import template_problems

STEPS_MAX = 50
CHILDREN_MAX = 10_000
IMAGES_MAX = 100
SEED_MAX = 2**64 - 1
TIMEOUT_SECONDS_MAX = 7 * 24 * 3600


class ParsedPipeline(NamedTuple):
    pipeline: Pipeline
    problems: tuple[Problem, ...] = ()


def parse_pipeline_text(text: str) -> ParsedPipeline:
    return parse_pipeline(read_document(text))


def parse_pipeline(document: Any) -> ParsedPipeline:
    if not isinstance(document, dict):
        problem = Problem("invalid_document", "a pipeline must be an object")
        return ParsedPipeline(Pipeline("", ()), (problem,))
    problems: list[Problem] = []
    fields = Fields(document, _reporter(problems, ""))
    name = fields.text("name", required=True)
    rows = fields.take("steps", [])
    if not isinstance(rows, list) or not 1 <= len(rows) <= STEPS_MAX:
        problems.append(Problem("invalid_field", f"steps must be a list of 1 to {STEPS_MAX}"))
        rows = []
    fields.refuse_others()
    steps = [_step(row, number, problems) for number, row in enumerate(rows)]
    pipeline = Pipeline(name, tuple(steps))
    problems += _repeated(steps)
    problems += template_problems(pipeline)
    return ParsedPipeline(pipeline, tuple(problems))


def _reporter(problems: list[Problem], step: str) -> Callable[[str, str, str], None]:
    def report(code: str, message: str, field: str) -> None:
        problems.append(Problem(code, message, step, field if step else ""))

    return report


def _step(row: Any, number: int, problems: list[Problem]) -> Step:
    row = row if isinstance(row, dict) else {}
    name = row.get("name")
    fields = Fields(
        row, _reporter(problems, name if isinstance(name, str) else f"step {number + 1}")
    )
    workflow, effect = named_work(fields)
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


def _repeated(steps: list[Step]) -> list[Problem]:
    """Two steps in one folder could not be told apart."""
    found: list[Problem] = []
    seen: set[str] = set()
    for step in steps:
        try:
            folder = step_folder(step.name) if step.name else ""
        except InvalidInput as problem:
            found.append(Problem("invalid_field", problem.message, step.name, "name"))
            continue
        if folder and folder in seen:
            found.append(
                Problem("repeated_name", f"two steps are called {folder}", step.name, "name")
            )
        seen.add(folder)
    return found
