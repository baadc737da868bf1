"""The `comfyfleet` command."""

from comfyfleet.cli.main import main

__all__ = ["main"]
