"""What a workflow or prompt takes, makes and needs, and what of that a server lacks. Pure."""

from comfyfleet.workflow.inspect.inspection import inspect
from comfyfleet.workflow.inspect.model import Inspection

__all__ = ["Inspection", "inspect"]
