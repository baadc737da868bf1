"""Parts of a workflow switched on and off. Document in, new document out; no I/O."""

from comfyfleet.workflow.switching.chains import find_segments
from comfyfleet.workflow.switching.model import Chain, DeadShell, Segment, Switched
from comfyfleet.workflow.switching.segments import keep_segments
from comfyfleet.workflow.switching.shells import dead_shells
from comfyfleet.workflow.switching.switch import switch

__all__ = [
    "Chain",
    "DeadShell",
    "Segment",
    "Switched",
    "dead_shells",
    "find_segments",
    "keep_segments",
    "switch",
]
