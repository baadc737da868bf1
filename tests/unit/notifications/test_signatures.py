"""Signed words, and when they are said again."""

import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.api.webhooks import is_signature_valid, sign
from comfyfleet.server.jobs.model import (
    BatchJob,
    summarize_batch,
)
from comfyfleet.server.notifications.model import RETRY_SECONDS, TRIES_MAX, next_attempt_at

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
AT = 1_800_000_000
BODY = b'{"a":1}'


def test_the_signature_can_be_made_by_anyone_with_three_lines() -> None:
    mac = hmac.new(b"s3cret", b"1800000000." + BODY, hashlib.sha256).hexdigest()
    assert sign("s3cret", BODY, timestamp=AT) == f"t=1800000000,v1={mac}"


@given(st.binary(max_size=50), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_what_was_signed_is_recognised(body: bytes, secret: str) -> None:
    header = sign(secret, body, timestamp=AT)
    assert is_signature_valid(secret, body, header, now=AT + 300)
    assert not is_signature_valid(secret, body + b" ", header, now=AT)
    assert not is_signature_valid(secret + "x", body, header, now=AT)
    assert not is_signature_valid(secret, body, header, now=AT + 301)


def test_a_later_time_can_not_be_put_in_its_place() -> None:
    header = sign("s", BODY, timestamp=AT).replace(str(AT), str(AT + 1000))
    assert not is_signature_valid("s", BODY, header, now=AT + 1000)


def test_two_secrets_may_sign_while_one_replaces_the_other() -> None:
    old, new = sign("old", BODY, timestamp=AT), sign("new", BODY, timestamp=AT)
    both = f"{old},{new.partition(',')[2]}"
    assert is_signature_valid("old", BODY, both, now=AT)
    assert is_signature_valid("new", BODY, both, now=AT)


@pytest.mark.parametrize(
    "header", ["", "t=", "t=x,v1=y", "v1=abc", "t=1800000000", "t=٣,v1=ä", ","]
)
def test_a_header_that_is_none_signs_nothing(header: str) -> None:
    assert not is_signature_valid("s", BODY, header, now=AT)


def test_retries_come_later_each_time_and_end() -> None:
    waits = [next_attempt_at(tries, NOW, chance=0) for tries in range(1, TRIES_MAX)]
    assert waits == [NOW + timedelta(seconds=each) for each in RETRY_SECONDS]
    assert next_attempt_at(TRIES_MAX, NOW, chance=0) is None


@given(st.integers(1, TRIES_MAX - 1), st.floats(0, 1))
def test_chance_only_lengthens_the_wait_and_only_a_little(tries: int, chance: float) -> None:
    found = next_attempt_at(tries, NOW, chance=chance)
    assert found is not None
    seconds = (found - NOW).total_seconds()
    assert RETRY_SECONDS[tries - 1] <= seconds <= RETRY_SECONDS[tries - 1] * 1.2 + 0.001


def job(status: str, *, held: bool = False, tokens: int = 2) -> BatchJob:
    return BatchJob(status, held, tokens)


def test_a_batch_comes_to_a_few_figures() -> None:
    jobs = [
        job("completed"),
        job("failed"),
        job("processing"),
        job("queued", held=True),
        job("cancelled", held=True),
    ]
    found = summarize_batch(jobs)
    assert (found.total, found.held, found.ended) == (5, 1, 3)
    assert found.counts == {"completed": 1, "failed": 1, "processing": 1, "cancelled": 1}
    assert (found.reserved_tokens, found.consumed_tokens, found.refunded_tokens) == (4, 2, 4)
    assert found.progress == pytest.approx(0.6)
    assert not found.is_ended
    assert summarize_batch([job("completed")]).is_ended
