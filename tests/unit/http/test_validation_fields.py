"""A field is called what callers call it, wherever in the request it stands."""

import pytest

from comfyfleet.server.http.errors import describe_validation_error


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
