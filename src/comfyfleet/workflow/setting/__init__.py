"""Values of a prompt are set by name, checked as the server will check them, and told in words. Pure."""

from comfyfleet.workflow.setting.assigning import Assignment, Edit, parse_assignment, set_values
from comfyfleet.workflow.setting.problems import problem_with

__all__ = ["Assignment", "Edit", "parse_assignment", "problem_with", "set_values"]
