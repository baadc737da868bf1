"""What a cloud does for its users, on one engine."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from comfyfleet.engine.cloud.account import Account, CloudJob, Jobs
from comfyfleet.engine.cloud.storage import Signer
from comfyfleet.engine.cloud.views import cancelled_job
from comfyfleet.engine.engine import Accepted, Engine
from comfyfleet.engine.jobs import Job, all_jobs
from comfyfleet.engine.queue import Item
from comfyfleet.kernel.errors import FleetError, LimitExceeded

QUEUE_JOBS_MAX = 100
# The rest of a body is accepted and ignored: place in the queue, ids, clients.
SUBMITTED = ("prompt", "extra_data", "partial_execution_targets")


class NoCredits(FleetError):
    code = "insufficient_credits"


class QueueFull(LimitExceeded):
    code = "queue_full"


class NotYours(FleetError):
    code = "forbidden"


class NoSuchJob(FleetError):
    code = "not_found"


class Cloud:
    """Accounts by key, and the jobs of their users."""

    def __init__(
        self,
        engine: Engine,
        accounts: Mapping[str, Account],
        *,
        clock: Callable[[], float] = time.time,
        secret: bytes | None = None,
    ) -> None:
        self.engine = engine
        self.signer = Signer(secret or secrets.token_bytes())
        self.clock = clock
        self._accounts = accounts
        self._jobs = Jobs()

    def account_of(self, key: str | None) -> Account | None:
        return self._accounts.get(key) if key else None

    def submit(self, account: Account, body: object) -> Accepted:
        if not account.has_credits:
            raise NoCredits("there are no credits left")
        if len(self.waiting(account.user)) >= QUEUE_JOBS_MAX:
            raise QueueFull(f"at most {QUEUE_JOBS_MAX} jobs can wait")
        accepted = self.engine.submit(_submitted(body, account.user))
        prompt = body["prompt"] if isinstance(body, dict) else {}
        created_ms = int(self.clock() * 1000)
        self._jobs.add(accepted.prompt_id, CloudJob(account.user, created_ms, prompt))
        return accepted

    def jobs(self, user: str) -> dict[str, Job]:
        """All jobs of a user, as the engine shows them or as they were cancelled."""
        own = self._jobs.of(user)
        running, waiting = self.engine.queue.listed()
        shown = all_jobs(running, waiting, self.engine.history.page())
        found = {job["id"]: job for job in shown if job["id"] in own}
        for job_id, job in own.items():
            if job_id not in found and job.cancelled_ms is not None:
                found[job_id] = cancelled_job(job_id, job)
        return found

    def job(self, user: str, job_id: str) -> tuple[Job, CloudJob]:
        known = self._jobs.get(job_id)
        if known is None:
            raise NoSuchJob("there is no such job")
        if known.user != user:
            raise NotYours("the job belongs to another user")
        found = self.jobs(user).get(job_id)
        if found is None:
            raise NoSuchJob("the job was deleted")
        return found, known

    def running(self, user: str) -> list[Item]:
        return [item for item in self.engine.queue.listed()[0] if item.client_id == user]

    def waiting(self, user: str) -> list[Item]:
        """Oldest first, whatever the heap says."""
        waiting = [item for item in self.engine.queue.listed()[1] if item.client_id == user]
        return sorted(waiting, key=lambda item: item.number)

    def cancel(self, user: str, job_id: str) -> bool:
        return self._interrupt(user, job_id) or self.cancel_waiting(user, job_id)

    def cancel_waiting(self, user: str, job_id: str) -> bool:
        job = self._jobs.get(job_id)
        if job is None or job.user != user or not self.engine.queue.delete(job_id):
            return False
        self._jobs.add(job_id, replace(job, cancelled_ms=int(self.clock() * 1000)))
        return True

    def interrupt_all(self, user: str) -> None:
        for item in self.running(user):
            self.engine.queue.interrupt(item.prompt_id)

    def _interrupt(self, user: str, job_id: str) -> bool:
        mine = any(item.prompt_id == job_id for item in self.running(user))
        return mine and self.engine.queue.interrupt(job_id)


def _submitted(body: object, user: str) -> object:
    """What the engine gets to see: the user is the client, so all his sockets are told."""
    if not isinstance(body, dict):
        return body
    kept: dict[str, Any] = {key: body[key] for key in SUBMITTED if key in body}
    return {**kept, "client_id": user}


def positions(items: list[Item]) -> list[tuple[int, Item]]:
    return list(zip(itertools.count(1), items, strict=False))
