"""Values of a prompt set by name, and parts of a workflow switched on and off. Document in, new document out; no I/O.

Internal: may change without notice.
"""

from comfyfleet.workflow.edit.addresses import ExposedInput, Place
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
