"""How far jobs are, as it is kept in a process."""

from uuid import uuid4

from comfyfleet.jobs.progress import CHARACTERS_MAX, Progresses
from comfyfleet.wire.messages import Progress

PREVIEW = Progress(percent=1, preview="A" * 700_000)


def test_previews_of_leases_that_ended_elsewhere_do_not_fill_the_memory() -> None:
    progresses, tokens = Progresses(), [uuid4() for _ in range(200)]
    for token in tokens:
        progresses.note(token, PREVIEW)
    kept = [token for token in tokens if progresses.own(token)]
    assert kept == tokens[-(CHARACTERS_MAX // 700_000) :]


def test_the_same_lease_counts_once_however_often_it_is_told() -> None:
    progresses, first, second = Progresses(), uuid4(), uuid4()
    progresses.note(first, PREVIEW)
    for _ in range(200):
        progresses.note(second, PREVIEW)
    assert progresses.own(first) is PREVIEW


def test_a_lease_that_has_ended_is_forgotten_with_its_preview() -> None:
    progresses, first = Progresses(), uuid4()
    progresses.note(first, PREVIEW)
    for _ in range(200):
        token = uuid4()
        progresses.note(token, PREVIEW)
        progresses.forget(token)
        assert progresses.of(token) is None
    assert progresses.own(first) is PREVIEW
    assert len(progresses.take_changed()) == 1
