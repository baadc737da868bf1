"""Inspects a workflow or prompt: its inputs, outputs and requirements, and what of these a server lacks.
Pure.

Internal: may change without notice.
"""

from comfyfleet.workflow.inspect.inspection import inspect
from comfyfleet.workflow.inspect.results import Inspection

__all__ = ["Inspection", "inspect"]
