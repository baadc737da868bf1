"""Processes of `comfyfleet`, forked from one that has imported what they need."""

from tests.processkit.forked import Forked

__all__ = ["Forked"]
