"""Moments of schedules: in their time zone, through changes of its clocks; and what is missed."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.api.graphs import FiringCause, TriggerKind
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded, LimitSpent
from comfyfleet.server.graphs.store import StoredTrigger
from comfyfleet.server.trigger_inputs import check_paths, map_inputs
from comfyfleet.server.triggers import (
    FIRINGS_PER_DAY_MAX,
    MOMENTS_COUNTED_MAX,
    DayUse,
    RunCost,
    check_schedule,
    due_moments,
    grant,
    moments_after,
)

BERLIN = "Europe/Berlin"
YEAR = datetime(2025, 1, 1, tzinfo=UTC)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def first(count: int, cron: str, timezone: str, after: str) -> list[str]:
    found = islice(moments_after(cron, timezone, at(after)), count)
    return [each.strftime("%m-%d %H:%M") for each in found]


def trigger(cron: str = "0 * * * *", timezone: str = "UTC", **fields: Any) -> StoredTrigger:
    given = {"next_at": at("2026-11-16T12:00"), "tokens_per_day": 100, **fields}
    ids = UUID(int=1), UUID(int=2), UUID(int=3)
    return StoredTrigger(
        *ids, "t", TriggerKind.SCHEDULE, {}, timezone, created_at=at("2026-11-01"), cron=cron, **given
    )  # fmt: skip


def test_a_moment_is_one_of_its_time_zone() -> None:
    assert first(2, "30 7 * * MON-FRI", BERLIN, "2026-11-13T12:00") == [
        "11-16 06:30",
        "11-17 06:30",
    ]
    assert first(1, "30 7 * * *", "America/New_York", "2026-11-13T12:00") == ["11-13 12:30"]


def test_what_is_in_the_hour_that_spring_leaves_out_comes_once_after_it() -> None:
    # On 29 March 2026 the clocks go from 02:00 to 03:00, which is 01:00 UTC.
    assert first(3, "30 2 * * *", BERLIN, "2026-03-28T00:00") == [
        "03-28 01:30", "03-29 01:00", "03-30 00:30",
    ]  # fmt: skip
    assert first(3, "0,30 2,3 * * *", BERLIN, "2026-03-29T00:00") == [
        "03-29 01:00", "03-29 01:30", "03-30 00:00",
    ]  # fmt: skip


def test_what_is_in_the_hour_that_autumn_repeats_comes_once() -> None:
    # On 25 October 2026 the clocks go from 03:00 back to 02:00, which is 01:00 UTC.
    assert first(3, "30 2 * * *", BERLIN, "2026-10-24T12:00") == [
        "10-25 00:30", "10-26 01:30", "10-27 01:30",
    ]  # fmt: skip
    # Seen from the second of the two hours, it has been.
    assert first(1, "30 2 * * *", BERLIN, "2026-10-25T01:10") == ["10-26 01:30"]


def test_what_comes_every_hour_goes_on_through_both_changes() -> None:
    for day in ("2026-03-28T20:00", "2026-10-24T20:00"):
        found = list(islice(moments_after("*/30 * * * *", BERLIN, at(day)), 40))
        assert {after - before for before, after in pairwise(found)} == {timedelta(minutes=30)}


@given(
    st.sampled_from(["30 2 * * *", "*/7 * * * *", "0 1-3 * * *", "15 */2 * * SUN", "59 23 28 * *"]),
    st.sampled_from([BERLIN, "UTC", "Australia/Lord_Howe", "America/New_York", "Asia/Kathmandu"]),
    st.integers(0, 3 * 365 * 24 * 60).map(lambda minutes: YEAR + timedelta(minutes=minutes)),
)
def test_moments_are_in_order_and_after_what_was_asked_for(
    cron: str, timezone: str, after: datetime
) -> None:
    found = [after, *islice(moments_after(cron, timezone, after), 30)]
    assert all(one < other for one, other in pairwise(found))


@pytest.mark.parametrize(
    "cron",
    [
        "", "* * * *", "* * * * * *", "60 * * * *", "* * * * 9", "x" * 101, "* * * * 1L/2", "@daily",
        "0 0 30 2 *", "0 0 31 2,4 *", "*/0 * * * *", "5-1 * * * *", "* * * * MON#9", "é * * * *",
        "99999999999999999999 * * * *", "0 0 * 2 WED#5,WED#6",
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(cron: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_schedule(cron, "UTC", at("2026-11-16T12:00"))
    assert refused.value.details["field"] == "cron"


@pytest.mark.parametrize(
    "name", ["", "Mars/Base", "../etc/passwd", "/etc/localtime", "America", "a\0"]
)
def test_what_is_no_time_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_schedule("0 0 * * *", name, at("2026-11-16T12:00"))
    assert refused.value.details["field"] == "timezone"


def test_a_moment_is_fired_when_it_has_come_or_shortly_after() -> None:
    for seconds in (0, 59):
        now = at("2026-11-16T12:00") + timedelta(seconds=seconds)
        found = due_moments(trigger(), now)
        assert found.fire_at == at("2026-11-16T12:00")
        assert (found.cause, found.missed) == (FiringCause.SCHEDULE, 0)
        assert found.next_at == at("2026-11-16T13:00")


@pytest.mark.parametrize("catch_up", [False, True])
def test_a_late_one_is_missed_and_the_newest_is_caught_up_if_wanted(catch_up: bool) -> None:
    found = due_moments(trigger(catch_up=catch_up), at("2026-11-16T15:30"))
    assert (found.missed, found.missed_at) == (4, at("2026-11-16T15:00"))
    assert found.fire_at == (at("2026-11-16T15:00") if catch_up else None)
    assert found.next_at == at("2026-11-16T16:00")
    if catch_up:
        assert found.cause == FiringCause.CATCH_UP


def test_those_before_one_that_is_in_time_are_missed() -> None:
    found = due_moments(trigger(), at("2026-11-16T15:00"))
    assert (found.missed, found.missed_at) == (3, at("2026-11-16T14:00"))
    assert (found.fire_at, found.cause) == (at("2026-11-16T15:00"), FiringCause.SCHEDULE)


def test_years_of_missed_minutes_are_not_counted_one_by_one() -> None:
    found = due_moments(trigger("* * * * *", catch_up=True), at("2029-11-16T15:00"))
    assert MOMENTS_COUNTED_MAX <= found.missed <= MOMENTS_COUNTED_MAX + 3
    assert found.fire_at == at("2029-11-16T15:00")
    assert found.next_at == at("2029-11-16T15:01")


def granted(cost: RunCost, used: int = 0, **fields: Any) -> int | FleetError:
    return grant(trigger(**fields), cost, DayUse(tokens=used), "2026-11-16")


def test_a_run_gets_what_is_left_but_no_more_than_it_can_use() -> None:
    assert granted(RunCost(3, 12)) == 12
    assert granted(RunCost(3, 12), used=95) == 5
    assert granted(RunCost(0, None), used=95) == 5
    assert granted(RunCost(3, 12), max_tokens=7) == 7
    assert granted(RunCost(0, 0), used=100) == 0  # what costs nothing needs nothing


def test_a_spent_day_and_a_refusal_start_nothing() -> None:
    for cost, used in ((RunCost(3, 12), 98), (RunCost(0, None), 100), (RunCost(0, 5), 120)):
        assert isinstance(granted(cost, used), LimitSpent)
    assert isinstance(granted(RunCost(refusal=InvalidInput("no"))), InvalidInput)
    often = DayUse(started=FIRINGS_PER_DAY_MAX)
    assert isinstance(grant(trigger(), RunCost(0, 0), often, "2026-11-16"), LimitSpent)


BODY = {"photo": "u", "order": {"rows": [{"width": 3}, {"width": 4}], "n": None}}


def test_inputs_are_made_from_a_body() -> None:
    wanted = {
        "a": "body.photo", "b": "body.order.rows.1.width", "c": 7, "d": "bodywork", "e": "body.order.n",
        "f": "body.none?", "g": "body", "h": "body.photo?",
    }  # fmt: skip
    check_paths(wanted)
    assert map_inputs(wanted, BODY) == {
        "a": "u", "b": 4, "c": 7, "d": "bodywork", "e": None, "g": BODY, "h": "u",
    }  # fmt: skip


def test_a_template_is_no_path() -> None:
    """It would be a fixed text, which an input for texts takes."""
    with pytest.raises(InvalidInput, match="write a plain path"):
        check_paths({"name": "{{ body.photo }}"})


@pytest.mark.parametrize(
    "path", ["body.x", "body.order.rows.2", "body.order.rows.-1", "body.photo.0"]
)
@pytest.mark.parametrize("body", [BODY, None, [], "body", 3])
def test_a_path_that_is_not_there_is_named(path: str, body: Any) -> None:
    with pytest.raises(InvalidInput, match=path):
        map_inputs({"a": path}, body)


@pytest.mark.parametrize(
    "path", ["body.", "body..a", "body.a.", "body" + ".a" * 20, "body." + "a" * 200]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput):
        check_paths({"a": path})


def test_a_body_that_many_inputs_name_does_not_grow_without_end() -> None:
    with pytest.raises(LimitExceeded):
        map_inputs({str(number): "body" for number in range(100)}, "x" * 60_000)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), st.text())  # fmt: skip
def test_any_body_gives_inputs_or_a_refusal(body: Any, path: str) -> None:
    with suppress(InvalidInput):
        assert map_inputs({"a": f"body.{path}"}, body).keys() <= {"a"}
