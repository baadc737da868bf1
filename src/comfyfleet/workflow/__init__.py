"""Workflows as ComfyUI's editor saves them, and the prompts it makes of them. Pure: no I/O, no clock.

Public: the names in `__all__`.
"""

from comfyfleet.workflow.conversion import Conversion, convert, convert_with_report
from comfyfleet.workflow.model import Limits
from comfyfleet.workflow.object_info import ObjectInfo
from comfyfleet.workflow.report import Warning

__all__ = ["Conversion", "Limits", "ObjectInfo", "Warning", "convert", "convert_with_report"]
