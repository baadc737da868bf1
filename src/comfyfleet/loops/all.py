"""Which sweeps a control plane runs."""

from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane


def sweeps_of(plane: Plane) -> list[Sweep]:
    return []
