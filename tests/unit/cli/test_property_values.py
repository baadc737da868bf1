"""Values of properties as people write them."""

from typing import Any

import pytest

from comfyfleet.cli.admin.catalog import parse_property
from comfyfleet.cli.upload import parse_values
from comfyfleet.errors import InvalidInput

PROPERTIES = [
    {"name": kind, "type": kind}
    for kind in ("text", "number", "integer", "boolean", "choice", "seed", "image")
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("text=7", "7"),
        ("text=a=b", "a=b"),
        ("text=", ""),
        ("number=0.5", 0.5),
        ("integer=-3", -3),
        ("seed=18446744073709551615", 2**64 - 1),
        ("boolean=Yes", True),
        ("boolean=off", False),
        ("choice=euler", "euler"),
    ],
)
def test_a_value_is_read_by_its_propertys_type(text: str, value: Any) -> None:
    read = parse_values([text], PROPERTIES, "cat")
    assert list(read.values()) == [value]
    assert type(next(iter(read.values()))) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("number=true", "must be a number"),
        ("integer=", "must be a number"),
        ("seed=[1]", "must be a number"),
        ("boolean=maybe", "true or false"),
        ("image=cat.png", "--file image=PATH"),
        ("colour=red", "no property"),
        ("=red", "is invalid"),
    ],
)
def test_a_value_that_does_not_fit_is_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        parse_values([text], PROPERTIES, "cat")


def test_a_property_is_written_with_its_type_and_place() -> None:
    found = parse_property("prompt:text=6:12.text")
    assert found == {"name": "prompt", "type": "text", "binding": "6:12.text"}
