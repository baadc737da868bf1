"""A ComfyUI that the worker started: it is owned again after a crash, and no other one is."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.workers.memory_plane import Plane, eventually
from tests.support.workers.prompts import picture, steps
from tests.support.workers.workers import settings_for

from comfyfleet.comfy import BackendLimits, ComfyServer, ServerSettings
from comfyfleet.worker import health as health_module
from comfyfleet.worker import managed_process, memory_keeper, shutdown
from comfyfleet.worker import worker as worker_module
from comfyfleet.worker.factory import open_worker
from comfyfleet.worker.failures import POISONED
from comfyfleet.worker.health import BackendHealth
from comfyfleet.worker.managed_process import ManagedProcess
from comfyfleet.worker.memory_keeper import MemoryState

COMFYFLEET = Path(sys.executable).with_name("comfyfleet")
# As small as can be: it takes the port, answers how long its queue is, and counts its starts.
SERVER = """
import http.server, os, pathlib, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"exec_info": {"queue_remaining": 0}}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
with open(sys.argv[2], "a") as pids:
    pids.write(f"{os.getpid()}\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


class Place:
    """A command that serves at an address, and the pids of all that it has started."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.url = folder, port, f"http://127.0.0.1:{port}"
        self._pids = folder / "pids"
        script = folder / "server.py"
        script.write_text(SERVER)
        self.command = f"{sys.executable} {script} {port} {self._pids}"

    @property
    def pids(self) -> list[int]:
        return [int(each) for each in self._pids.read_text().split()] if self._pids.exists() else []

    @property
    def living(self) -> list[int]:
        return [pid for pid in self.pids if _lives(pid)]

    def listens(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def owned(self) -> ManagedProcess:
        return ManagedProcess(self.command, self.folder / "comfyui.json")

    @asynccontextmanager
    async def health(self, owned: ManagedProcess) -> AsyncIterator[BackendHealth]:
        async def on_recovery() -> None:
            """Nothing is kept here."""

        limits = BackendLimits(max_retries=0, answer_seconds=5, connect_seconds=5)
        async with ComfyServer(ServerSettings(self.url, limits)) as probe:
            health = BackendHealth(
                probe,
                place=self.url,
                folder=self.folder,
                owned=owned,
                on_change=lambda: None,
                on_recovery=on_recovery,
                probe_seconds=0.05,
            )
            watching = asyncio.create_task(health.watch(lambda: False))
            yield health
            watching.cancel()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
async def place(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Place]:
    place = Place(tmp_path, unused_tcp_port)
    yield place
    for pid in place.living:
        os.kill(pid, signal.SIGKILL)


async def test_a_process_of_a_killed_worker_is_owned_again_and_replaced_when_it_breaks(
    place: Place,
) -> None:
    async with place.health(place.owned()) as first:
        await first.wait_until_ready()
    again = place.owned()
    async with place.health(again) as health:
        await health.wait_until_ready()
        assert len(place.pids) == 1
        assert again.pid == place.pids[0]
        health.note(POISONED, "CUDA error: an illegal memory access was encountered")
        await eventually(lambda: health.condition is None)
        assert len(place.pids) == 2
        assert place.living == [place.pids[1]]
    await again.stop()
    await eventually(lambda: not place.living)


async def test_one_that_somebody_else_started_is_used_and_never_called_well_for_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    strange = subprocess.Popen(place.command.split())  # noqa: ASYNC220
    try:
        await eventually(place.listens)
        owned = place.owned()
        async with place.health(owned) as health:
            await health.wait_until_ready()
            health.note(POISONED, "CUDA error: an illegal memory access was encountered")
            for _ in range(20):  # some looks at one that answers all the while
                await asyncio.sleep(0.05)
                assert health.condition is not None
            assert place.pids == [strange.pid]
            assert not owned.is_running
            told = [each for each in caplog.messages if "did not start" in each]
            assert len(told) == 1
            assert place.url in told[0]
            strange.kill()
            strange.wait()
            await eventually(lambda: health.condition is None)
            assert owned.is_running
            assert place.living == [owned.pid]
        await owned.stop()
    finally:
        strange.kill()
        strange.wait()


async def test_one_from_before_that_does_not_answer_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "STARTING_SECONDS_MAX", 0.0)
    stuck = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    try:
        created = psutil.Process(stuck.pid).create_time()
        note = {"pid": stuck.pid, "created": created}
        (place.folder / "comfyui.json").write_text(json.dumps(note))
        owned = place.owned()
        async with place.health(owned) as health:
            answering = asyncio.create_task(health.wait_until_ready())
            await eventually(lambda: stuck.poll() is not None)
            # The next one gets its time to start.
            monkeypatch.setattr(health_module, "STARTING_SECONDS_MAX", 300.0)
            await answering
        assert place.living == [owned.pid]
        await owned.stop()
    finally:
        stuck.kill()
        stuck.wait()


async def test_a_note_of_a_process_whose_id_another_one_has_now_is_not_believed(
    place: Place,
) -> None:
    (place.folder / "comfyui.json").write_text(f'{{"pid": {os.getpid()}, "created": 5}}')
    assert not place.owned().take_up()
    (place.folder / "comfyui.json").write_text("broken")
    assert not place.owned().take_up()


async def test_a_note_of_what_no_worker_can_have_started_is_not_believed(
    place: Place, tmp_path: Path
) -> None:
    created = psutil.Process().create_time()
    follower = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220  in our own group
    try:
        first = psutil.Process(1).create_time()
        told = [(pid, created) for pid in (0, -1, -os.getpid(), 2**31, 2**70, 1e999, "x", None)]
        told += [(1, first)]
        if psutil.pid_exists(os.getpgrp()):  # who leads our group may have ended before us
            told.append((os.getpgrp(), psutil.Process(os.getpgrp()).create_time()))
        told.append((follower.pid, psutil.Process(follower.pid).create_time()))
        for pid, since in told:
            (tmp_path / "comfyui.json").write_text(json.dumps({"pid": pid, "created": since}))
            owned = place.owned()
            assert not owned.take_up(), pid
            owned.kill()
            await owned.stop()
        assert follower.poll() is None
    finally:
        follower.kill()
        follower.wait()


async def test_a_second_signal_ends_a_comfyui_that_heeds_none(
    place: Place, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_process, "STOP_SECONDS_MAX", 600.0)
    monkeypatch.setattr(shutdown, "HURRY_SECONDS", 0.1)
    stubborn = f"sh -c 'trap \"\" TERM; exec {place.command}'"
    settings = settings_for(plane, place.url, place.folder / "state", comfyui_command=stubborn)
    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually(lambda: plane.polls)
        worker.stop.ask("shutdown", 5)
        await eventually(lambda: not plane.keys)
        assert place.living
        worker.stop.ask("shutdown", 0)
        await asyncio.wait_for(work, 30)
    assert not place.living


async def test_a_comfyui_that_ends_by_itself_is_told_with_how_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owned = ManagedProcess("sh -c 'exit 3'", tmp_path / "comfyui.json")
    await owned.start()
    await eventually(lambda: not owned.is_running)
    await owned.start()
    assert "ComfyUI exited unexpectedly (exit code 3) and is being restarted" in caplog.text
    await eventually(lambda: not owned.is_running)
    await asyncio.sleep(0.1)  # what the event loop kept of the process is closed


async def test_a_comfyui_that_was_stopped_has_not_ended_by_itself(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    owned = place.owned()
    for _ in range(2):
        await owned.start()
        await owned.stop()
    assert "by itself" not in caplog.text


async def test_something_else_at_the_port_is_told_once_and_as_what_it_is(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")
    asked = place.folder / "asked"
    with asked.open("w") as log:
        other = subprocess.Popen(command, stderr=log, stdout=log)  # noqa: ASYNC220
    place.url = f"http://127.0.0.1:{port}"
    owned = place.owned()
    try:
        async with place.health(owned) as health:
            await eventually(lambda: _listens(port))
            waiting = asyncio.create_task(health.wait_until_ready())
            await eventually(lambda: asked.read_text().count("GET /prompt") > 5)
            waiting.cancel()
    finally:
        other.kill()
        other.wait()
    assert f"the program at {place.url} isn't ComfyUI" in caplog.text
    assert owned.pid is None
    told = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "GET /prompt returned 404" in vars(told[0])["detail"]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_comfyui_that_keeps_its_memory_is_restarted_between_two_jobs(
    plane: Plane, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = MemoryState(1, 100, 90)
    monkeypatch.setattr(worker_module, "read_memory", lambda _: short)
    monkeypatch.setattr(memory_keeper, "FREED_SECONDS", 0.1)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = f"{COMFYFLEET} engine --port {unused_tcp_port} --data {tmp_path / 'engine'}"
    settings = settings_for(plane, url, tmp_path / "state", comfyui_command=command, max_retries=1)
    plane.prefetches = False
    first = plane.add(picture(), model_key="flux")
    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually(lambda: first.word, 60)
        before = json.loads((settings.state / "comfyui.json").read_text())["pid"]
        await eventually(lambda: not _lives(before), 60)
        second = plane.add(picture(), model_key="flux")
        await eventually(lambda: second.word, 60)
        assert second.result.model_change == "first", "it is no switch from which a cost is learned"
        assert second.leases == 1
        reading = plane.polls[-1].reading
        assert reading is not None
        assert reading.comfyui_restarts == 1
        assert plane.problems == []
        worker.stop.ask("shutdown", 5)
        await work
    log = (settings.state / "comfyui.log").read_text()
    assert log.count("Engine at http") == 2


async def test_no_switch_cost_is_learned_from_the_first_run_after_a_crash(
    plane: Plane, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "read_memory", lambda _: MemoryState(90, 100, 1))
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = f"{COMFYFLEET} engine --port {unused_tcp_port} --data {tmp_path / 'engine'}"
    settings = settings_for(plane, url, tmp_path / "state", comfyui_command=command)
    note = settings.state / "comfyui.json"

    def pid() -> int:
        written = note.read_text()  # empty while it is written again
        return int(json.loads(written)["pid"]) if written else 0

    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        first, second = (plane.add(picture(), model_key="flux") for _ in range(2))
        await eventually(lambda: first.word and second.word, 60)
        killed = pid()
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: pid() not in (0, killed), 60)
        third = plane.add(picture(), model_key="flux")
        await eventually(lambda: third.word, 60)
        worker.stop.ask("shutdown", 5)
        await work
    changes = [job.result.model_change for job in (first, second, third)]
    assert changes == ["first", "same", "first"]


async def test_it_frees_nothing_while_the_next_job_needs_the_loaded_model(
    plane: Plane, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "read_memory", lambda _: MemoryState(1, 100, 90))
    monkeypatch.setattr(memory_keeper, "FREED_SECONDS", 0.1)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = f"{COMFYFLEET} engine --port {unused_tcp_port} --data {tmp_path / 'engine'}"
    settings = settings_for(plane, url, tmp_path / "state", comfyui_command=command)
    first, second = (plane.add(steps(60, 50), model_key="flux") for _ in range(2))
    freed: list[bool] = []
    free = ComfyServer.free

    async def note(backend: ComfyServer) -> None:
        freed.append(second.word is not None)
        await free(backend)

    monkeypatch.setattr(ComfyServer, "free", note)
    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually(lambda: second.leases, 60)
        assert not first.word, "the second job was not prefetched"
        await eventually(lambda: freed, 60)
        worker.stop.ask("shutdown", 5)
        await work
    assert second.result.model_change == "same"
    assert freed[0], "memory was freed before the second job had ended"


# It ignores SIGTERM, and has started another process.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid} ")
time.sleep(600)
"""


async def test_where_there_are_no_process_groups_all_that_it_started_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    monkeypatch.setattr(managed_process, "HAS_GROUPS", False)
    script, pids = tmp_path / "family.py", tmp_path / "pids"
    script.write_text(FAMILY)
    owned = ManagedProcess(f"{sys.executable} {script} {pids}", tmp_path / "comfyui.json")
    await owned.start()
    family: list[int] = []
    try:
        await eventually(lambda: pids.exists() and pids.read_text().endswith(" "))
        family = [int(pid) for pid in pids.read_text().split()]
        assert owned.take_up(), "the next worker owns it, too"
        await owned.stop()
        await eventually(lambda: not any(_lives(pid) for pid in family))
    finally:
        for pid in filter(_lives, family):
            os.kill(pid, signal.SIGKILL)


CHATTER = "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(0.01)"


async def test_the_log_of_a_running_comfyui_is_rotated(
    plane: Plane, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one never answers: its log has to stay small also while it starts."""
    monkeypatch.setattr(managed_process, "LOG_BYTES_MAX", 20_000)
    monkeypatch.setattr(managed_process, "LOG_SECONDS", 0.05)
    command = f'{sys.executable} -c "{CHATTER}"'
    url, state = f"http://127.0.0.1:{unused_tcp_port}", tmp_path / "state"
    settings = settings_for(plane, url, state, comfyui_command=command)
    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually((state / "comfyui.log.2").exists, 60)
        worker.stop.ask("shutdown", 0)
        await work


def test_a_log_is_rotated_into_four_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_process, "LOG_BYTES_MAX", 100)
    log = tmp_path / "comfyui.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(8):
            writer.write(b"%d" % number * 101)
            managed_process.rotate_log(log)
            assert log.stat().st_size == 0
        writer.write(b"now")
    assert log.read_bytes() == b"now"
    older = sorted(path.name for path in tmp_path.glob("comfyui.log.*"))
    assert older == [f"comfyui.log.{number}" for number in (1, 2, 3, 4)]
    assert (tmp_path / "comfyui.log.1").read_bytes()[:1] == b"7"
    assert (tmp_path / "comfyui.log.4").read_bytes()[:1] == b"4"
