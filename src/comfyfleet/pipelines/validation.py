"""What is wrong with a pipeline, and with what a run of it was given, before anything is made."""

from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.effects.model import Property
from comfyfleet.graphs.catalogue import Catalogue, WorkflowFacts
from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.plan import must_be_given
from comfyfleet.graphs.validation import value_problem
from comfyfleet.graphs.verdicts import MISSING, follow
from comfyfleet.pipelines.model import Pipeline, Step
from comfyfleet.pipelines.templates import is_template, names_in, whole_name


def validate(pipeline: Pipeline, catalogue: Catalogue) -> tuple[Problem, ...]:
    """Unknown workflows and properties, values that don't fit, required properties that are missing."""
    found: list[Problem] = []
    for step in pipeline.steps:
        if not (step.workflow or step.effect):
            continue  # that was told when it was read
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
        elif wrong := _mismatch(step, each, value):
            yield Problem("type_mismatch", wrong, step.name, name)
    for each in facts.properties:
        if must_be_given(each) and each.name not in step.properties:
            yield Problem("missing_input", "needs a value", step.name, each.name)


def _mismatch(step: Step, each: Property, value: Any) -> str:
    """Why a property can't take a value or what a template makes; empty if it can, or none can tell."""
    if not is_template(value):
        return value_problem(each, value)
    if whole_name(value) == "seed" and step.seed is not None:
        return value_problem(each, step.seed)
    if isinstance(value, str) and whole_name(value) is None and each.type not in ("text", "choice"):
        return f"takes {each.type}; a text around {{{{ }}}} makes a text"
    return ""


def variable_problems(
    pipeline: Pipeline,
    variables: Mapping[str, Any],
    facts: Mapping[int, WorkflowFacts] | None = None,
) -> tuple[Problem, ...]:
    """Variables that templates name and a run was not given, or of a kind that the property can't take."""
    found: list[Problem] = []
    for number, step in enumerate(pipeline.steps):
        for name, template in step.properties.items():
            missing = [
                Problem("missing_variable", message, step.name, name)
                for message in _missing(template, variables)
            ]
            found += missing
            each = (facts or {})[number].property_named(name) if number in (facts or {}) else None
            if each and not missing and (wrong := _wrong_variable(each, template, variables)):
                found.append(Problem("type_mismatch", wrong, step.name, name))
    return tuple(dict.fromkeys(found))


def _missing(template: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    for used in names_in(template):
        root, *path = used.split(".")
        if root == "variables" and (not path or follow(variables, tuple(path)) is MISSING):
            yield f"the run has no variable {'.'.join(path)!r}"


def _wrong_variable(each: Property, template: Any, variables: Mapping[str, Any]) -> str:
    """Of a template that is nothing but one variable: its value is the property's."""
    root, *path = (whole_name(template) or "").split(".")
    if root != "variables" or each.is_media:
        return ""
    wrong = value_problem(each, follow(variables, tuple(path)))
    return f"the variable {'.'.join(path)!r}: {wrong}" if wrong else ""
