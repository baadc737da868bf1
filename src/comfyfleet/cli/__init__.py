"""The `comfyfleet` command.

Internal: may change without notice.
"""

from comfyfleet.cli.main import main

__all__ = ["main"]
