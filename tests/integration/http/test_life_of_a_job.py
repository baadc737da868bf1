"""`docs/concepts/life-of-a-job.md` names files: a job passes them, in that order."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.fleet import WorkerClient
from tools.files_passed import traced

import comfyfleet

PACKAGE = Path(comfyfleet.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "life-of-a-job.md"


def named_files() -> dict[str, list[str]]:
    """The files of each section of the page, by the call in its heading."""
    found: dict[str, list[str]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        call = re.search("`(.+?)`", section.splitlines()[0])
        if call:
            found[call[1]] = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert all(found.values())
    return found


async def step(
    name: str, customer: Customer, worker: WorkerClient, effect_setup: EffectSetup, job: Any
) -> Any:
    match name:
        case "POST /api/ai-jobs":
            return await customer.job(effect_setup.draw)
        case "POST /api/worker/poll":
            return await worker.job()
        case "POST /api/worker/heartbeat":
            answer = await worker.call_for(job, "heartbeat", started=True)
        case "PUT /objects":
            slot = job["outputs"][0]
            answer = await worker.client.put(slot["url"], content=b"made", headers=slot["headers"])
        case "POST /api/worker/complete":
            made = [{"name": job["outputs"][0]["name"], "size": len(b"made")}]
            answer = await worker.call_for(job, "complete", outputs=made)
        case _:
            answer = await customer.client.get(f"/api/ai-jobs/{job['job_id']}")
    assert answer.status_code in (200, 201), answer.text
    return job


async def files_of_each_step(
    customer: Customer, worker: WorkerClient, effect_setup: EffectSetup, steps: list[str]
) -> dict[str, list[str]]:
    job: Any = None
    passed: dict[str, list[str]] = {}
    for name in steps:
        call = partial(step, name, customer, worker, effect_setup, job)
        job, files = await traced(call)
        passed[name] = [each.removeprefix("comfyfleet/") for each in files]
        await effect_setup.plane.context.deferred.flush()
    return passed


async def test_a_job_passes_the_files_that_the_page_names(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    named = named_files()
    assert len(named) == 6
    async with (
        plane_on(postgres_databases, tmp_path) as plane,
        effect_setup_on(plane) as effect_setup,
        effect_setup.fleet_setup.worker() as worker,
    ):
        customer = await effect_setup.customer()
        # The first two warm the plane. What runs beside a call may pass a file before it does, but
        # does not in each of the others.
        rounds = [
            await files_of_each_step(customer, worker, effect_setup, list(named)) for _ in range(6)
        ][2:]
    for call, files in named.items():
        orders = [[each for each in passed[call] if each in files] for passed in rounds]
        assert files in orders, rounds[-1][call]


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8"))
    ours = [each for each in named if not each.startswith("tests/")]
    assert len(ours) > 40
    assert [each for each in ours if not (PACKAGE / each).is_file()] == []
