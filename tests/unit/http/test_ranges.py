"""Which bytes go out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.server.http.objects import requested_range
from comfyfleet.transport.ranges import ByteRange, select_range

ETAG = '"1-2"'


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-0", ByteRange(206, 0, 1)),
        ("bytes=3-5", ByteRange(206, 3, 3)),
        ("bytes=3-", ByteRange(206, 3, 7)),
        ("bytes=-4", ByteRange(206, 6, 4)),
        ("bytes=-40", ByteRange(206, 0, 10)),
        ("bytes=9-100", ByteRange(206, 9, 1)),
        ("bytes=10-", ByteRange(416)),
        ("bytes=-0", ByteRange(416)),
        ("bytes=5-3", ByteRange(200, 0, 10)),
        ("bytes=-", ByteRange(200, 0, 10)),
        ("bytes=0-1,4-5", ByteRange(200, 0, 10)),
        ("lines=0-1", ByteRange(200, 0, 10)),
    ],
)
def test_a_range_of_ten_bytes(asked: str, part: ByteRange) -> None:
    assert requested_range({"range": asked}, size=10, etag=ETAG) == part


@pytest.mark.parametrize("asked", ["bytes=5-3", "bytes=-", "bytes=0-1,4-5", "lines=0-1"])
def test_a_strict_server_refuses_what_is_no_range(asked: str) -> None:
    assert select_range(asked, 10, is_strict=True) == ByteRange(416)


def test_nothing_is_a_part_of_an_empty_object() -> None:
    assert requested_range({"range": "bytes=0-"}, size=0, etag=ETAG) == ByteRange(416)
    assert requested_range({}, size=0, etag=ETAG) == ByteRange(200, 0, 0)


def test_conditions_are_looked_at_first() -> None:
    assert requested_range({"if-none-match": f'"0", W/{ETAG}'}, size=10, etag=ETAG) == ByteRange(
        304
    )
    assert requested_range({"if-none-match": "*"}, size=10, etag=ETAG) == ByteRange(304)
    stale = {"range": "bytes=3-5", "if-range": '"0"'}
    assert requested_range(stale, size=10, etag=ETAG) == ByteRange(200, 0, 10)


@given(st.from_regex(r"bytes=[0-9]{0,4}-[0-9]{0,4}", fullmatch=True), st.integers(0, 2000))
def test_a_part_lies_inside_the_object(asked: str, size: int) -> None:
    part = requested_range({"range": asked}, size=size, etag=ETAG)
    assert 0 <= part.start <= part.start + part.length <= size
    assert part.status != 206 or part.length > 0
