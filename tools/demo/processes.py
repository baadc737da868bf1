"""The processes of the demo: `comfyfleet up` with its own worker, and workers of a second fleet."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from comfyfleet.server.sign_in_links import SignInLinks

COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")
PORT = 8000
SERVER = "server"
STOP_SECONDS_MAX = 20
GRACE_SECONDS = 1
HEARTBEAT_SECONDS = 5
LOG_CHARACTERS_SHOWN = 2_000


@dataclass
class Processes:
    """The processes that were started, by name."""

    folder: Path
    url: str
    admin_key: str = field(default_factory=lambda: secrets.token_hex(16))
    running: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def sign_in_link(self) -> str:
        """Returns a new link that signs a browser in as the owner. It works once."""
        return SignInLinks(self.data).new_link(self.url)

    def start_control_plane(self) -> None:
        port = self.url.rpartition(":")[2]
        arguments = ("up", "--port", port, "--data", str(self.data), "--no-open")
        self._start(SERVER, arguments, {"COMFYFLEET_ADMIN_KEY": self.admin_key})

    def start_worker(self, name: str, *, fleet: str, secret: str, capability: str) -> None:
        """Starts a worker that starts its own engine."""
        engine = " ".join(
            [sys.executable, "-m", "comfyfleet", "engine", "--port", "{port}", "--no-pace"]
        )
        arguments = (
            *("worker", "--control", self.url, "--fleet", fleet, "--worker-id", name),
            *("--backend", f"http://127.0.0.1:{free_port()}", "--comfyui-command", engine),
            *("--capability", capability, "--state", str(self.folder / name)),
            *("--grace-seconds", str(GRACE_SECONDS)),
        )
        self._start(name, arguments, {"COMFYFLEET_FLEET_SECRET": secret})

    def _start(self, name: str, arguments: tuple[str, ...], settings: Mapping[str, str]) -> None:
        environment = {key: value for key, value in os.environ.items() if "COMFYFLEET_" not in key}
        heartbeat = {"COMFYFLEET_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)}
        with self.log_of(name).open("wb") as log:
            self.running[name] = subprocess.Popen(  # noqa: S603 - our own command
                [*COMMAND, *arguments],
                env={**environment, **heartbeat, **settings},
                stdout=log,
                stderr=log,
                # Ctrl-C only reaches this process, which stops the others in order.
                start_new_session=True,
            )

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def ended(self) -> str | None:
        """Returns the name of a process that stopped unexpectedly, or None."""
        return next(
            (name for name, process in self.running.items() if process.poll() is not None), None
        )

    def log_end(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace")[-LOG_CHARACTERS_SHOWN:]

    def stop(self) -> None:
        """Stops the workers first, so that they can return their jobs to the control plane."""
        workers = [process for name, process in self.running.items() if name != SERVER]
        for group in (workers, [self.running[SERVER]] if SERVER in self.running else []):
            for process in group:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in group:
                _wait(process)


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def control_plane(folder: Path, port: int | None = None) -> Iterator[Processes]:
    """Runs `comfyfleet up` in a folder. Processes that are started later end with it."""
    processes = Processes(folder, f"http://127.0.0.1:{port or free_port(PORT)}")
    try:
        processes.start_control_plane()
        yield processes
    finally:
        processes.stop()


def free_port(preferred: int = 0) -> int:
    """Returns the preferred port, or any free port if it is in use."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", preferred))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
