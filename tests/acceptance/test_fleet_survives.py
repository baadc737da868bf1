"""Real processes on PostgreSQL, most of which die in the middle: no job may notice.

One worker is killed in mid-job, one is asked to stop, one hears that its machine will be taken away;
PostgreSQL is torn down and the control plane is killed. New workers take their places.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.jobs.counted_jobs import FLEET, STEP_MS, executions, in_mid_job, prepare, submit
from tests.support.server.admin_client import AuditEntry, until
from tests.support.server.deployment import Deployment, EngineProcess, WorkerProcess

EARLY_JOBS, MORE_JOBS, LATE_JOBS = range(1, 13), range(13, 19), range(19, 25)
STEPS = 12
JOB_SECONDS = STEPS * STEP_MS / 1000
# Short enough that a dead worker's job comes back while the test waits.
SETTINGS = {
    "lease_seconds": "5",
    "heartbeat_seconds": "1",
    "sweep_seconds": "0.5",
    "outage_seconds": "2",
    # On a slow machine a job may be cut off more than once.
    "max_attempts": "5",
}
END_SECONDS_MAX = 90.0


@dataclass(frozen=True)
class Survived:
    """What is known when all is over, by the job's color."""

    jobs: dict[int, dict[str, Any]]
    audit: dict[int, list[AuditEntry]]
    executed: Counter[int]

    def acts(self, color: int, action: str) -> list[AuditEntry]:
        return [each for each in self.audit[color] if each.action == action]

    def handed_back(self, color: int) -> list[tuple[str, str]]:
        """By whom and why."""
        return [(each.actor, each.reason) for each in self.acts(color, "requeue")]


def gathered(
    deployment: Deployment, tenant_id: str, colors: dict[str, int], engines: list[EngineProcess]
) -> Survived:
    ended = deployment.admin.wait_until_ended(tenant_id, list(colors), seconds=END_SECONDS_MAX)
    # What a killed worker left behind may still run.
    until(lambda: all(engine.is_idle() for engine in engines), seconds=10 * JOB_SECONDS)
    jobs = {colors[job_id]: job for job_id, job in ended.items()}
    subjects = {f"dispatch:{job['dispatch']['id']}": color for color, job in jobs.items()}
    audit: dict[int, list[AuditEntry]] = defaultdict(list)
    for entry in deployment.admin.audit():
        if entry.subject in subjects:
            audit[subjects[entry.subject]].append(entry)
    return Survived(jobs, audit, executions(engines))


async def test_every_job_ends_completed_whatever_dies(tmp_path: Path) -> None:
    async with Deployment(tmp_path, None, **SETTINGS) as deployment:
        secret, tenant_id = prepare(deployment)
        engines = deployment.start_engines("engine-1", "engine-2", "engine-3")

        def worker(name: str, engine: EngineProcess) -> WorkerProcess:
            return deployment.start_worker(name, engine, fleet=FLEET, secret=secret)

        killed, asked, taken = (
            worker(f"worker-{number}", engine) for number, engine in enumerate(engines, 1)
        )
        colors = submit(deployment, tenant_id, EARLY_JOBS, steps=STEPS)

        def start_is_told(color: int) -> bool:
            (job_id,) = (each for each, its in colors.items() if its == color)
            dispatch = deployment.admin.job(tenant_id, job_id)["dispatch"]
            return dispatch["started_at"] is not None

        victim = in_mid_job(engines[0], is_told=start_is_told)
        killed.process.kill()
        in_mid_job(engines[1])
        asked.process.terminate()
        deployment.restart_postgres()
        assert asked.process.wait() == 0
        worker("worker-4", engines[1])
        # On a slow machine the first ones have ended by now.
        colors |= submit(deployment, tenant_id, MORE_JOBS, steps=STEPS)
        in_mid_job(engines[2])
        deployment.restart_control()
        colors |= submit(deployment, tenant_id, LATE_JOBS, steps=STEPS)
        in_mid_job(engines[2])
        taken.metadata.announce_spot(seconds=JOB_SECONDS / 2)
        assert taken.process.wait() == 0
        worker("worker-5", engines[2])

        survived = gathered(deployment, tenant_id, colors, engines)
        check_that_no_job_noticed(survived)
        check_that_what_ran_again_was_cut_off(survived)
        check_that_attempts_are_what_they_cost(survived, victim)
        check_that_leaving_was_told(deployment, survived)


def check_that_no_job_noticed(survived: Survived) -> None:
    statuses = {color: job["status"] for color, job in survived.jobs.items()}
    assert statuses == dict.fromkeys((*EARLY_JOBS, *MORE_JOBS, *LATE_JOBS), "completed")
    for color in survived.jobs:
        assert len(survived.acts(color, "submit")) == 1
        assert len(survived.acts(color, "complete")) == 1, "one result is accepted"
        assert len(survived.jobs[color]["outputs"]) == 1


def check_that_what_ran_again_was_cut_off(survived: Survived) -> None:
    for color in survived.jobs:
        reasons = [reason for _, reason in survived.handed_back(color)]
        cut_off = len(survived.acts(color, "expire")) + reasons.count("spot")
        assert 1 <= survived.executed[color] <= 1 + cut_off, f"{color} ran again: {reasons}"


def check_that_attempts_are_what_they_cost(survived: Survived, victim: int) -> None:
    """Lost after its start was told: an attempt. Handed back, or lost before: none."""
    lost = survived.acts(victim, "expire")[0]
    assert (lost.details["worker"], lost.details["started"]) == ("worker-1", True)
    assert survived.executed[victim] >= 2
    for color, job in survived.jobs.items():
        used = [entry for entry in survived.acts(color, "expire") if entry.details["started"]]
        assert job["dispatch"]["attempts"] == 1 + len(used)


def check_that_leaving_was_told(deployment: Deployment, survived: Survived) -> None:
    left = {entry.subject for entry in deployment.admin.audit(action="deregister")}
    assert {"worker:worker-2", "worker:worker-3"} <= left
    assert not {"worker-2", "worker-3"} & deployment.admin.worker_ids()
    handed_back = {each for color in survived.jobs for each in survived.handed_back(color)}
    assert ("worker:worker-3", "spot") in handed_back
