"""How ComfyUI writes down what went wrong, in refusals and in failed runs."""

import traceback
from typing import Any

from comfyfleet.kernel.errors import FleetError

# One entry of `node_errors[id].errors`, or the `error` of a refused prompt.
Fault = dict[str, Any]


def fault(kind: str, message: str, details: str = "", **extra_info: Any) -> Fault:
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


def type_name(error: BaseException) -> str:
    """The exception's type as ComfyUI shows it; ours pass for what a ComfyUI node would raise."""
    if isinstance(error, FleetError):
        return str(error.details.get("exception_type", "Exception"))
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def trace(error: BaseException) -> list[str]:
    return traceback.format_tb(error.__traceback__)
