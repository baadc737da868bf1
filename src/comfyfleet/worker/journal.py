"""The journal that a worker keeps on disk in case it is killed: its key and its leases."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from comfyfleet.api.values import Message
from comfyfleet.api.worker import Complete, Fail, Job, Requeue
from comfyfleet.worker.control_client import REPORT_ENDPOINTS, FinalReport
from comfyfleet.worker.secrets import hide_in_values

logger = logging.getLogger(__name__)

SECRET_MODE = 0o600
FOLDER_MODE = 0o700
REPORT_CLASSES: Mapping[str, type[Complete] | type[Fail] | type[Requeue]] = {
    "complete": Complete,
    "fail": Fail,
    "requeue": Requeue,
}


class WorkerIdentity(Message):
    """The worker's id and key for one control plane. The key is as secret as a password."""

    control: str
    fleet_slug: str
    stage: str
    worker_id: str
    key: str
    heartbeat_seconds: float = 30
    asked_id: str = ""  # the configured id; `worker_id` is different if this id was in use


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The journal's entry for one lease. `run_id` is set if the backend has the lease's prompt.
    `report` is a final report that hasn't been delivered."""

    job: Job
    run_id: str | None = None
    started_at: float | None = None  # seconds since 1970
    report: FinalReport | None = None


class Journal:
    """A folder of small files that are replaced atomically and readable only by their owner."""

    def __init__(self, folder: Path) -> None:
        self._identity = folder / "worker.json"
        self._leases = folder / "leases"
        self.scratch = folder / "scratch"

    def open(self) -> None:
        """Creates the folders, and deletes scratch files that a killed worker left behind."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        for folder in (self._identity.parent, self._leases, self.scratch):
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def identity(self) -> WorkerIdentity | None:
        data = _read(self._identity)
        try:
            return None if data is None else WorkerIdentity.model_validate(data)
        except ValidationError:
            return None

    def remember(self, identity: WorkerIdentity) -> None:
        _write(self._identity, identity.model_dump_json().encode())

    def forget_identity(self) -> None:
        self._identity.unlink(missing_ok=True)

    def write(self, entry: JournalEntry) -> None:
        report = entry.report
        data = {
            "job": entry.job.model_dump(mode="json", exclude={"secrets"}),
            "run_id": entry.run_id,
            "started_at": entry.started_at,
            "word": None
            if report is None
            else {
                "kind": REPORT_ENDPOINTS[type(report)],
                "message": report.model_dump(mode="json"),
            },
        }
        secrets = entry.job.secrets.values()
        data["word"] = hide_in_values(data["word"], tuple(secrets)) if secrets else data["word"]
        _write(self._path(entry.job), json.dumps(data).encode())

    def keep(self, entry: JournalEntry) -> OSError | None:
        """Writes the entry, but returns an error instead of raising it, because a lease continues
        without its journal file."""
        try:
            self.write(entry)
        except OSError as error:
            return error
        return None

    def forget(self, job: Job) -> None:
        self._path(job).unlink(missing_ok=True)

    def entries(self) -> list[JournalEntry]:
        """Returns all leases, oldest first. Deletes unreadable ones, whose leases will expire."""
        paths = sorted(self._leases.glob("*.json"))
        entries = [entry for path in paths if (entry := _entry(path)) is not None]
        return sorted(entries, key=lambda entry: entry.job.dispatch_id)

    def _path(self, job: Job) -> Path:
        # The name contains the token, because a dispatch may be leased again before its old lease
        # has ended completely.
        return self._leases / f"{job.dispatch_id}-{job.lease_token}.json"


def _entry(path: Path) -> JournalEntry | None:
    data = _read(path) or {}
    try:
        return JournalEntry(
            Job.model_validate(data["job"]),
            data["run_id"],
            data["started_at"],
            _parse_report(data["word"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("a lease in the journal can't be read", extra={"reason": str(error)[:200]})
        path.unlink(missing_ok=True)
        return None


def _parse_report(data: Any) -> FinalReport | None:
    return None if data is None else REPORT_CLASSES[data["kind"]].model_validate(data["message"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write(path: Path, data: bytes) -> None:
    """Writes a temporary file and renames it, so that the file under the final name is always
    complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            # Windows has no fchmod, but its mkstemp already restricts the file to this user.
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), SECRET_MODE)
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
