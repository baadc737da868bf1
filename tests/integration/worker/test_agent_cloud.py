"""A worker whose backend is Comfy Cloud."""

from pathlib import Path

from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.v2_server import comfy_api_proxy
from tests.support.workers.memory_plane import JobFile, Plane, eventually
from tests.support.workers.prompts import passing, picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.engine import serve_in_thread

KEY = "key-of-alice"


def environ(url: str) -> dict[str, str]:
    return {"COMFY_CLOUD_API_KEY": KEY, "COMFY_CLOUD_BASE_URL": url}


async def test_a_job_runs_on_a_cloud(plane: Plane, tmp_path: Path) -> None:
    made = plane.add(picture(), provider="cloud")
    passed = plane.add(
        passing(), provider="cloud", files={"input": JobFile(b"bytes", "a.png", "1.file")}
    )
    with serving_cloud({KEY: CloudAccount("alice")}) as cloud:
        async with running_worker(settings_for(plane, None, tmp_path), environ(cloud.url)):
            await eventually(lambda: made.word and passed.word)
    assert plane.delivered(made).startswith(b"\x89PNG")
    assert plane.delivered(passed) == b"bytes"
    assert plane.registers[0].providers == ("cloud",)
    assert plane.registers[0].backend is not None
    assert plane.registers[0].backend.kind == "Comfy Cloud"


async def test_a_cancelled_job_is_cancelled_on_the_cloud(plane: Plane, tmp_path: Path) -> None:
    job = plane.add(steps(1000, 50), provider="cloud")
    with serving_cloud({KEY: CloudAccount("alice")}) as cloud:
        async with running_worker(settings_for(plane, None, tmp_path), environ(cloud.url)):
            await eventually(lambda: job.started)
            job.cancelled = True
            await eventually(lambda: job.word)
        assert cloud.engine.queue.listed() == ([], [])
    assert job.failure["code"] == "cancelled"


async def test_an_account_without_credits_hands_the_job_back(plane: Plane, tmp_path: Path) -> None:
    plane.requeues_again = False
    job, other = plane.add(picture(), provider="cloud"), plane.add(picture(), provider="cloud")
    with serving_cloud({KEY: CloudAccount("alice", has_credits=False)}) as cloud:
        async with running_worker(settings_for(plane, None, tmp_path), environ(cloud.url)):
            await eventually(lambda: job.word)
            # No poll that was sent before the worker noticed can take another job.
            await eventually(lambda: plane.problems and not plane.waiting)
            await eventually(lambda: other.word or other.leases == 0)
            third = plane.add(picture(), provider="cloud")
            reported = len(plane.problems)
            plane.reason = "poll again"
            await eventually(lambda: third.leases or len(plane.problems) > reported)
    assert job.requeue.reason == "backend_down"
    assert third.leases == 0


async def test_a_job_runs_on_a_server_of_the_newer_api(plane: Plane, tmp_path: Path) -> None:
    job = plane.add(picture(), provider="cloud")
    with serve_in_thread() as engine:
        async with (
            comfy_api_proxy(engine.url, KEY) as (url, _),
            running_worker(settings_for(plane, None, tmp_path), environ(url)),
        ):
            await eventually(lambda: job.word)
    assert plane.delivered(job).startswith(b"\x89PNG")
