"""What a workflow or prompt takes, makes and needs, and what of that a server lacks. Pure.

Internal: may change without notice.
"""

from comfyfleet.workflow.inspect.inspection import inspect
from comfyfleet.workflow.inspect.model import Inspection

__all__ = ["Inspection", "inspect"]
