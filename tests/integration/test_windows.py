"""Commands on a system without POSIX: they import and start, and `up` and `worker` run and stop in order."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.server.commands import NEGATIVE

from comfyfleet.engine import serve_in_thread

ROOT = Path(__file__).parents[2]
WINDOWS = (sys.executable, "-m", "tests.support.server.windows")
SECONDS_MAX = 60


def environ(**more: str) -> dict[str, str]:
    """Returns an environment in which this working tree is tested, whichever one is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMFY")}
    return {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), **more}


def command(*words: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*WINDOWS, *words],
        cwd=folder, env=environ(**more), capture_output=True, text=True, check=False, timeout=SECONDS_MAX,
    )  # fmt: skip


class Running:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so():
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    def wait_for_line(self, text: str) -> str:
        self.wait_for(lambda: any(text in line for line in self.lines))
        return next(line for line in self.lines if text in line)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS_MAX)


@contextmanager
def running(*words: str, folder: Path, **more: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [*WINDOWS, *words],
        cwd=folder, env=environ(**more), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with process:
        try:
            yield Running(process)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "words",
    [
        *("run", "convert", "inspect", "watch", "engine", "up", "open", "worker", "serve", "db"),
        *("admin workflows", "graph run", "pipeline run", "triggers create"),
    ],
)
def test_every_command_starts(tmp_path: Path, words: str) -> None:
    told = command(*words.split(), "--help", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "Usage" in told.stdout


def test_files_are_read_converted_and_run(tmp_path: Path) -> None:
    seen = command("inspect", NEGATIVE, "--json", folder=tmp_path)
    assert json.loads(seen.stdout)["form"], seen.stderr
    with serve_in_thread(data=tmp_path / "comfyui") as comfyui:
        converted = command("convert", NEGATIVE, "--server", comfyui.url, folder=tmp_path)
        assert json.loads(converted.stdout), converted.stderr
        for more in (("--server", comfyui.url), ()):
            ran = command("run", NEGATIVE, *more, "-o", "out", folder=tmp_path)
            assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "out").iterdir())


def test_up_serves_with_its_engine_and_a_worker_joins_and_both_stop_in_order(
    tmp_path: Path,
) -> None:
    key = "a" * 64
    with running("up", "--port", "0", "--no-open", folder=tmp_path, COMFYFLEET_ADMIN_KEY=key) as up:
        address = up.wait_for_line("Any ComfyUI client can use").split()[-6]
        assert "/k/" in address, "the system doesn't tell users, so the address has a secret"
        url = address.partition("/k/")[0]
        assert httpx.get(f"{url}/queue").status_code == 401
        up.wait_for(lambda: httpx.get(f"{address}/object_info").json())
        client = {"COMFYFLEET_URL": address}
        assert command("pipeline", "list", folder=tmp_path, **client).returncode == 0
        secret = (tmp_path / "comfyfleet-data" / "fleet.secret").read_text().strip()
        with serve_in_thread(data=tmp_path / "comfyui") as comfyui:
            words = ("worker", "--control", url, "--fleet", "default", "--worker-id", "second")
            more = {"COMFYFLEET_FLEET_SECRET": secret, "COMFYUI_BASE_URL": comfyui.url}
            state = ("--state", str(tmp_path / "state"))
            with running(*words, *state, folder=tmp_path, **more) as worker:
                admin = {"Authorization": f"Bearer {key}"}
                listed = f"{url}/api/admin/workers"
                worker.wait_for(lambda: "second" in httpx.get(listed, headers=admin).text)
                assert worker.stop() == 0, "".join(worker.lines)
        assert up.stop() == 0, "".join(up.lines)
    assert up.lines[-1].strip() == "Stopped"
