"""A backend that dies, hangs, runs out of memory or is poisoned."""

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.worker.test_overlap import depth
from tests.support.backends.nodes import GPU_FAILURES
from tests.support.backends.proxy import Fault, faulty_proxy
from tests.support.workers.memory_plane import Plane, eventually
from tests.support.workers.prompts import failing, failing_on_gpu, picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.comfy import ComfyServer, Fetched, OutputFile
from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.nodes import registry
from comfyfleet.engine.serve import Served as Engine
from comfyfleet.worker import health, lease_runner
from comfyfleet.worker.journal import Journal, JournalEntry

# For a worker that would ask for jobs which it can't run: it looks at its backend twice meanwhile.
WRONG_SECONDS = 1.0
LOOK_SECONDS_MAX = 15.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "IDLE_PROBE_SECONDS", 0.3)


NODES = {**registry(), **GPU_FAILURES}


@pytest.fixture
def gpu_engine() -> Iterator[Engine]:
    with serve_in_thread(nodes=NODES) as engine:
        yield engine


class Mortal:
    """An engine that can be killed and started again at the same address."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._stack = contextlib.ExitStack()
        self._port = 0
        self.engine = self.start()

    def start(self) -> Engine:
        self.engine = self._stack.enter_context(
            serve_in_thread(data=self._data, port=self._port, nodes=NODES)
        )
        self._port = int(self.engine.url.rpartition(":")[2])
        return self.engine

    def kill(self) -> None:
        self._stack.close()

    async def looked_for(self) -> None:
        """Until somebody has found that it is gone."""
        found = asyncio.Event()

        def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            found.set()

        async with await asyncio.start_server(hang_up, "127.0.0.1", self._port):
            await asyncio.wait_for(found.wait(), LOOK_SECONDS_MAX)


@pytest.fixture
def dies_like_comfyui(tmp_path: Path) -> Iterator[Mortal]:
    dies_like_comfyui = Mortal(tmp_path / "engine")
    yield dies_like_comfyui
    dies_like_comfyui.kill()


async def test_a_backend_that_dies_in_mid_run_hands_the_job_back_and_is_waited_for(
    plane: Plane, dies_like_comfyui: Mortal, tmp_path: Path
) -> None:
    job = plane.add(steps(40, 50))
    settings = settings_for(plane, dies_like_comfyui.engine.url, tmp_path / "state", max_retries=1)
    async with running_worker(settings):
        await eventually(lambda: job.started)
        await asyncio.to_thread(dies_like_comfyui.kill)
        await eventually(lambda: job.word)
        assert job.requeue.reason in ("backend_down", "backend_fault")
        await eventually(lambda: not plane.waiting)
        polls = len(plane.polls)
        await asyncio.sleep(WRONG_SECONDS)
        assert len(plane.polls) == polls, "it asks for jobs that it can't run"
        await asyncio.to_thread(dies_like_comfyui.start)
        await eventually(lambda: job.leases == 2 and job.status == "ended")
    assert job.result.outputs


async def test_a_prefetched_job_is_handed_back_before_the_running_one_is_given_up(
    plane: Plane, dies_like_comfyui: Mortal, tmp_path: Path
) -> None:
    plane.requeues_again = False
    running, prefetched = plane.add(steps(1000, 50)), plane.add(picture())
    url, patient = dies_like_comfyui.engine.url, 1000
    async with running_worker(settings_for(plane, url, tmp_path / "state", max_retries=patient)):
        await eventually(lambda: running.started and prefetched.leases)
        await asyncio.to_thread(dies_like_comfyui.kill)
        await eventually(lambda: prefetched.word)
        assert prefetched.requeue.reason == "backend_down"
        assert not running.word, "the worker still tries to follow it"


async def test_an_idle_worker_notices_that_its_backend_is_gone(
    plane: Plane, dies_like_comfyui: Mortal, tmp_path: Path
) -> None:
    settings = settings_for(plane, dies_like_comfyui.engine.url, tmp_path / "state", max_retries=1)
    async with running_worker(settings):
        await eventually(lambda: plane.polls)
        await asyncio.to_thread(dies_like_comfyui.kill)
        await eventually(lambda: plane.problems == ["down"] and not plane.waiting)
        job = plane.add(picture())
        await asyncio.sleep(WRONG_SECONDS)
        assert job.leases == 0
        await asyncio.to_thread(dies_like_comfyui.start)
        await eventually(lambda: job.word)
    assert job.leases == 1


async def test_a_hung_backend_hands_the_job_back(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job, later = plane.add(steps(1, 600_000)), plane.add(picture())
    plane.requeues_again = False
    settings = settings_for(plane, engine.url, tmp_path, stall_seconds=1.0)
    async with running_worker(settings):
        await eventually(lambda: job.word)
        await eventually(lambda: later.word)
    assert job.requeue.reason == "backend_fault"
    assert "no progress" in (job.requeue.detail or "")


async def test_out_of_memory_is_the_backends_fault_and_memory_is_freed(
    plane: Plane, gpu_engine: Engine, tmp_path: Path
) -> None:
    plane.requeues_again = False
    job = plane.add(
        failing_on_gpu("CUDA out of memory. Tried to allocate 2.00 GiB"), model_key="flux"
    )
    settings = settings_for(plane, gpu_engine.url, tmp_path)
    async with running_worker(settings) as worker:
        await eventually(lambda: job.word)
        await eventually(lambda: worker.models.keys == ())
        after = plane.add(picture())
        await eventually(lambda: after.word)
    assert job.requeue.reason == "out_of_memory"
    assert after.result.outputs


async def test_a_poisoned_backend_gets_no_more_jobs_until_it_was_restarted(
    plane: Plane, dies_like_comfyui: Mortal, tmp_path: Path
) -> None:
    plane.requeues_again = False
    job = plane.add(failing_on_gpu("CUDA error: an illegal memory access was encountered"))
    settings = settings_for(plane, dies_like_comfyui.engine.url, tmp_path / "state", max_retries=1)
    async with running_worker(settings):
        await eventually(lambda: job.word)
        assert job.requeue.reason == "backend_fault"
        await eventually(lambda: not plane.waiting)
        after = plane.add(picture())
        await asyncio.sleep(WRONG_SECONDS)
        assert after.leases == 0
        await asyncio.to_thread(dies_like_comfyui.kill)
        await dies_like_comfyui.looked_for()
        await asyncio.to_thread(dies_like_comfyui.start)
        await eventually(lambda: after.word)


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "CUDA out of memory"]
)
async def test_a_node_that_quotes_a_fault_fails_its_job_and_nothing_else(
    plane: Plane, engine: Engine, tmp_path: Path, text: str
) -> None:
    job, after = plane.add(failing(text)), plane.add(picture())
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word and after.word)
    assert job.failure["exception_message"] == text
    assert (job.leases, after.leases) == (1, 1)
    assert not any(plane.problems)


async def test_a_prompt_that_may_or_may_not_have_arrived_is_never_sent_twice(
    plane: Plane, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.worker.lease_runner.ADOPT_PAUSE_SECONDS", 0.05)
    job = plane.add(picture())
    async with faulty_proxy(engine.url, {"POST /prompt": Fault.CUT_UNSEEN}) as proxy:
        async with running_worker(settings_for(plane, proxy.url, tmp_path, max_retries=1)):
            await eventually(lambda: job.word)
        assert proxy.steps.count("POST /prompt") == 1
        assert "POST /prompt 2" not in proxy.steps
    assert job.failure["code"] == "unknown_outcome"


async def test_a_prompt_that_had_arrived_is_found_again(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(picture())
    async with faulty_proxy(engine.url, {"POST /prompt": Fault.CUT}) as proxy:
        async with running_worker(settings_for(plane, proxy.url, tmp_path, max_retries=1)):
            await eventually(lambda: job.word)
        assert "POST /prompt 2" not in proxy.steps
    assert job.result.outputs


async def test_a_full_disk_hands_the_job_back_and_no_more_jobs_are_taken_until_there_is_room(
    plane: Plane, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(
        self: ComfyServer, file: OutputFile, to: Path, *, bytes_max: int | None = None
    ) -> Fetched:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(ComfyServer, "fetch", full)
        patched.setattr(health, "FREE_BYTES_MIN", 1 << 60)
        patched.setattr(health, "FREE_SHARE_MIN", 2.0)
        plane.requeues_again = False
        first = plane.add(picture())
        async with running_worker(settings_for(plane, engine.url, tmp_path)):
            await eventually(lambda: first.word)
            await eventually(lambda: not plane.waiting)
            second = plane.add(picture())
            await asyncio.sleep(WRONG_SECONDS)
            assert second.leases == 0
            assert set(plane.problems) == {"disk_full"}
            patched.undo()
            await eventually(lambda: second.word)
    assert first.requeue.reason == "disk_full"
    assert second.result.outputs


async def test_a_full_disk_of_the_journal_pauses_the_worker_and_ends_no_run(
    plane: Plane, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(journal: Journal, entry: JournalEntry) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = plane.add(steps(10, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: first.started)
        with monkeypatch.context() as patched:
            patched.setattr(lease_runner, "JOURNAL_AFTER_SECONDS", 0)
            patched.setattr(Journal, "write", write)
            patched.setattr(health, "FREE_BYTES_MIN", 1 << 60)
            patched.setattr(health, "FREE_SHARE_MIN", 2.0)
            await eventually(lambda: first.word)
            await eventually(lambda: "disk_full" in plane.problems)
        second = plane.add(picture())
        await eventually(lambda: second.word)
    assert first.result.outputs
    assert (first.leases, second.leases) == (1, 1)
    assert second.result.outputs


async def test_a_lease_that_ran_on_a_dead_backend_leaves_nothing_behind(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(steps(1000, 50))
    plane.requeues_again = False
    async with running_worker(settings_for(plane, engine.url, tmp_path)) as worker:
        await eventually(lambda: job.started)
        worker.stop.ask("shutdown", 0)
        await eventually(lambda: job.word)
        assert depth(engine) == 0
    assert job.requeue.reason == "shutdown"
