"""A Comfy Cloud on one engine: accounts, jobs, signed URLs, and the cloud's response formats."""

import hashlib
import hmac
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from comfyfleet.engine.engine import AcceptedPrompt, Engine
from comfyfleet.errors import FleetError, LimitExceeded
from comfyfleet.protocol.payloads import Job, QueuedPrompt, Record, all_jobs

JOBS_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class CloudAccount:
    """A user of the cloud, identified by the key. Without credits, all prompts are refused."""

    user: str
    has_credits: bool = True


@dataclass(frozen=True, slots=True)
class CloudJob:
    """The data that the cloud stores for a job in addition to the queue and the history."""

    user: str
    created_ms: int
    prompt: Mapping[str, Any]
    # A waiting job that was cancelled leaves no trace in the engine; the cloud remembers it.
    cancelled_ms: int | None = None


class AccountJobs:
    """The jobs of all users. Only used in the event loop."""

    def __init__(self) -> None:
        self._jobs: dict[str, CloudJob] = {}

    def add(self, job_id: str, job: CloudJob) -> None:
        self._jobs[job_id] = job
        while len(self._jobs) > JOBS_KEPT_MAX:
            del self._jobs[next(iter(self._jobs))]

    def get(self, job_id: str) -> CloudJob | None:
        return self._jobs.get(job_id)

    def of(self, user: str) -> dict[str, CloudJob]:
        return {job_id: job for job_id, job in self._jobs.items() if job.user == user}


URL_SECONDS = 300


@dataclass(frozen=True, slots=True)
class StorageUrlSigner:
    """Signs the name in a URL, so that the URL gives access to nothing else."""

    secret: bytes

    def path(self, kind: str, name: str, now: float) -> str:
        expires = str(int(now) + URL_SECONDS)
        query = urlencode({"expires": expires, "signature": self._sign(kind, name, expires)})
        return f"/storage/{kind}/{quote(name)}?{query}"

    def is_valid(self, kind: str, name: str, query: Mapping[str, str], now: float) -> bool:
        expires, signature = query.get("expires", ""), query.get("signature", "")
        wanted = self._sign(kind, name, expires)
        # Compared first: only what was signed by us is known to be a number.
        return hmac.compare_digest(wanted.encode(), signature.encode()) and int(expires) >= now

    def _sign(self, kind: str, name: str, expires: str) -> str:
        message = f"{kind}\n{name}\n{expires}".encode()
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()


ENDED = ("completed", "failed", "cancelled")
RAW_ENDED = {"completed": "success", "failed": "error", "cancelled": "cancelled"}


def cancelled_job(job_id: str, job: CloudJob) -> Job:
    """A job that was cancelled before it ran."""
    return {
        "id": job_id,
        "status": "cancelled",
        "create_time": job.created_ms,
        "execution_end_time": job.cancelled_ms,
        "outputs_count": 0,
    }


def cloud_job(job: Job) -> Job:
    """A job of the engine as the cloud lists it: created in seconds, with counts when it has ended."""
    shown = {**job, "create_time": job["create_time"] // 1000}
    shown.pop("priority", None)
    if shown["status"] not in ENDED:
        shown.pop("outputs_count", None)
    return shown


def cloud_detail(job: Job, meta: Mapping[str, Any] | None, prompt: Mapping[str, Any]) -> Job:
    updated_ms = job.get("execution_end_time") or job["create_time"]
    detail = {**cloud_job(job), "update_time": updated_ms // 1000, "workflow": prompt}
    return detail if meta is None else {**detail, "execution_meta": meta}


def raw_status(job_id: str, job: Job, waiting: Sequence[str]) -> dict[str, Any]:
    """The short status, with one of the internal states that clients must handle."""
    error = job.get("execution_error", {})
    updated = _moment(job.get("execution_end_time") or job["create_time"])
    return {
        "id": job_id,
        "status": _raw_state(job_id, job["status"], waiting),
        "created_at": _moment(job["create_time"]),
        "updated_at": updated,
        "last_state_update": updated,
        "assigned_inference": None if job["status"] == "pending" else "engine",
        "error_message": error.get("exception_message"),
    }


def _raw_state(job_id: str, status: str, waiting: Sequence[str]) -> str:
    if status == "in_progress":
        return "executing"
    if status == "pending":
        return "pending_execution" if waiting[:1] == [job_id] else "queued_waiting"
    return RAW_ENDED[status]


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()


def queue_row(position: int, item: QueuedPrompt) -> list[Any]:
    """A row of the queue, in another order than on a ComfyUI: outputs before the data of the submission."""
    create_time = item.extra_data.get("create_time")
    return [
        position,
        item.prompt_id,
        item.prompt,
        list(item.outputs),
        {"create_time": create_time},
    ]


def history_entry(job_id: str, record: Record) -> dict[str, Any]:
    """The short form: without the prompt and without its workflow."""
    number, _, _, extra_data, _ = record["prompt"]
    shown = {key: value for key, value in extra_data.items() if key != "extra_pnginfo"}
    return {
        "prompt_id": job_id,
        "create_time": extra_data.get("create_time"),
        "prompt": {"priority": number, "prompt_id": job_id, "extra_data": shown},
        **_results(record),
    }


def history_detail(job_id: str, record: Record) -> dict[str, Any]:
    number, _, prompt, extra_data, outputs = record["prompt"]
    return {
        "prompt": {
            "priority": number,
            "prompt_id": job_id,
            "prompt": prompt,
            "extra_data": extra_data,
            "outputs_to_execute": outputs,
        },
        **_results(record),
    }


def _results(record: Record) -> dict[str, Any]:
    return {key: record[key] for key in ("outputs", "status", "meta")}


QUEUE_JOBS_MAX = 100
# The rest of a body is accepted and ignored: place in the queue, ids, clients.
SUBMITTED = ("prompt", "extra_data", "partial_execution_targets")


class NoCredits(FleetError):
    code = "insufficient_credits"


class AccountQueueFull(LimitExceeded):
    code = "queue_full"


class NotYours(FleetError):
    code = "forbidden"


class NoSuchJob(FleetError):
    code = "not_found"


class StandInCloud:
    """Accounts by key, and the jobs of their users."""

    def __init__(
        self,
        engine: Engine,
        accounts: Mapping[str, CloudAccount],
        *,
        clock: Callable[[], float] = time.time,
        secret: bytes | None = None,
    ) -> None:
        self.engine = engine
        self.signer = StorageUrlSigner(secret or secrets.token_bytes())
        self.clock = clock
        self._accounts = accounts
        self._jobs = AccountJobs()

    def account_of(self, key: str | None) -> CloudAccount | None:
        return self._accounts.get(key) if key else None

    def submit(self, account: CloudAccount, body: object) -> AcceptedPrompt:
        if not account.has_credits:
            raise NoCredits("there are no credits left")
        if len(self.waiting(account.user)) >= QUEUE_JOBS_MAX:
            raise AccountQueueFull(f"at most {QUEUE_JOBS_MAX} jobs can wait")
        accepted = self.engine.submit(_submitted(body, account.user))
        prompt = body["prompt"] if isinstance(body, dict) else {}
        created_ms = int(self.clock() * 1000)
        self._jobs.add(accepted.prompt_id, CloudJob(account.user, created_ms, prompt))
        return accepted

    def jobs(self, user: str) -> dict[str, Job]:
        """All jobs of a user, from the engine or as cancelled."""
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

    def running(self, user: str) -> list[QueuedPrompt]:
        return [item for item in self.engine.queue.listed()[0] if item.client_id == user]

    def waiting(self, user: str) -> list[QueuedPrompt]:
        """Waiting jobs, oldest first, whatever the order of the heap."""
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
    """The body for the engine: the user is the client, so all of the user's sockets get the messages."""
    if not isinstance(body, dict):
        return body
    kept: dict[str, Any] = {key: body[key] for key in SUBMITTED if key in body}
    return {**kept, "client_id": user}


def positions(items: list[QueuedPrompt]) -> list[tuple[int, QueuedPrompt]]:
    return list(zip(itertools.count(1), items, strict=False))
