"""Which file a client's words lead to: the same with and without a real folder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.engine.file_routes import upload_path
from comfyfleet.protocol.files import (
    FileStamp,
    OutsideFolder,
    disposition_of,
    numbered_name,
    path_inside,
    plan_reply,
    split_annotation,
)

FOLDER = Path("/folder/of/inputs")
PARTS = st.lists(st.sampled_from(["", ".", "..", "a", "b.png", "\\", " "]), max_size=6)
WORDS = st.builds("/".join, PARTS) | st.text(alphabet="./a\\ ", max_size=8)


@given(WORDS, WORDS)
def test_a_path_is_the_one_that_a_real_folder_would_give(subfolder: str, name: str) -> None:
    try:
        expected = upload_path(FOLDER, subfolder, name).relative_to(FOLDER).as_posix()
    except OutsideFolder:
        with pytest.raises(OutsideFolder):
            path_inside(subfolder, name)
        return
    assert path_inside(subfolder, name) == ("" if expected == "." else expected)


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("a.png", 0, "a.png"),
        ("a.png", 1, "a (1).png"),
        ("a.tar.gz", 2, "a.tar (2).gz"),
        ("noext", 1, "noext (1)"),
        (".hidden", 1, ".hidden (1)"),
        ("sub.d/noext", 3, "sub.d/noext (3)"),
    ],
)
def test_a_number_goes_before_the_ending(name: str, number: int, expected: str) -> None:
    assert numbered_name(name, number) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.png", ("a.png", "input")),
        ("a.png [output]", ("a.png", "output")),
        ("sub/a.png [temp]", ("sub/a.png", "temp")),
        ("a [nope]", ("a [nope]", "input")),
        ("[input]", ("", "input")),
    ],
)
def test_a_name_may_tell_its_folder(name: str, expected: tuple[str, str]) -> None:
    assert split_annotation(name, "input") == expected


def test_a_name_in_a_header_can_not_end_it() -> None:
    assert disposition_of('a"b\\.png') == 'filename="a\\"b\\\\.png"'
    assert disposition_of("\ud800.png") == 'filename="?.png"'


STAMP = FileStamp(10, 1_700_000_000_123_456_789)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"if-match": "*"}, 200),
        ({"if-match": '"other"'}, 412),
        ({"if-unmodified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}, 412),
        ({"if-none-match": STAMP.etag}, 304),
        ({"if-none-match": '"other"', "if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 200),
        ({"if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 304),
        ({"if-modified-since": "nonsense"}, 200),
        ({"range": "bytes=0-3"}, 206),
        ({"range": "bytes=0-3", "if-range": "Thu, 01 Jan 1970 00:00:00 GMT"}, 200),
        ({"range": "bytes=10-"}, 416),
    ],
)
def test_preconditions_come_before_ranges(headers: dict[str, str], status: int) -> None:
    assert plan_reply(headers, STAMP).status == status
