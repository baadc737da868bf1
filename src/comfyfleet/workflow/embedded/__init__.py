"""Extracts the workflow and the prompt from the bytes of a file that ComfyUI or one of its savers
wrote. There is no I/O.

Internal: may change without notice.
"""

from comfyfleet.workflow.embedded.document import Opened, open_document
from comfyfleet.workflow.embedded.reader import FileLimits, parse_json
from comfyfleet.workflow.embedded.replacement import replace_prompt_in_place

__all__ = ["FileLimits", "Opened", "open_document", "parse_json", "replace_prompt_in_place"]
