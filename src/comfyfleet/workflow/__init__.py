"""Workflows as ComfyUI's editor saves them, and the prompts it makes of them. Pure: no I/O, no clock."""

from comfyfleet.workflow.convert import convert

__all__ = ["convert"]
