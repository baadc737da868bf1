"""Values of a prompt, checked as the server will check them. Pure."""

from comfyfleet.workflow.setting.problems import problem_with

__all__ = ["problem_with"]
