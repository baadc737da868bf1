"""What a worker still knows after it was killed."""

from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.worker import Complete
from comfyfleet.worker.journal import Journal, JournalEntry, WorkerIdentity

IDENTITY = WorkerIdentity(
    control="http://x", fleet_slug="gpus", stage="production", worker_id="w", key="k" * 64
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "state")
    journal.open()
    return journal


def test_it_is_read_as_it_was_written(journal: Journal, tmp_path: Path) -> None:
    report = Complete(dispatch_id=1, lease_token=JOB.lease_token, provider_job_id="r")
    entries = [
        JournalEntry(JOB, "run", 12.5, report),
        JournalEntry(JOB.model_copy(update={"dispatch_id": 2})),
    ]
    journal.remember(IDENTITY)
    for entry in entries:
        journal.write(entry)
    again = Journal(tmp_path / "state")
    again.open()
    assert again.identity() == IDENTITY
    assert again.entries() == entries


def test_only_its_owner_can_read_it(journal: Journal, tmp_path: Path) -> None:
    journal.remember(IDENTITY)
    journal.write(JournalEntry(JOB))
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_what_was_forgotten_is_gone(journal: Journal) -> None:
    journal.remember(IDENTITY)
    journal.write(JournalEntry(JOB))
    journal.forget(JOB)
    journal.forget(JOB)
    journal.forget_identity()
    assert journal.entries() == []
    assert journal.identity() is None


def test_a_later_entry_takes_the_place_of_the_one_before(journal: Journal) -> None:
    journal.write(JournalEntry(JOB))
    journal.write(replace(JournalEntry(JOB), run_id="run"))
    assert [entry.run_id for entry in journal.entries()] == ["run"]


def test_two_leases_of_one_dispatch_are_two_entries(journal: Journal) -> None:
    journal.write(JournalEntry(JOB))
    journal.write(JournalEntry(JOB.model_copy(update={"lease_token": uuid4()})))
    assert len(journal.entries()) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": {}}', '{"job": 1}'])
def test_an_entry_that_cannot_be_read_is_dropped(
    journal: Journal, tmp_path: Path, text: str
) -> None:
    (tmp_path / "state" / "leases" / "1-x.json").write_text(text)
    (tmp_path / "state" / "worker.json").write_text(text)
    journal.write(JournalEntry(JOB))
    assert journal.entries() == [JournalEntry(JOB)]
    assert journal.identity() is None


def test_what_a_killed_worker_had_half_done_goes(journal: Journal, tmp_path: Path) -> None:
    (journal.scratch / "left").mkdir()
    (journal.scratch / "left" / "output").write_bytes(b"x")
    Journal(tmp_path / "state").open()
    assert list(journal.scratch.iterdir()) == []
