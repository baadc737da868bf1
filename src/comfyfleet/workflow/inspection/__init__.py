"""What a workflow or prompt takes, makes and needs, and what of that a server lacks. Pure."""

from comfyfleet.workflow.inspection.inspecting import inspect
from comfyfleet.workflow.inspection.model import Inspection

__all__ = ["Inspection", "inspect"]
