"""Starts ComfyUIs on CPU, alone or behind `comfyfleet up`, and stops them at the end of its standard input.

    python -m tests.external.servers '{"checkout": …}' --port 8188 …

The words after the options are those of ComfyUI's own command. It prints one line, the address, when everything
responds. Each ComfyUI has folders of its own, so that several can share a checkout. Its models are links to those of the
checkout.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from tests.support.server.command_process import executed
from tests.support.server.commands import comfyfleet
from tests.support.server.ports import free_port

START_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.2
LOG_CHARACTERS = 2000
COPIED_FOLDERS = ("models", "input")
NEW_FOLDERS = ("output", "temp", "user")
# The servers replace these options of the original command.
REPLACED = ("--port", "--listen", "--output-directory")
ADMIN_KEY = "admin-key-of-a-suite-of-another-project"


@dataclass(frozen=True)
class Servers:
    """What to start: a ComfyUI without a gateway (0 backends), or a gateway with some."""

    checkout: str
    python: str
    folder: str
    backends: int
    passthrough: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.external.servers", json.dumps(asdict(self))]


@contextmanager
def running_servers(servers: Servers, port: int, words: Sequence[str]) -> Iterator[str]:
    folder = Path(servers.folder)
    ports = [free_port() for _ in range(servers.backends)] or [port]
    with ExitStack() as stack:
        comfyuis = [
            stack.enter_context(_comfyui(servers, folder / f"comfyui-{number}", each, words))
            for number, each in enumerate(ports)
        ]
        for comfyui in comfyuis:
            comfyui.wait()
        is_direct = not servers.backends
        yield (
            comfyuis[0].url if is_direct else stack.enter_context(_gateway(servers, port, comfyuis))
        )


@dataclass(frozen=True)
class _ComfyUI:
    url: str
    folder: Path
    log: Path
    process: "subprocess.Popen[bytes]"

    def wait(self) -> None:
        _wait_until(lambda: _responds(self.url), self.process.poll, self.log)


@contextmanager
def _comfyui(servers: Servers, folder: Path, port: int, words: Sequence[str]) -> Iterator[_ComfyUI]:
    shutil.rmtree(folder, ignore_errors=True)
    _make_folders(Path(servers.checkout), folder)
    options = [f"--{name}-directory={folder / name}" for name in (*COPIED_FOLDERS, *NEW_FOLDERS)]
    options += [f"--port={port}", f"--database-url=sqlite:///{folder}/comfyui.db"]
    log = folder / "comfyui.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [servers.python, "main.py", *words, *options],
            cwd=servers.checkout,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _ComfyUI(f"http://127.0.0.1:{port}", folder, log, process)
    finally:
        process.kill()
        process.wait(STOP_SECONDS_MAX)


def _make_folders(checkout: Path, folder: Path) -> None:
    for name in NEW_FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in COPIED_FOLDERS:
        (checkout / name).mkdir(exist_ok=True)
        shutil.copytree(checkout / name, folder / name, copy_function=os.symlink)


@contextmanager
def _gateway(servers: Servers, port: int, comfyuis: Sequence[_ComfyUI]) -> Iterator[str]:
    home = Path(servers.folder) / "gateway"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    backends = [word for each in comfyuis for word in ("--backend", each.url)]
    backends += [word for each in comfyuis for word in ("--comfyui-folder", str(each.folder))]
    words = ("up", "--port", str(port), "--data", "data", "--no-open", *backends)
    with executed(*words, folder=home, COMFYFLEET_ADMIN_KEY=ADMIN_KEY) as up:
        try:
            url = up.wait_for_line(r"Control plane at (\S+)")[1]
            up.wait_for_line("Any ComfyUI client can use")
            _wait_until(lambda: _is_ready(url, len(comfyuis)), up.process.poll, home / "up.log")
            if servers.passthrough:
                _pass_through(url, servers.passthrough)
            yield url
        finally:
            (home / "up.log").write_text("\n".join(up.said), encoding="utf-8")


def _responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/system_stats", timeout=START_SECONDS_MAX).is_success
    except httpx.TransportError:
        return False


def _is_ready(url: str, backends: int) -> bool:
    """Whether so many backends are online and their node types are known."""
    with httpx.Client(base_url=url, timeout=START_SECONDS_MAX) as http:
        found = http.get("/api/backends").json()["backends"]
        is_online = sum(backend["is_online"] for backend in found) == backends
        return is_online and bool(http.get("/object_info").json())


def _pass_through(url: str, prefixes: Sequence[str]) -> None:
    words = [word for prefix in prefixes for word in ("--passthrough", prefix)]
    environ = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": ADMIN_KEY}
    done = comfyfleet("admin", "fleets", "prompts", "default", *words, environ=environ)
    assert done.code == 0, done.err


def _wait_until(condition: Callable[[], bool], poll: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + START_SECONDS_MAX
    while not condition():
        if poll() is not None or time.monotonic() > end:
            text = log.read_text(errors="replace") if log.exists() else ""
            raise RuntimeError(f"a server did not start:\n{text[-LOG_CHARACTERS:]}")
        time.sleep(POLL_SECONDS)


def _own_words(words: Sequence[str]) -> tuple[list[str], int | None]:
    """The words of ComfyUI's command without the options that the servers replace, and its port."""
    rest, port = list(words), None
    for option in REPLACED:
        if option in rest:
            at = rest.index(option)
            port = int(rest[at + 1]) if option == "--port" else port
            del rest[at : at + 2]
    return rest, port


def main(words: Sequence[str]) -> None:
    options = json.loads(words[0])
    rest, port = _own_words(words[1:])
    with running_servers(Servers(**options), port or free_port(), rest) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
