"""Removes paths, tracebacks and inputs from the errors of prompts, for customers who may not see
backends. This module does no I/O.
"""

import re
from collections.abc import Mapping
from typing import Any

from comfyfleet.server.jobs.user_messages import redact
from comfyfleet.server.run_log.model import FAILED_TYPE

FAILURE = "execution_error"
# The fields of ComfyUI's message that reveal neither the machine nor its files.
_SHOWN = ("prompt_id", "node_id", "node_type", "executed", "timestamp")
_TYPE = re.compile(r"[A-Za-z_][\w.]{0,199}")


def redacted(kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's message with all details of the backend removed. Only errors are changed."""
    if kind != FAILURE:
        return data
    exception_type = str(data.get("exception_type"))
    return {
        **{name: data[name] for name in _SHOWN if name in data},
        "exception_message": redact(str(data.get("exception_message") or "The prompt failed.")),
        "exception_type": exception_type if _TYPE.fullmatch(exception_type) else FAILED_TYPE,
        "traceback": [],
        "current_inputs": {},
        "current_outputs": [],
    }


def redacted_record(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a history record with all details of the backend removed from its errors."""
    status = record.get("status")
    if not isinstance(status, Mapping):
        return record
    messages = [[kind, redacted(kind, data)] for kind, data in status.get("messages") or ()]
    return {**record, "status": {**status, "messages": messages}}


def without_traceback(value: Any) -> Any:
    """Returns the validation error with every traceback replaced by an empty list."""
    if isinstance(value, Mapping):
        return {
            name: [] if name == "traceback" else without_traceback(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_traceback(inner) for inner in value]
    return value
