"""Who looks at a job's previews, and which pictures are kept; without a database."""

import json
from uuid import UUID, uuid4

import pytest

from comfyfleet.api.worker import Heartbeat, Progress, RunPreview
from comfyfleet.clock import utc_now
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.jobs import progress as module
from comfyfleet.server.jobs.progress import PREVIEW_CHANNEL, PreviewRelay, Previews, preview_in

TENANT = uuid4()
PICTURE, NEWER = RunPreview(base64="AAAA"), RunPreview(base64="BBBB")


def test_a_picture_is_kept_for_those_who_look_and_only_the_newest() -> None:
    previews, job_id = Previews(), uuid4()
    previews.put(TENANT, job_id, PICTURE)
    assert not previews.is_watched(job_id)
    told: list[str] = []
    with previews.watch(TENANT, job_id, lambda: told.append("a picture")) as watch:
        assert previews.is_watched(job_id)
        assert watch.latest is None, "nobody looked when it came"
        previews.put(TENANT, job_id, PICTURE)
        previews.put(TENANT, job_id, NEWER)
        assert watch.latest is NEWER
    assert len(told) == 2
    assert not previews.is_watched(job_id)
    assert not previews._latest


def test_it_is_looked_at_until_the_last_one_has_gone() -> None:
    previews, job_id = Previews(), uuid4()
    first, second = previews.watch(TENANT, job_id), previews.watch(TENANT, job_id)
    first.close()
    first.close()
    assert previews.is_watched(job_id)
    second.close()
    assert not previews.is_watched(job_id)


def test_the_picture_of_a_job_of_another_tenant_is_never_shown() -> None:
    previews, job_id = Previews(), uuid4()
    watch = previews.watch(uuid4(), job_id)
    previews.put(TENANT, job_id, PICTURE)
    assert watch.latest is None
    assert previews.latest(uuid4(), job_id) is None


def test_pictures_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHARACTERS_MAX", 10)
    previews = Previews()
    watches = [previews.watch(TENANT, uuid4()) for _ in range(5)]
    for each in watches:
        previews.put(TENANT, each.job_id, PICTURE)
    assert [each.latest for each in watches] == [None, None, None, PICTURE, PICTURE]


def test_one_who_is_about_to_look_counts_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    previews, job_id = Previews(), uuid4()
    previews.expect(job_id)
    assert previews.is_watched(job_id)
    now += module.EXPECTED_SECONDS + 1
    assert not previews.is_watched(job_id)
    previews.expect(uuid4())
    assert len(previews._expected) == 1


def relay_of(previews: Previews) -> PreviewRelay:
    async def pool_of(tenant_id: UUID) -> Database:
        raise NotImplementedError

    hints = NotifyChannel(open_database("sqlite:///nowhere.db"), PREVIEW_CHANNEL)
    relay = PreviewRelay(previews, pool_of, hints, "here", utc_now)
    assert previews.relay is None, "on SQLite there is nobody else"
    previews.relay = relay
    return relay


def said(plane: str, **jobs: UUID) -> str:
    return json.dumps({"from": plane, **{name: [job.hex] for name, job in jobs.items()}})


def test_another_control_plane_counts_until_it_leaves_or_says_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    previews, job_id = Previews(), uuid4()
    relay = relay_of(previews)
    relay.heard(said("here", watched=job_id))
    assert not previews.is_watched(job_id), "our own words"
    relay.heard(said("there", watched=job_id))
    relay.heard(said("over there", watched=job_id))
    relay.heard(said("there", left=job_id))
    assert previews.is_watched(job_id), "one of two still looks"
    now += module.WATCH_SECONDS + 1
    assert not previews.is_watched(job_id)
    relay.heard(said("there", watched=uuid4()))
    assert len(previews._elsewhere) == 1


def test_of_pictures_for_other_control_planes_the_newest_waits() -> None:
    previews, job_id = Previews(), uuid4()
    relay = relay_of(previews)
    previews.put(TENANT, job_id, PICTURE)
    assert not relay._to_share, "nobody looks elsewhere"
    relay.heard(said("there", watched=job_id))
    previews.put(TENANT, job_id, PICTURE)
    previews.put(TENANT, job_id, NEWER)
    assert [each.preview for each in relay._to_share.values()] == [NEWER]
    previews.forget(job_id)
    assert not relay._to_share
    assert not previews.is_watched(job_id)


@pytest.mark.parametrize(
    ("url", "content_type"),
    [
        ("data:image/png;base64,AAAA", "image/png"),
        ("data:text/html;base64,AAAA", None),
        ("data:image/svg+xml;base64,AAAA", None),
        ('data:image/png;base64,"><script>', None),
        ("x", None),
    ],
)
def test_a_simple_worker_sends_its_picture_with_the_progress(
    url: str, content_type: str | None
) -> None:
    progress = Progress(percent=1, node="3", preview=url)
    found = preview_in(Heartbeat(dispatch_id=1, lease_token=uuid4(), progress=progress))
    assert (found and found.content_type) == content_type
    assert found is None or (found.node_id, found.data_url) == ("3", url)
