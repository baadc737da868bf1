"""How long is waited before a call is made again."""

import pytest

from comfyfleet.transport.retry import BACKOFF_SECONDS_MAX, backoff_seconds, retry_after_seconds

AT = "Wed, 21 Oct 2026 07:28:{} GMT"


def test_pauses_double_up_to_a_maximum_and_are_spread_by_chance() -> None:
    assert [backoff_seconds(attempt, 1.0) for attempt in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert backoff_seconds(1, 0.0) == 0.125
    assert backoff_seconds(100, 1.0) == BACKOFF_SECONDS_MAX


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": AT.format("09"), "date": AT.format("00")}, 9.0),
        ({"retry-after": AT.format("00"), "date": AT.format("09")}, 0.0),
        ({"retry-after": AT.format("09")}, None),
        ({"retry-after": "9" * 10}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": f"1 Feb {10**20} 00:00:00 GMT", "date": AT.format("00")}, None),
        ({"retry-after": "soon", "date": AT.format("00")}, None),
        ({}, None),
    ],
)
def test_a_server_says_when_to_come_again_in_seconds_or_as_a_date(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after_seconds(headers) == seconds
