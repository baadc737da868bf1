"""What the metadata service says, read without ever failing."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.worker.aws import (
    ENDPOINT,
    ENDPOINT_V6,
    SpotNotice,
    metadata_endpoint,
    parse_action,
    parse_rebalance,
)

EIGHT_22 = datetime(2026, 9, 18, 8, 22, tzinfo=UTC)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate", "a-new-one"])
def test_whatever_the_action_the_machine_goes(action: str) -> None:
    text = f'{{"action": "{action}", "time": "2026-09-18T08:22:00Z"}}'
    assert parse_action(text) == SpotNotice("spot", EIGHT_22)


def test_a_time_that_cannot_be_read_is_no_reason_to_miss_the_notice() -> None:
    assert parse_action('{"action": "terminate", "time": "soon"}') == SpotNotice("spot", None)
    assert parse_action('{"action": "terminate"}') == SpotNotice("spot", None)
    late = '{"action": "terminate", "time": "9999-12-31T23:59:59-23:59"}'
    assert parse_action(late) == SpotNotice("spot", None)


def test_a_time_without_zone_is_utc_and_another_zone_becomes_utc() -> None:
    assert parse_action('{"action": "stop", "time": "2026-09-18T08:22:00"}') == SpotNotice(
        "spot", EIGHT_22
    )
    assert parse_action('{"action": "stop", "time": "2026-09-18T10:22:00+02:00"}') == SpotNotice(
        "spot", EIGHT_22
    )


def test_rebalance_advice_has_no_deadline() -> None:
    assert parse_rebalance('{"noticeTime": "2026-09-18T08:22:00Z"}') == SpotNotice(
        "rebalance", None
    )


@pytest.mark.parametrize(
    "text", ["", "<html>", "[]", "null", "{}", "7", '{"action": 7}', "[" * 9000]
)
def test_what_is_no_notice_is_none(text: str) -> None:
    assert parse_action(text) is None
    assert parse_rebalance(text) is None


@given(st.text() | st.binary().map(lambda raw: raw.decode(errors="replace")))
def test_no_text_makes_it_fail(text: str) -> None:
    parse_action(text)
    parse_rebalance(text)
    parse_action(f'{{"action": "stop", "time": "{text}"}}')


def test_the_service_is_found_by_the_variables_that_aws_itself_reads() -> None:
    assert metadata_endpoint({}) == ENDPOINT
    assert (
        metadata_endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://[::1]:99/"})
        == "http://[::1]:99"
    )
    assert metadata_endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}) == ENDPOINT_V6
    assert metadata_endpoint({"AWS_EC2_METADATA_DISABLED": "true"}) is None
