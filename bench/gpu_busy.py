"""Measures how busy a worker keeps its backend, with 100 jobs of 200 ms, each with 5 MB in and 5 MB
out.

The control plane, the worker and the engine are separate processes. The engine's history contains
the start and end of each prompt, so it shows how long the engine executed. The makespan is the time
from the first start to the last end. For the part of it without execution, a GPU would have been
idle.

`--memory` uses a control plane that keeps everything in memory, so that only the worker causes idle
time.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from support import (
    COMFYFLEET,
    HISTORY_MAX,
    call_json,
    control_plane,
    exit_on_sigterm,
    exit_status,
    first_url,
    is_quick,
    process,
    wait_for,
)

JOBS = 4 if is_quick() else 100
STEPS, STEP_MS = 4, 50
INPUT_BYTES = 5_000_000
BUSY_MIN = 0.97
FLEET, WORKFLOW = "gpus", "busy"
PROMPT = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
    },
    "2": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": STEPS, "step_ms": STEP_MS, "previews": False, "image": ["1", 0]},
    },
    "3": {"class_type": "ComfyfleetPassFile", "inputs": {"file": "", "filename_prefix": "out"}},
}
PROPERTIES = [
    # Each job uses a different color, so that nothing comes from the engine's cache.
    {"name": "color", "type": "integer", "binding": "1.color", "default": 0},
    {"name": "input", "type": "image", "binding": "3.file", "required": True},
]


@dataclass(frozen=True)
class Span:
    """One prompt in the engine, in seconds since 1970."""

    started: float
    ended: float


@dataclass(frozen=True)
class Control:
    url: str
    secret: str


@contextmanager
def in_memory(jobs: int) -> Iterator[Control]:
    with process(sys.executable, "-m", "tests.support.workers", str(jobs)) as plane:
        yield Control(first_url(plane), "fleet-secret")


@contextmanager
def real(jobs: int, folder: Path) -> Iterator[Control]:
    with control_plane(folder) as (url, admin):
        secret = call_json(admin, "POST", "/fleets", slug=FLEET, stage="production")["secret"]
        call_json(
            admin,
            "POST",
            "/workflows",
            slug=WORKFLOW,
            document=PROMPT,
            properties=PROPERTIES,
            output_node_id="3",
        )
        call_json(admin, "PUT", f"/fleets/{FLEET}/production/workflows", workflow_slugs=[WORKFLOW])
        for number in range(jobs):
            submit(admin, number)
        yield Control(url, secret)


def submit(admin: httpx.Client, number: int) -> None:
    announced = call_json(admin, "POST", "/uploads", filename="input.png", size=INPUT_BYTES)
    slot = announced["upload"]
    data = os.urandom(INPUT_BYTES)
    httpx.put(slot["url"], content=data, headers=slot["headers"]).raise_for_status()
    call_json(
        admin,
        "POST",
        "/jobs",
        workflow_slug=WORKFLOW,
        properties={"color": number},
        files={"input": announced["file_id"]},
    )


def spans(engine_url: str) -> list[Span]:
    answer = httpx.get(f"{engine_url}/history", params={"max_items": HISTORY_MAX}, timeout=60)
    return sorted((span_of(record) for record in answer.json().values()), key=lambda s: s.started)


def span_of(record: dict[str, Any]) -> Span:
    times = {kind: data["timestamp"] / 1000 for kind, data in record["status"]["messages"]}
    return Span(times["execution_start"], times["execution_success"])


def measure(jobs: int, *, memory: bool) -> list[Span]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(process(COMFYFLEET, "engine", "--port", "0"))
        engine_url = first_url(engine)
        plane = in_memory(jobs) if memory else real(jobs, folder / "plane")
        control = stack.enter_context(plane)
        where = ("--control", control.url, "--fleet", FLEET, "--backend", engine_url)
        environ = {"COMFYFLEET_FLEET_SECRET": control.secret, "AWS_EC2_METADATA_DISABLED": "true"}
        state = ("--state", folder / "worker")
        stack.enter_context(process(COMFYFLEET, "worker", *where, *state, **environ))
        wait_for(lambda: len(spans(engine_url)) == jobs)
        return spans(engine_url)


def main() -> int:
    exit_on_sigterm()
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    records = measure(numbers[0] if numbers else JOBS, memory="--memory" in sys.argv)
    makespan = records[-1].ended - records[0].started
    busy = sum(span.ended - span.started for span in records)
    gaps = sorted(
        (after.started - before.ended for before, after in pairwise(records)), reverse=True
    )
    longest = ", ".join(f"{1000 * gap:.0f}" for gap in gaps[:5])
    print(f"{len(records)} jobs, {1000 * busy / len(records):.1f} ms each in the engine")
    print(f"makespan {makespan:.2f} s, executing {busy:.2f} s; longest gaps {longest} ms")
    print(f"busy {100 * busy / makespan:.1f} % (at least {100 * BUSY_MIN:.0f} %)")
    return exit_status(is_met=busy / makespan >= BUSY_MIN)


if __name__ == "__main__":
    sys.exit(main())
