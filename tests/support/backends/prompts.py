"""Prompts that a real ComfyUI can also run, because their nodes need no models."""

import uuid
from typing import Any

from comfyfleet.comfy.backend import Backend
from comfyfleet.comfy.events import Event

Prompt = dict[str, Any]


def new_id() -> str:
    return str(uuid.uuid4())


def picture(color: int, *, size: int = 16, prefix: str = "contract") -> Prompt:
    """Two nodes, one file. Another color is another picture, so nothing comes from the cache."""
    return {
        "1": node("EmptyImage", width=size, height=size, batch_size=1, color=color),
        "9": node("SaveImage", images=["1", 0], filename_prefix=prefix),
    }


def slow(color: int, *, nodes: int = 2) -> Prompt:
    """Takes some seconds on our engine, which sleeps, in several nodes."""
    prompt: Prompt = {"1": node("EmptyImage", width=16, height=16, batch_size=1, color=color)}
    for number in range(2, nodes + 2):
        source = [str(number - 1), 0]
        steps = {"steps": 8, "step_ms": 100, "previews": False}
        prompt[str(number)] = node("ComfyfleetSteps", image=source, **steps)
    prompt["99"] = node("PreviewImage", images=[str(nodes + 1), 0])
    return prompt


def heavy(color: int, *, nodes: int = 2) -> Prompt:
    """Takes seconds on any ComfyUI: real work on a CPU."""
    prompt: Prompt = {"1": node("EmptyImage", width=1024, height=1024, batch_size=1, color=color)}
    for number in range(2, nodes + 2):
        source = [str(number - 1), 0]
        prompt[str(number)] = node("ImageBlur", image=source, blur_radius=31, sigma=1.0)
    prompt["99"] = node("PreviewImage", images=[str(nodes + 1), 0])
    return prompt


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def new_color() -> int:
    return uuid.uuid4().int % 0xFFFFFF


async def run(backend: Backend, prompt: Prompt) -> tuple[str, list[Event]]:
    """Runs a prompt; returns its id and all its events."""
    submitted = await backend.submit(prompt, prompt_id=new_id())
    return submitted.run_id, [event async for event in backend.follow(submitted.run_id)]


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]
