"""Parts of a workflow switched on and off. Document in, new document out; no I/O."""

from comfyfleet.workflow.switching.model import DeadShell, Switched
from comfyfleet.workflow.switching.shells import dead_shells
from comfyfleet.workflow.switching.switch import switch

__all__ = ["DeadShell", "Switched", "dead_shells", "switch"]
