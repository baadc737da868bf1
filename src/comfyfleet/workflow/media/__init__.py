"""The workflow and the prompt inside a file that ComfyUI or one of its savers wrote. Bytes in, no I/O."""

from comfyfleet.workflow.media.json_text import parse_json
from comfyfleet.workflow.media.limits import Limits
from comfyfleet.workflow.media.opening import Opened, open_document

__all__ = ["Limits", "Opened", "open_document", "parse_json"]
