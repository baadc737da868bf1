"""Which sweeps a control plane runs."""

from comfyfleet.loops.graphs import graph_sweeps
from comfyfleet.loops.pipelines import pipeline_sweeps
from comfyfleet.loops.publishing import scaling_sweeps
from comfyfleet.loops.queue import queue_sweeps
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.loops.upkeep import upkeep_sweeps
from comfyfleet.plane import Plane


def sweeps_of(plane: Plane) -> list[Sweep]:
    """Of several processes behind one port the first has all of them. What is woken by something that
    happens in a process is in each."""
    if plane.siblings is None or plane.siblings.is_first:
        return _all_of(plane)
    return [each for each in _all_of(plane) if each.woken_by is not None]


def _all_of(plane: Plane) -> list[Sweep]:
    return [
        *queue_sweeps(plane),
        *graph_sweeps(plane),
        *pipeline_sweeps(plane),
        *scaling_sweeps(plane),
        *upkeep_sweeps(plane),
    ]
