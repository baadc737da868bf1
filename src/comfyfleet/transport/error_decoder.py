"""Converts errors of the control plane's API, `{"error": {"code", "message", "details"}}`, to our
error classes."""

from typing import Any, NamedTuple

import httpx

from comfyfleet import errors
from comfyfleet.errors import FleetError, InsufficientTokens, UnexpectedAnswer

BEGINNING_CHARACTERS = 200
ERROR_CLASSES: dict[str, type[FleetError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FleetError)
}


class ApiError(FleetError):
    """An error with a code that this version doesn't know. `details["code"]` is the API's code."""


class ErrorFields(NamedTuple):
    code: str
    message: str
    details: dict[str, Any]


def error_fields(response: httpx.Response) -> ErrorFields | None:
    """Parses an error body. Returns None if it isn't the API's, for example because it comes from a
    proxy."""
    try:
        body = response.json()
    except ValueError:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return None
    return ErrorFields(
        str(error.get("code") or ""), str(error["message"]), _details(error.get("details"))
    )


def error_from_response(response: httpx.Response) -> FleetError:
    """Builds an error from the API's response. Its `details` also contain the `status`."""
    error = error_fields(response)
    if error is None:
        return UnexpectedAnswer(
            f"{response.url.host} isn't a control plane. It returned {response.status_code} with "
            f"{response.text[:BEGINNING_CHARACTERS]!r}",
            status=response.status_code,
        )
    details = {**error.details, "status": response.status_code}
    kind = ERROR_CLASSES.get(error.code)
    if kind is InsufficientTokens:
        return _insufficient(error.message, details)
    if kind is None:
        return ApiError(error.message, **{"code": error.code, **details})
    return kind(error.message, **details)


def _insufficient(message: str, details: dict[str, Any]) -> FleetError:
    required, balance = details.get("required_tokens"), details.get("balance")
    if isinstance(required, int) and isinstance(balance, int):
        return InsufficientTokens(required_tokens=required, balance=balance)
    return errors.Refused(message, **details)


def _details(value: object) -> dict[str, Any]:
    # Remove names that are parameters of the constructor, because they can't be passed twice.
    named = value if isinstance(value, dict) else {}
    return {str(name): item for name, item in named.items() if name not in ("message", "self")}
