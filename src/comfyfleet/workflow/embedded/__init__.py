"""Extracts the workflow and the prompt from a file that ComfyUI or one of its savers wrote. Bytes in, no I/O.

Internal: may change without notice.
"""

from comfyfleet.workflow.embedded.document import Opened, open_document
from comfyfleet.workflow.embedded.reader import FileLimits, parse_json

__all__ = ["FileLimits", "Opened", "open_document", "parse_json"]
