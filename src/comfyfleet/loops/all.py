"""Which sweeps a control plane runs."""

from functools import partial

from comfyfleet.loops.pipelines import RESULTS, pipeline_sweeps
from comfyfleet.loops.publishing import scaling_sweeps
from comfyfleet.loops.queue import queue_sweeps
from comfyfleet.loops.sweeping import Sweep, Sweeps
from comfyfleet.loops.upkeep import upkeep_sweeps
from comfyfleet.pipelines.acting import RUN_KIND
from comfyfleet.plane import Plane


def sweeps_of(plane: Plane) -> list[Sweep]:
    return [
        *queue_sweeps(plane),
        *pipeline_sweeps(plane),
        *scaling_sweeps(plane),
        *upkeep_sweeps(plane),
    ]


def woken(plane: Plane, sweeps: Sweeps) -> Sweeps:
    """Runs go on when something has happened in this process, not when a sweep's time has come."""
    plane.sides.news.wake_with(RUN_KIND, partial(sweeps.wake, RESULTS))
    return sweeps
