"""Values of a prompt are set by name, checked as the server will check them, and told in words. Pure."""

from comfyfleet.workflow.setting.addressing import ExposedInput, Place
from comfyfleet.workflow.setting.assigning import (
    Assignment,
    Edit,
    find_input,
    parse_assignment,
    set_values,
)
from comfyfleet.workflow.setting.problems import problem_with
from comfyfleet.workflow.setting.shorthands import set_shorthands, shorthand_places
from comfyfleet.workflow.setting.shorthandtable import SHORTHANDS, Shorthand

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
