"""How far jobs are, as it is kept in a process."""

from uuid import uuid4

from comfyfleet.api.worker import Progress
from comfyfleet.server.jobs.progress import CHARACTERS_MAX, ProgressCache

PREVIEW = Progress(percent=1, preview="A" * 700_000)


def test_previews_of_leases_that_ended_elsewhere_do_not_fill_the_memory() -> None:
    progress_cache, tokens = ProgressCache(), [uuid4() for _ in range(200)]
    for token in tokens:
        progress_cache.note(token, PREVIEW)
    kept = [token for token in tokens if progress_cache.own(token)]
    assert kept == tokens[-(CHARACTERS_MAX // 700_000) :]


def test_the_same_lease_counts_once_however_often_it_is_told() -> None:
    progress_cache, first, second = ProgressCache(), uuid4(), uuid4()
    progress_cache.note(first, PREVIEW)
    for _ in range(200):
        progress_cache.note(second, PREVIEW)
    assert progress_cache.own(first) is PREVIEW


def test_a_lease_that_has_ended_is_forgotten_with_its_preview() -> None:
    progress_cache, first = ProgressCache(), uuid4()
    progress_cache.note(first, PREVIEW)
    for _ in range(200):
        token = uuid4()
        progress_cache.note(token, PREVIEW)
        progress_cache.forget(token)
        assert progress_cache.of(token) is None
    assert progress_cache.own(first) is PREVIEW
    assert len(progress_cache.pop_changed()) == 1
