"""Which sweeps a control plane runs."""

from comfyfleet.loops.publishing import Publishing
from comfyfleet.loops.queue import queue_sweeps
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane


def sweeps_of(plane: Plane) -> list[Sweep]:
    sweeps = list(queue_sweeps(plane))
    if plane.settings.cloudwatch_namespace:
        seconds = plane.settings.cloudwatch_seconds
        sweeps.append(Sweep("cloudwatch", Publishing(plane), seconds))
    return sweeps
