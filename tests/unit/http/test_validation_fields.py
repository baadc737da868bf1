"""A field is called what callers call it, wherever in the request it stands."""

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from comfyfleet.server.http.errors import describe_validation_error
from comfyfleet.server.http.request_body import Text


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (("path", "run_id"), "run_id"),
        (("query", "limit"), "limit"),
        (("body", "properties", 0, "name"), "properties.0.name"),
        (("body",), "body"),
    ],
)
def test_a_field_is_named_without_the_part_of_the_request(
    place: tuple[str | int, ...], field: str
) -> None:
    found = describe_validation_error({"loc": place, "type": "uuid_parsing", "msg": ""})
    assert found == {"field": field, "message": "must be an id (a UUID)"}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Text, "", "must have at least 1 character"),
        (str, "", "must have at least 1 character"),
        (Text, "four", "must have at most 3 characters"),
        (list[str], [], "must have at least 1 entry"),
    ],
)
def test_a_length_is_told_in_characters_or_entries(kind: Any, value: Any, message: str) -> None:
    wanted: TypeAdapter[Any] = TypeAdapter(
        Annotated[kind | None, Field(min_length=1, max_length=3)]
    )
    with pytest.raises(ValidationError) as caught:
        wanted.validate_python(value)
    [found] = caught.value.errors()
    told = describe_validation_error({**found, "loc": ("body", "name")})
    assert told == {"field": "name", "message": message}
