"""Sets values of a prompt by name, and switches parts of a workflow on and off. Every function
takes a document and returns a new one. There is no I/O.

Internal: may change without notice.
"""

from comfyfleet.workflow.edit.input_lookup import ExposedInput, Place
from comfyfleet.workflow.edit.shorthands import (
    SHORTHANDS,
    Shorthand,
    set_shorthands,
    shorthand_places,
)
from comfyfleet.workflow.edit.values import (
    Assignment,
    Edit,
    find_input,
    parse_assignment,
    problem_with,
    set_values,
)

__all__ = [
    "SHORTHANDS",
    "Assignment",
    "Edit",
    "ExposedInput",
    "Place",
    "Shorthand",
    "find_input",
    "parse_assignment",
    "problem_with",
    "set_shorthands",
    "set_values",
    "shorthand_places",
]
