"""Inspects a workflow or prompt: its inputs, outputs and requirements, and the requirements that a
server doesn't meet. Pure.

Internal: may change without notice.
"""

from comfyfleet.workflow.inspect.inspection import inspect
from comfyfleet.workflow.inspect.results import Inspection

__all__ = ["Inspection", "inspect"]
