"""How busy a worker keeps its backend: 100 jobs of 200 ms, each with 5 MB in and 5 MB out.

Control plane, worker and engine are processes of their own. The engine's own record of each prompt
(its start and end, in its history) tells how long it executed; the makespan is from the first start
to the last end. The rest is time in which a GPU would have stood still.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
COMFYFLEET = Path(sys.executable).parent / "comfyfleet"
JOBS = 100
BUSY_MIN = 0.97
SECRET = "fleet-secret"  # noqa: S105  of the control plane in memory
HISTORY_MAX = 10_000


@dataclass(frozen=True)
class Span:
    """One prompt in the engine, in seconds since 1970."""

    started: float
    ended: float


@contextmanager
def process(*command: str | Path, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def first_url(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    found = re.search(r"http://\S+:\d+", child.stdout.readline())
    assert found
    return found[0]


def spans(engine_url: str) -> list[Span]:
    answer = httpx.get(f"{engine_url}/history", params={"max_items": HISTORY_MAX}, timeout=60)
    return sorted((span_of(record) for record in answer.json().values()), key=lambda s: s.started)


def span_of(record: dict[str, Any]) -> Span:
    times = {kind: data["timestamp"] / 1000 for kind, data in record["status"]["messages"]}
    return Span(times["execution_start"], times["execution_success"])


def measure(jobs: int) -> list[Span]:
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(process(COMFYFLEET, "engine", "--port", "0"))
        engine_url = first_url(engine)
        plane = stack.enter_context(process(sys.executable, "-m", "tests.agentkit", str(jobs)))
        control = ("--control", first_url(plane), "--fleet", "gpus", "--backend", engine_url)
        environ = {"COMFYFLEET_FLEET_SECRET": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
        stack.enter_context(process(COMFYFLEET, "worker", *control, "--state", state, **environ))
        assert plane.stdout is not None
        told = json.loads(plane.stdout.readline())
        assert told["completed"] == jobs
        return spans(engine_url)


def main() -> int:
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else JOBS)
    makespan = found[-1].ended - found[0].started
    busy = sum(span.ended - span.started for span in found)
    gaps = [after.started - before.ended for before, after in pairwise(found)]
    longest = ", ".join(f"{1000 * gap:.0f}" for gap in sorted(gaps, reverse=True)[:5])
    print(f"{len(found)} jobs, {1000 * busy / len(found):.1f} ms each in the engine")
    print(f"makespan {makespan:.2f} s, executing {busy:.2f} s; longest gaps {longest} ms")
    print(f"busy {100 * busy / makespan:.1f} % (at least {100 * BUSY_MIN:.0f} %)")
    return 0 if busy / makespan >= BUSY_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
