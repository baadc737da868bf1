"""The built-in CPU backend: implements ComfyUI's protocol and actually executes prompts, without
torch and without a GPU.

Internal: may change without notice.
"""

from comfyfleet.engine.engine import DataFolder, Engine
from comfyfleet.engine.serve import Served, serve_in_thread

__all__ = ["DataFolder", "Engine", "Served", "serve_in_thread"]
