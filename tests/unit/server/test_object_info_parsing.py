"""Object_infos of any size and shape: the same values as those of the standard library, within limits."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.errors import InvalidInput
from comfyfleet.server.fleets import object_info_parser
from comfyfleet.server.fleets.object_info_parser import (
    DEPTH_MAX,
    ESCAPES_MAX,
    NODE_VALUES_MAX,
    TEXT_BYTES_MAX,
    VALUES_MAX,
    WHOLE_CHARACTERS,
    parse_object_info,
)

NAMES = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {"input": st.dictionaries(NAMES, VALUES, max_size=3)}, optional={"x": VALUES}
)


@given(st.dictionaries(NAMES, ENTRIES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_it_reads_what_the_standard_library_reads(
    info: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(info, indent=indent, ensure_ascii=ascii_only)
    data = text.encode(errors="surrogatepass")
    try:
        expected = json.loads(data)
    except ValueError:
        return
    assert parse_object_info(data) == expected


def test_node_types_of_any_length_are_read() -> None:
    info = {
        f"N{length}": {"input": {"a": ["x" * 10] * (length // 13)}}
        for length in (10, 8_000, 9_000, 64_000, 70_000, 500_000)
    }
    assert parse_object_info(json.dumps(info).encode()) == info


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "5", '{"a"}', '{"a":}', '{"a":{}', '{"a":{},}', '{"a":{}} x', "{,}", '{"a" {}}',
        '{"a": 5}', '{"a": {"input": 5}}', '{"a": {"input": []}}', '{"a": [}', '{5: {}}', '{"a": tru}',
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_object_info(text.encode())


def nested(depth: int) -> bytes:
    return b'{"a":' + b'{"b":' * depth + b"1" + b"}" * depth + b"}"


def wide(values: int, nodes: int) -> bytes:
    """A document that counts as exactly so many values: its own bracket, and those of its node types."""
    each, rest = divmod(values - nodes, nodes)
    sizes = [each + (1 if number < rest else 0) for number in range(nodes)]
    # A node type of n zeros counts its two brackets and the commas between the zeros.
    entries = [
        b'"n%d":{"a":[%b]}' % (number, b",".join([b"0"] * (size - 1)))
        for number, size in enumerate(sizes)
    ]
    return b"{" + b",".join(entries) + b"}"


LIMITS = [
    (wide, VALUES_MAX, 100, "1,000,000 values"),
    (wide, NODE_VALUES_MAX + 1, 1, "200,000 values"),
]


@pytest.mark.parametrize(("make", "most", "nodes", "says"), LIMITS)
def test_as_many_values_as_allowed_are_read_and_one_more_is_refused(
    make: Any, most: int, nodes: int, says: str
) -> None:
    assert len(parse_object_info(make(most, nodes))) == nodes
    with pytest.raises(InvalidInput, match=says):
        parse_object_info(make(most + 1, nodes))


def test_as_deep_as_allowed_is_read_and_deeper_is_refused() -> None:
    assert parse_object_info(nested(DEPTH_MAX))
    for depth in (DEPTH_MAX + 1, 100_000):
        with pytest.raises(InvalidInput, match="100 levels"):
            parse_object_info(nested(depth))


def test_a_text_as_long_as_allowed_is_read_and_a_longer_one_is_refused() -> None:
    assert parse_object_info(b'{"n":{"a":"' + b"x" * (TEXT_BYTES_MAX - 1) + b'"}}')
    for data in (
        b'{"n":{"a":"' + b"x" * (TEXT_BYTES_MAX + 1) + b'"}}',
        b'{"n":{"a":1}}' + b" " * (TEXT_BYTES_MAX + 10),
        b'{"' + b"x" * (TEXT_BYTES_MAX + 1) + b'":{}}',
    ):
        with pytest.raises(InvalidInput, match="1,048,576 bytes"):
            parse_object_info(data)


def test_as_many_escapes_as_allowed_are_read_and_one_more_is_refused() -> None:
    def escapes(count: int) -> bytes:
        return b'{"n":{"a":"' + b'\\"' * count + b'"}}'

    assert parse_object_info(escapes(ESCAPES_MAX))
    with pytest.raises(InvalidInput, match="200,000 escape sequences"):
        parse_object_info(escapes(ESCAPES_MAX + 1))


def test_no_call_of_the_parser_in_c_reads_a_whole_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the interpreter lock until it has read all that it was given."""
    data, sizes = wide(VALUES_MAX, 100), list[int]()
    expected = json.loads(data)
    decode = object_info_parser._fast.raw_decode

    def noted(text: str) -> Any:
        sizes.append(len(text))
        return decode(text)

    def never(*_: object) -> Any:
        raise AssertionError("it was read by one call")

    monkeypatch.setattr(object_info_parser._fast, "raw_decode", noted)
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", never)
        found = parse_object_info(data)
    assert found == expected
    assert 0 < max(sizes) <= WHOLE_CHARACTERS[-1]


def test_limits_are_checked_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(text: str) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(object_info_parser, "_entries", never)
    with pytest.raises(InvalidInput, match="values"):
        parse_object_info(wide(VALUES_MAX + 1, 100))
