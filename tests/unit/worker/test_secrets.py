"""A caller's keys for paid services leave a worker for its backend only."""

import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from comfyfleet.api.worker import Fail, Job, Requeue
from comfyfleet.protocol.payloads import parse_submission
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.journal import Journal, JournalEntry
from comfyfleet.worker.secrets import HIDDEN, hide, hide_in_values

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


def test_names_of_fields_and_cut_off_texts_hide_keys_too() -> None:
    told = {"output": {KEY: [f"bad key {KEY[:20]}", f"{KEY[:14]}… is no key"]}, "kind": KEY[:9]}
    hidden = {"output": {HIDDEN: [f"bad key {HIDDEN}", f"{HIDDEN}… is no key"]}, "kind": KEY[:9]}
    assert hide_in_values(told, [KEY]) == hidden
    assert hide(f"{KEY[:16]}{KEY[:16]}{KEY}", [KEY]) == HIDDEN * 3


@pytest.mark.parametrize(
    "text",
    ["execution_success", "exception_message", 'comfyui-0123"456789', "comfyui-0123\\456789", "comfyui-0123 456789", "0" * 2_001],
)  # fmt: skip
def test_what_would_break_a_report_or_be_quoted_otherwise_is_no_key(text: str) -> None:
    body = {"prompt": {}, "extra_data": {"api_key_comfy_org": text}}
    submission = parse_submission(body)
    assert not submission.secrets
    assert text not in str(submission.extra_data)
    longest = {"prompt": {}, "extra_data": {"api_key_comfy_org": "0" * 2_000}}
    assert parse_submission(longest).secrets
