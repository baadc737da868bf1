"""A caller's keys for paid services leave a worker for its backend only."""

import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from comfyfleet.api.worker import Fail, Job, Requeue
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.journal import Journal, JournalEntry
from comfyfleet.worker.secrets import HIDDEN

KEY = "comfyui-0123456789-secret"


@pytest.fixture
def job() -> Job:
    return Job(
        dispatch_id=1,
        job_id=uuid4(),
        lease_token=uuid4(),
        lease_number=1,
        attempt=1,
        lease_expires_at=datetime(2026, 11, 15, 12, tzinfo=UTC),
        lease_seconds=900,
        provider="self_hosted",
        workflow_slug="open",
        prompt={},
        secrets={"api_key_comfy_org": KEY},
        has_secrets=True,
    )


def failed(job: Job) -> Fail:
    error = {"code": "run_failed", "exception_message": f"no credits for {KEY}"}
    return Fail(dispatch_id=job.dispatch_id, lease_token=job.lease_token, error=error)


def test_the_journal_has_no_keys_and_knows_that_there_were_some(job: Job, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    journal.write(JournalEntry(job))
    assert KEY not in _texts(tmp_path)
    (entry,) = journal.entries()
    assert (entry.job.secrets, entry.job.has_secrets) == ({}, True)
    plain = failed(job).model_copy(update={"error": {"exception_message": KEY}})
    journal.write(JournalEntry(job, report=plain))
    assert KEY not in _texts(tmp_path)


def _texts(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.rglob("*.json"))


def test_reports_of_the_job_hide_its_keys_and_those_of_others_stay_as_they_are(job: Job) -> None:
    control = ControlClient("http://127.0.0.1:9")
    control.secrets.add(job)
    told = json.loads(control._content(failed(job)))["error"]
    assert told["exception_message"] == f"no credits for {HIDDEN}"
    other = Requeue(dispatch_id=1, lease_token=uuid4(), reason="other", detail=KEY)
    assert KEY in control._content(other)
    control.secrets.remove(job)
    assert KEY in control._content(failed(job))


def test_the_keys_are_not_in_the_jobs_own_description(job: Job) -> None:
    assert KEY not in repr(job)
