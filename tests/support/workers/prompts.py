"""Prompts whose duration the test chooses."""

import uuid
from typing import Any

from tests.support.backends.nodes import GPU_FAILURE
from tests.support.backends.prompts import new_color, node


def picture(*, size: int = 16) -> dict[str, Any]:
    return {
        "1": node("EmptyImage", width=size, height=size, batch_size=1, color=new_color()),
        "9": node("SaveImage", images=["1", 0], filename_prefix="made"),
    }


def steps(number: int = 5, step_ms: int = 100) -> dict[str, Any]:
    """This many steps, then a picture."""
    return {
        "1": node("EmptyImage", width=8, height=8, batch_size=1, color=new_color()),
        "2": node("ComfyfleetSteps", steps=number, step_ms=step_ms, previews=False, image=["1", 0]),
        "9": node("SaveImage", images=["2", 0], filename_prefix="made"),
    }


def passing() -> dict[str, Any]:
    """Returns the bytes of the input unchanged."""
    return {"1": node("ComfyfleetPassFile", file="{{input}}", filename_prefix=uuid.uuid4().hex)}


def failing(message: str = "failed on demand", after_ms: int = 0) -> dict[str, Any]:
    return {"1": node("ComfyfleetFail", fail=True, message=message, after_ms=after_ms)}


def failing_on_gpu(message: str) -> dict[str, Any]:
    """For engines with GPU_FAILURES."""
    return {"1": node(GPU_FAILURE, message=message)}


def video() -> dict[str, Any]:
    return {
        "1": node("EmptyImage", width=32, height=32, batch_size=4, color=new_color()),
        "2": node("CreateVideo", images=["1", 0], fps=4.0),
        "9": node("SaveVideo", video=["2", 0], filename_prefix="made", format="auto", codec="auto"),
    }
