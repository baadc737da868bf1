"""What is wrong with a request, field by field, in words that know nothing of Python."""

from collections.abc import Mapping
from typing import Any

_LIST, _OBJECT = "must be a list", "must be an object"
_WHOLE, _NUMBER = "must be a whole number", "must be a number"
_TRUTH, _ID = "must be true or false", "must be an id (a UUID)"
_TIME = "must be a time, such as 2026-01-31T12:00:00Z"
# By the validator's own name of the mistake; what stands in braces is what it tells of it.
_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "iterable_type": _LIST,
    "dict_type": _OBJECT,
    "mapping_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "dataclass_type": _OBJECT,
    "string_type": "must be a text",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "is too large a number",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "uuid_type": _ID,
    "uuid_parsing": _ID,
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_from_date_parsing": _TIME,
    "timezone_aware": "must be a time with its zone, such as 2026-01-31T12:00:00Z",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "does not have the form {pattern}",
    "json_invalid": "the body is no JSON: {error}",
}
_OF_OURS = "Value error, "


def problem_of(error: Mapping[str, Any]) -> dict[str, str]:
    """Names the field, and never repeats what was sent: it may have been a key."""
    return {"field": _field(error["loc"]), "message": _said(error)}


def _said(error: Mapping[str, Any]) -> str:
    words = _WORDS.get(error["type"])
    if words is None:
        said = str(error["msg"]).removeprefix(_OF_OURS)
        return said.replace("Input should be", "must be")
    return words.format_map(error.get("ctx") or {})


def _field(place: tuple[Any, ...]) -> str:
    """`("body", "properties", 0, "name")` is `properties.0.name`: where it stands is told only if that
    is all there is."""
    where, *inside = place
    is_named = inside and where in ("body", "path", "query")
    return ".".join(map(str, inside if is_named else place))
