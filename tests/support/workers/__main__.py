"""Runs an in-memory control plane with jobs as a process: `python -m tests.support.workers 100`.

Prints its URL. When all jobs have ended, prints a line of JSON with the times at which each job was
leased, started and ended.
"""

import json
import os
import sys
import time

from tests.support.backends.prompts import node
from tests.support.workers.memory_plane import JobFile, Plane
from tests.support.workers.plane_server import serving_plane

INPUT_BYTES = 5_000_000
STEPS, STEP_MS = 4, 50


def fill(plane: Plane, jobs: int) -> None:
    """Jobs of 200 ms of steps, each with a file that passes through."""
    for number in range(jobs):
        prompt = {
            "1": node("EmptyImage", width=8, height=8, batch_size=1, color=number),
            "2": node(
                "ComfyfleetSteps", steps=STEPS, step_ms=STEP_MS, previews=False, image=["1", 0]
            ),
            "3": node("ComfyfleetPassFile", file="", filename_prefix=f"out-{number}"),
        }
        file = JobFile(os.urandom(INPUT_BYTES), "input.bin", binding="3.file")
        plane.add(prompt, files={"input": file}, output_node_id="3")


def main() -> None:
    jobs = int(sys.argv[1])
    with serving_plane() as served:
        plane = served.plane
        fill(plane, jobs)
        sys.stdout.write(f"{plane.url}\n")
        sys.stdout.flush()
        dispatches = plane.dispatches.values()
        while any(dispatch.status != "ended" for dispatch in dispatches):
            time.sleep(0.05)
        told = {
            "completed": len([each for each in dispatches if each.result.outputs]),
            "times": [each.times for each in dispatches],
        }
        sys.stdout.write(f"{json.dumps(told)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
