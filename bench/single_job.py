"""Measures the overhead of a single job: the time from its submission until the client has the
result, without the run itself.

    python bench/single_job.py [--quick] [--jobs 60] [--rounds 4] [--before TREE] [--check]

A control plane, a worker and the built-in engine run as separate processes, once from this tree and
once from the previous version. Jobs alternate between the two in short rounds. The steps of a job
come from the engine's history and the worker's log, because all processes share one clock.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from support import (
    ADMIN_KEY,
    ROOT,
    answers,
    bearer,
    call_json,
    exit_on_sigterm,
    exit_status,
    free_port,
    wait_for,
)

COMMIT = "0d109615"  # the previous version
MEDIAN_MAX = 0.45  # the maximum, as a factor of the previous version's median
PAUSE_SECONDS = 0.12  # between two jobs: a user makes at most 20 calls per second
WORST_MAX = 3.0  # the maximum of the 99th percentile, as a factor of the median
PROMPT = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "made"}},
}
PROPERTIES = [{"name": "color", "type": "integer", "binding": "1.color", "default": 0}]
STEPS = (
    "submit: request answered",
    "lease: submission → worker has the job",
    "start: worker has the job → prompt runs",
    "run (not counted)",
    "deliver: run ended → lease ended",
    "notify: lease ended → client has the answer",
)


@dataclass
class JobTimes:
    """The times of one job's steps, in seconds since 1970."""

    began: float
    submitted: float
    answered: float
    prompt_id: str = ""
    leased: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    delivered: float = 0.0

    @property
    def around_ms(self) -> float:
        return 1000 * (self.answered - self.began - (self.ended - self.started))

    @property
    def steps_ms(self) -> tuple[float, ...]:
        moments = (
            (self.began, self.submitted),
            (self.began, self.leased),
            (self.leased, self.started),
            (self.started, self.ended),
            (self.ended, self.delivered),
            (self.delivered, self.answered),
        )
        return tuple(1000 * (end - begin) for begin, end in moments)


@dataclass
class Side:
    """A running system of one version, and the times of its jobs."""

    name: str
    client: httpx.Client
    engine: httpx.Client
    effect_id: str
    log: Path
    processes: dict[str, psutil.Process]
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    times: dict[str, JobTimes] = field(default_factory=dict)

    def run_all(self, colors: Sequence[int]) -> None:
        """Runs one job after the other, and adds up the CPU time of each process."""
        before = self._cpu()
        for color in colors:
            self.run(color)
            time.sleep(PAUSE_SECONDS)
        for name, seconds in self._cpu().items():
            self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + seconds - before[name]

    def _cpu(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: cpu.user + cpu.system for name, cpu in times.items()}

    def run(self, color: int) -> None:
        body = {"effect_id": self.effect_id, "properties": {"color": color}}
        begin = time.time()
        response = self.client.post("/api/ai-jobs", json=body)
        submitted = time.time()
        assert response.status_code == 201, response.text
        job_id = response.json()["id"]
        answer: dict[str, Any] = {}
        while answer.get("status") not in ("completed", "failed", "cancelled"):
            answer = self.client.get(f"/api/ai-jobs/{job_id}", params={"wait": 30}).json()
        assert answer["status"] == "completed", answer
        self.times[job_id] = JobTimes(begin, submitted, time.time())

    def read_steps(self) -> list[JobTimes]:
        """Adds the times in the worker's log and the engine's history to each job, and returns the
        times of all jobs."""
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                times = self.times.get(entry.get("job_id", ""))
                if times is not None:
                    _note(times, entry)
        history = self.engine.get("/history", params={"max_items": 10_000}).json()
        for times in self.times.values():
            messages = dict(history[times.prompt_id]["status"]["messages"])
            times.started = messages["execution_start"]["timestamp"] / 1000
            times.ended = messages["execution_success"]["timestamp"] / 1000
        return list(self.times.values())


def _note(times: JobTimes, entry: dict[str, Any]) -> None:
    at = datetime.fromisoformat(entry["at"]).timestamp()
    if entry["message"] == "a lease was taken":
        times.leased, times.prompt_id = at, entry["prompt_id"]
    elif entry["message"] == "a lease has ended":
        times.delivered = at


@contextlib.contextmanager
def started(
    tree: Path, folder: Path, *arguments: str, **environ: str
) -> Iterator[tuple[Path, psutil.Process]]:
    """Runs comfyfleet from a tree with this interpreter, and yields its log and process."""
    log = folder / f"{arguments[0]}.log"
    command = (sys.executable, "-c", "from comfyfleet.cli import main; main()", *arguments)
    variables = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONUNBUFFERED": "1", **environ}
    with log.open("w") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield log, psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(30)


@contextlib.contextmanager
def running_side(name: str, tree: Path, folder: Path) -> Iterator[Side]:
    folder.mkdir()
    url, engine_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with contextlib.ExitStack() as stack:
        port, engine_port = (address.rpartition(":")[2] for address in (url, engine_url))
        serve = ("serve", "--port", port, "--data", str(folder / "data"), "--log-level", "error")
        _, plane = stack.enter_context(
            started(tree, folder, *serve, COMFYFLEET_ADMIN_KEY=ADMIN_KEY)
        )
        engine_arguments = ("engine", "--port", engine_port, "--data", str(folder / "engine"))
        _, engine_process = stack.enter_context(started(tree, folder, *engine_arguments))
        admin = stack.enter_context(httpx.Client(base_url=url, headers=bearer(ADMIN_KEY)))
        wait_for(lambda: answers(admin))
        secret = call_json(admin, "POST", "/fleets", slug="gpu", stage="production")["secret"]
        key, effect_id = _set_up(admin)
        work = ("worker", "--control", url, "--fleet", "gpu", "--backend", engine_url)
        state = ("--state", str(folder / "state"))
        environ = {"COMFYFLEET_FLEET_SECRET": secret}
        log, worker = stack.enter_context(started(tree, folder, *work, *state, **environ))
        wait_for(lambda: bool(call_json(admin, "GET", "/workers")["workers"]))
        client = stack.enter_context(httpx.Client(base_url=url, headers=bearer(key), timeout=60))
        engine = stack.enter_context(httpx.Client(base_url=engine_url, timeout=60))
        processes = {"control plane": plane, "worker": worker, "engine": engine_process}
        yield Side(name, client, engine, effect_id, log, processes)


def _set_up(admin: httpx.Client) -> tuple[str, str]:
    workflow = {"slug": "draw", "document": PROMPT, "properties": PROPERTIES, "price_tokens": 0}
    call_json(admin, "POST", "/workflows", **workflow)
    call_json(admin, "PUT", "/fleets/gpu/production/workflows", workflow_slugs=["draw"])
    effect = {"slug": "draw", "workflow_slug": "draw", "price_tokens": 1, "published": True}
    effect_id = call_json(admin, "POST", "/effects", **effect)["id"]
    tenant = call_json(admin, "POST", "/tenants", name="bench")
    path = f"/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    call_json(admin, "POST", path, amount=1_000_000, provider_transaction_id="paid")
    return tenant["key"], effect_id


@contextlib.contextmanager
def tree_before(existing: Path | None) -> Iterator[Path]:
    """Yields a work tree of the previous version, which is the given one or a temporary one from
    git. It runs with the packages of this tree."""
    if existing is not None:
        yield existing.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="comfyfleet-before-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", tree, COMMIT], cwd=ROOT, check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_table(times_by_side: dict[str, list[JobTimes]]) -> None:
    print(f"{'ms, medians':48}" + "".join(f"{name:>10}" for name in times_by_side))
    for number, step in enumerate(STEPS):
        medians = [
            statistics.median(job.steps_ms[number] for job in jobs)
            for jobs in times_by_side.values()
        ]
        print(f"{step:48}" + "".join(f"{median:10.1f}" for median in medians))
    for label, share in (
        ("10th percentile", 0.1),
        ("median", 0.5),
        ("90th percentile", 0.9),
        ("99th percentile", 0.99),
    ):
        figures = [
            percentile([job.around_ms for job in jobs], share) for jobs in times_by_side.values()
        ]
        print(f"{'around a job, ' + label:48}" + "".join(f"{figure:10.1f}" for figure in figures))


def is_within(times_by_side: dict[str, list[JobTimes]]) -> bool:
    before, after = ([job.around_ms for job in jobs] for jobs in times_by_side.values())
    ratio = statistics.median(after) / statistics.median(before)
    worst = percentile(after, 0.99) / statistics.median(after)
    print(f"\nmedian {ratio:.2f} of the previous version's (at most {MEDIAN_MAX}); ", end="")
    print(f"99th percentile {worst:.1f} medians (at most {WORST_MAX:g})")
    return ratio <= MEDIAN_MAX and worst <= WORST_MAX


def main() -> int:
    exit_on_sigterm()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--quick", action="store_true", help="run a few jobs, on this tree only")
    options.add_argument(
        "--jobs", type=int, default=60, help="the number of jobs of each version in a round (60)"
    )
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--check", action="store_true", help="fail if a limit is missed")
    options.add_argument("--before", type=Path, help="a tree of the previous version")
    arguments = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-single-")))
        trees = {"after": ROOT}
        if not arguments.quick:
            trees = {"before": stack.enter_context(tree_before(arguments.before)), **trees}
        sides = [
            stack.enter_context(running_side(name, tree, folder / name))
            for name, tree in trees.items()
        ]
        rounds, jobs = (1, 5) if arguments.quick else (arguments.rounds, arguments.jobs)
        colors = random.Random(7)
        for side in sides:
            side.run(colors.randrange(2**24))  # the first job opens connections
            side.times.clear()
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.run_all([colors.randrange(2**24) for _ in range(jobs)])
        time.sleep(1)  # the worker writes its last log lines a moment later
        times_by_side = {side.name: side.read_steps() for side in sides}
    print_table(times_by_side)
    for name in sides[0].cpu_seconds:
        figures = [1000 * side.cpu_seconds[name] / (rounds * jobs) for side in sides]
        print(f"{'CPU per job, ' + name:48}" + "".join(f"{figure:10.1f}" for figure in figures))
    return exit_status(is_met=arguments.quick or is_within(times_by_side))


if __name__ == "__main__":
    sys.exit(main())
