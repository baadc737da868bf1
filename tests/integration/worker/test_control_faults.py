"""What the control plane wants, and what it fails to say."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.integration.worker.test_overlap import depth
from tests.support.backends.tcp_relay import freezing_relay
from tests.support.workers.memory_plane import JobFile, Plane, eventually
from tests.support.workers.plane_server import Served
from tests.support.workers.prompts import passing, picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.engine.serve import Served as Engine
from comfyfleet.worker import control_client
from comfyfleet.worker.control_client import ControlClient

UNDELIVERED = re.compile("an output was not accepted|did not accept a final report")


async def test_a_control_plane_that_is_away_in_mid_run_loses_nothing(
    served: Served, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane = served.plane
    jobs = [plane.add(steps(20, 50)), plane.add(steps(4, 50))]
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: jobs[0].started)
        served.down()
        # The first job has ended meanwhile, and its result can't be delivered.
        await eventually(lambda: UNDELIVERED.search(caplog.text))
        served.up()
        await eventually(lambda: all(job.word for job in jobs))
    assert [job.leases for job in jobs] == [1, 1]
    assert all(job.result.outputs for job in jobs)


async def test_a_last_word_is_said_until_it_is_heard(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.errors["complete"] = 3
    job = plane.add(picture())
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word)
    assert plane.calls.count("complete") == 4
    assert job.leases == 1


async def test_a_lost_answer_to_a_last_word_is_made_up_for(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.cut["complete"] = 1
    job = plane.add(picture())
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: len(job.words) == 2)
    assert job.result.outputs


async def test_a_busy_worker_asks_for_the_next_job_with_its_result(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    """Its jobs take long enough for the next one to be there before they end."""
    jobs = [plane.add(steps(1, 400)) for _ in range(5)]
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: all(job.word for job in jobs))
    assert [job.leases for job in jobs] == [1] * 5
    carried = [poll for poll in plane.polls if not poll.wait_seconds]
    assert carried, "every job was asked for on its own"
    assert len(plane.polls) - len(carried) == plane.calls.count("poll")
    assert all(poll.held is not None for poll in carried)


async def test_a_control_plane_that_answers_no_poll_with_a_result_is_polled(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.answers_polls_of_words = False
    jobs = [plane.add(picture()) for _ in range(4)]
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: all(job.word for job in jobs))
    assert [job.leases for job in jobs] == [1] * 4


async def test_a_job_that_was_lost_with_the_answer_to_a_result_is_handed_out_again(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.cut["complete"] = 3
    jobs = [plane.add(picture()) for _ in range(6)]
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: all(job.word for job in jobs))
    assert plane.cut["complete"] == 0
    assert [job.leases for job in jobs] == [1] * 6


async def test_a_lease_whose_answer_was_lost_is_handed_out_again(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(picture())
    # The first poll is given the job and never hears of it.
    plane.cut["poll"] = 1
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word)
    assert job.leases == 1
    assert plane.calls.count("poll") >= 2


async def test_a_cancelled_job_is_cancelled_in_the_backend(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(steps(1000, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.started)
        job.cancelled = True
        await eventually(lambda: job.word)
        assert depth(engine) == 0
    assert job.failure["code"] == "cancelled"


async def test_a_lost_lease_stops_the_work_and_says_nothing(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(steps(1000, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.started)
        plane.lose(job)
        await eventually(lambda: depth(engine) == 0)
        next_one = plane.add(picture())
        await eventually(lambda: next_one.word)
    assert job.words == []
    assert list((tmp_path / "leases").iterdir()) == []


async def test_a_recalled_job_that_waits_goes_back_and_one_that_runs_stays(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.requeues_again = False
    first, second = plane.add(steps(60, 50)), plane.add(steps(1, 1))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: first.started and depth(engine) == 2)
        first.recalled = second.recalled = True
        await eventually(lambda: second.word)
        assert not first.word
        await eventually(lambda: first.word)
    assert second.requeue.reason == "recall"
    assert first.result.outputs


async def test_a_draining_worker_hands_back_what_waits_and_finishes_what_runs(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.requeues_again = False
    first, second = plane.add(steps(40, 50)), plane.add(steps(1, 1))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: first.started and depth(engine) == 2)
        plane.drain = True
        await eventually(lambda: first.word and second.word)
    assert second.requeue.reason == "drain"
    assert first.result.outputs


async def test_a_job_longer_than_its_urls_live_succeeds(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.url_seconds = 1
    job = plane.add(steps(40, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word)
    assert job.result.outputs
    assert plane.puts_refused == 1


async def test_an_input_whose_url_has_run_out_is_asked_for_again(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.url_seconds = 0.0
    job = plane.add(passing(), files={"input": JobFile(b"some bytes", binding="1.file")})
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.heartbeats)
        plane.url_seconds = 900
        await eventually(lambda: job.word)
    assert plane.delivered(job) == b"some bytes"


async def test_a_worker_whose_key_is_dead_registers_anew(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: plane.polls)
        plane.keys.clear()
        job = plane.add(picture())
        await eventually(lambda: job.word)
    assert len(plane.registers) == 2


async def test_an_id_that_nobody_chose_and_is_taken_is_made_another(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.keys["other"] = "gpu-1"
    async with running_worker(settings_for(plane, engine.url, tmp_path, is_default_id=True)):
        await eventually(lambda: plane.polls)
    assert re.fullmatch(r"gpu-1-[0-9a-f]{6}", plane.registers[0].worker_id)


async def test_prompt_ids_are_those_of_job_and_lease(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(picture())
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: job.word)
    assert UUID(job.result.provider_job_id).version == 5


@contextlib.asynccontextmanager
async def hung() -> AsyncIterator[tuple[str, Counter[str]]]:
    """A control plane that takes connections and never answers, like a stopped process."""
    seen: Counter[str] = Counter()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen["connections"] += 1
        with contextlib.suppress(OSError):
            await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


@pytest.fixture
def _missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "SILENCE_SECONDS_MIN", 2.0)


@pytest.mark.usefixtures("_missed_soon")
async def test_a_hung_control_plane_is_left_for_the_next_address(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    job = plane.add(picture())
    async with hung() as (url, seen):
        settings = settings_for(
            plane, engine.url, tmp_path, control_url=url, more_control_urls=(plane.url,)
        )
        async with running_worker(settings):
            await eventually(lambda: job.word)
        assert seen["connections"] == 1, "one silence is enough"
    assert job.result.outputs


@pytest.mark.usefixtures("_missed_soon")
@pytest.mark.parametrize("hangs", ["poll", "heartbeat"])
async def test_a_control_plane_that_hangs_behind_a_balancer_gets_new_connections(
    plane: Plane, engine: Engine, tmp_path: Path, hangs: str
) -> None:
    """The balancer's address is the only one; it passes new connections to a plane that works."""
    async with freezing_relay(plane.url) as relay:
        settings = settings_for(plane, engine.url, tmp_path, control_url=relay.url)
        async with running_worker(settings):
            if hangs == "poll":
                await eventually(lambda: plane.waiting)
                relay.freeze()
                job = plane.add(picture())
            else:
                job = plane.add(steps(10, 100))
                await eventually(lambda: job.started)
                relay.freeze()
            await eventually(lambda: job.word)
    assert job.result.outputs
    assert job.leases <= 2


def test_a_call_that_waits_is_answered_before_its_plane_counts_as_hung() -> None:
    for seconds in (0.5, 1, 5, 15, 30, 300):
        control = ControlClient("http://plane", heartbeat_seconds=seconds)
        assert control.wait_seconds < control.silence_seconds
        assert control.silence_seconds <= 60
        assert control.silence_seconds == min(60, max(10, 2 * seconds))
