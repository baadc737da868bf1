"""What control planes say to each other about progress, without a database between them."""

import json
from time import monotonic
from uuid import UUID, uuid4

from comfyfleet.api.worker import Progress
from comfyfleet.server.db import open_database
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.jobs.progress import (
    CHANNEL,
    RENEW_SECONDS,
    SUBSCRIPTION_SECONDS,
    ProgressCache,
    ProgressRelay,
)


def plane() -> tuple[ProgressCache, ProgressRelay]:
    progress_cache = ProgressCache()
    nobody = NotifyChannel(open_database("sqlite:///nowhere.db"), CHANNEL)
    return progress_cache, ProgressRelay(progress_cache, nobody, uuid4().hex)


def percent(progress_cache: ProgressCache, token: UUID) -> float | None:
    known = progress_cache.of(token)
    return known.percent if known else None


def test_what_is_followed_elsewhere_is_told_and_nothing_else() -> None:
    ours, here = plane()
    theirs, there = plane()
    followed, alone = uuid4(), uuid4()
    for token in (followed, alone):
        theirs.note(token, Progress(percent=10))
    assert not list(there.messages(monotonic())), "nobody has asked"
    assert percent(ours, followed) is None
    for question in here.messages(monotonic()):
        there.heard(question)
    for answer in there.messages(monotonic()):
        here.heard(answer)
    assert percent(ours, followed) == 10, "also if nothing has changed since"
    theirs.note(followed, Progress(percent=50, preview="data:x"))
    theirs.note(alone, Progress(percent=60))
    [told] = there.messages(monotonic())
    assert "data:x" not in told
    here.heard(told)
    assert percent(ours, followed) == 50
    assert not list(there.messages(monotonic() + SUBSCRIPTION_SECONDS + 1)), "nobody asks any more"


def test_a_question_is_repeated_only_now_and_then_while_it_is_asked() -> None:
    ours, here = plane()
    token = uuid4()
    asked = []
    for second in range(21):
        ours.of(token)
        asked += [json.loads(each)["ask"] for each in here.messages(1000.0 + second)]
    assert asked == [[token.hex]] * 3
    assert not list(here.messages(1000.0 + 30 + RENEW_SECONDS)), "the reader has gone"


def test_what_our_own_worker_says_counts_more_than_what_is_heard() -> None:
    ours, here = plane()
    _, there = plane()
    token = uuid4()
    ours.note(token, Progress(percent=70))
    here.heard(there._message(of=token.hex, progress={"percent": 20}))
    assert percent(ours, token) == 70
    assert not list(here.messages(monotonic())), "and nobody is asked"


def test_our_own_messages_are_not_heard() -> None:
    ours, here = plane()
    token = uuid4()
    ours.of(token)
    for message in here.messages(monotonic()):
        here.heard(message)
    ours.note(token, Progress(percent=5))
    assert not list(here.messages(monotonic()))
