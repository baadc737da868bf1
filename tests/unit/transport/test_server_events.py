"""Server-sent events are read by bytes: nothing inside of their data ends a line."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.errors import LimitExceeded
from comfyfleet.transport import sse
from comfyfleet.transport.sse import EventParser, ServerEvent


def parsed(*pieces: bytes) -> list[ServerEvent]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_events_are_read_with_comments_and_many_lines() -> None:
    text = b": beat\n\nevent: status\ndata: {\ndata:}\n\ndata: x\n\ndata: cut"
    assert parsed(text) == [ServerEvent("", "status", "{\n}"), ServerEvent("", "message", "x")]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_data_is_not_cut_where_only_python_ends_a_line(character: str) -> None:
    text = f"data: one{character}two\n\n".encode()
    assert parsed(text) == [ServerEvent("", "message", f"one{character}two")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_as_the_standard_says(end: bytes) -> None:
    assert parsed(end.join([b"id: 7", b"data: a", b"data: b", b"", b""])) == [
        ServerEvent("7", "message", "a\nb")
    ]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))), st.data())
def test_how_the_bytes_are_cut_does_not_matter(texts: list[str], data: st.DataObject) -> None:
    whole = b"".join(f"data: {text}\r\n\r\n".encode() for text in texts)
    places = st.lists(st.integers(0, len(whole)), max_size=8).map(sorted)
    cuts = [0, *data.draw(places), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(cuts)]
    assert [event.data for event in parsed(*pieces)] == texts


def test_an_id_stays_until_another_comes() -> None:
    parser = EventParser("3")
    events = list(parser.feed(b"data: a\n\nid: 9\ndata: b\n\ndata: c\n\n: beat\n"))
    assert [event.id for event in events] == ["3", "9", "9"]
    assert (parser.last_id, parser.comments) == ("9", 1)


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    with pytest.raises(LimitExceeded):
        parsed(b"data: " + b"x" * 60, b"x" * 60)
    many = b"data: " + b"x" * 60 + b"\n\n"
    assert len(parsed(many, many, many)) == 3
