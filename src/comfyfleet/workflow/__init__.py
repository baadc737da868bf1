"""Workflows in the format of ComfyUI's editor, and their conversion to prompts. Pure: uses no I/O
and no clock.

Public: the names in `__all__`.
"""

from comfyfleet.workflow.conversion import Conversion, convert, convert_with_report
from comfyfleet.workflow.model import Limits
from comfyfleet.workflow.object_info import ObjectInfo
from comfyfleet.workflow.report import Warning

__all__ = ["Conversion", "Limits", "ObjectInfo", "Warning", "convert", "convert_with_report"]
