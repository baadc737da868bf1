"""Starts ComfyUI servers, or built-in engines in their place, and reads their histories."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gpu_load.prompts import Workload, model_of
from support import COMFYFLEET, HISTORY_MAX, free_port

CALL_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
LOG_CHARACTERS_SHOWN = 3000


class Problem(Exception):
    """An error for the user of the benchmark, shown without a traceback."""


@dataclass(frozen=True)
class Span:
    """One run, in seconds since 1970 by the server's own clock."""

    model: str
    started: float
    ended: float
    is_ok: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Server:
    def __init__(self, number: int, url: str, workload: Workload) -> None:
        self.number, self.url, self._workload = number, url, workload
        self._http = httpx.Client(base_url=url, timeout=CALL_SECONDS_MAX)

    def answers(self) -> bool:
        try:
            return self._http.get("/system_stats").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, model: str, seed: int) -> None:
        prompt = self._workload.prompt(model, seed)
        answer = self._http.post("/prompt", json={"prompt": prompt, "client_id": "bench"})
        if answer.status_code != 200:
            raise Problem(f"{self.url} refused the prompt: {answer.text[:500]}")

    def remaining(self) -> int:
        return int(self._http.get("/prompt").json()["exec_info"]["queue_remaining"])

    def forget(self) -> None:
        """Unloads the models, drops the caches and clears the history."""
        self._http.post("/free", json={"unload_models": True, "free_memory": True})
        self._http.post("/history", json={"clear": True})

    def spans(self) -> list[Span]:
        """Returns the runs since `forget`, in the order in which they ran."""
        records = self._http.get("/history", params={"max_items": HISTORY_MAX}).json()
        spans = [self._span(record) for record in records.values()]
        return sorted((span for span in spans if span), key=lambda span: span.started)

    def _span(self, record: dict[str, Any]) -> Span | None:
        times = {kind: data.get("timestamp", 0) for kind, data in record["status"]["messages"]}
        ends = [times[kind] for kind in ("execution_success", "execution_error") if kind in times]
        if "execution_start" not in times or not ends:
            return None
        model = model_of(record["prompt"][2], self._workload)
        is_ok = "execution_success" in times
        return Span(model, times["execution_start"] / 1000, max(ends) / 1000, is_ok)

    def checkpoints(self) -> list[str]:
        info = self._http.get("/object_info/CheckpointLoaderSimple").json()
        offered = info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"]
        choices = offered[0] if isinstance(offered[0], list) else offered[1].get("options", [])
        return [str(choice) for choice in choices]


@contextmanager
def engines(number: int, workload: Workload, folder: Path) -> Iterator[list[Server]]:
    commands = [(str(COMFYFLEET), "engine", "--port", "{port}")] * number
    with _started(commands, folder, folder, workload, seconds=60) as servers:
        yield servers


@contextmanager
def comfyuis(
    number: int,
    workload: Workload,
    folder: Path,
    *,
    tree: Path,
    python: str,
    more: Sequence[str],
    start_seconds: int,
) -> Iterator[list[Server]]:
    """Starts several ComfyUI servers from the same source tree. They share its models, but each has
    its own folders for files."""
    commands = []
    for place in range(number):
        own = folder / f"comfyui-{place}"
        folders = [
            part
            for name in ("input", "output", "temp", "user")
            for part in (f"--{name}-directory", str(_folder(own / name)))
        ]
        command = (python, "main.py", "--port", "{port}", "--disable-auto-launch")
        commands.append((*command, *folders, *more))
    with _started(commands, tree, folder, workload, seconds=start_seconds) as servers:
        yield servers


def _folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _started(
    commands: Sequence[Sequence[str]], cwd: Path, logs: Path, workload: Workload, *, seconds: int
) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            port, log = free_port(), logs / f"server-{number}.log"
            filled = [part.format(port=port) if part == "{port}" else part for part in command]
            process = stack.enter_context(logged(filled, cwd, log))
            server = Server(number, f"http://127.0.0.1:{port}", workload)
            _await(server, process, log, seconds)
            servers.append(server)
        yield servers


@contextmanager
def logged(
    command: Sequence[str], cwd: Path, log: Path, **environ: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process until the end of the block, and writes its output to a file."""
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, stdout=output, stderr=output, env={**os.environ, **environ}
            )
        except OSError as error:
            raise Problem(f"{command[0]} can't be started: {error}") from error
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(server: Server, process: "subprocess.Popen[bytes]", log: Path, seconds: int) -> None:
    until = time.monotonic() + seconds
    while not server.answers():
        if process.poll() is not None or time.monotonic() > until:
            print(log.read_text(errors="replace")[-LOG_CHARACTERS_SHOWN:], file=sys.stderr)
            raise Problem(f"the server at {server.url} did not come up; its log ends as above")
        time.sleep(0.2)
