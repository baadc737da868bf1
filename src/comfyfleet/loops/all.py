"""Which sweeps a control plane runs."""

from comfyfleet.loops.queue import queue_sweeps
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane


def sweeps_of(plane: Plane) -> list[Sweep]:
    return list(queue_sweeps(plane))
