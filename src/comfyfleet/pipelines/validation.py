"""What is wrong with a pipeline, and with what a run of it was given, before anything is made."""

from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.graphs.catalogue import Catalogue, WorkflowFacts
from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.plan import must_be_given
from comfyfleet.graphs.validation import value_problem
from comfyfleet.pipelines.model import Pipeline, Step
from comfyfleet.pipelines.templates import is_template, names_in


def validate(pipeline: Pipeline, catalogue: Catalogue) -> tuple[Problem, ...]:
    """Unknown workflows and properties, values that don't fit, required properties that are missing."""
    found: list[Problem] = []
    for step in pipeline.steps:
        facts = catalogue.facts_for(step)
        if facts is None:
            why = catalogue.why_unknown(step)
            found.append(Problem("unknown_workflow", why, step.name, step.work_field))
        else:
            found += _property_problems(step, facts)
    return tuple(found)


def _property_problems(step: Step, facts: WorkflowFacts) -> Iterator[Problem]:
    for name, value in step.properties.items():
        each = facts.property_named(name)
        if each is None:
            known = ", ".join(known.name for known in facts.properties) or "none"
            message = f"{facts.name} has no property {name!r}; it has {known}"
            yield Problem("unknown_property", message, step.name, name)
        elif not is_template(value) and (wrong := value_problem(each, value)):
            yield Problem("type_mismatch", wrong, step.name, name)
    for each in facts.properties:
        if must_be_given(each) and each.name not in step.properties:
            yield Problem("missing_input", "needs a value", step.name, each.name)


def variable_problems(pipeline: Pipeline, variables: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Variables that templates name and a run was not given."""
    found: list[Problem] = []
    for step in pipeline.steps:
        for name, template in step.properties.items():
            for used in names_in(template):
                root, *path = used.split(".")
                if root == "variables" and (not path or path[0] not in variables):
                    message = f"the run has no variable {'.'.join(path)!r}"
                    found.append(Problem("missing_variable", message, step.name, name))
    return tuple(dict.fromkeys(found))
