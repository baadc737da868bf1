"""Decodes the errors of the control plane's API, `{"error": {"code", "message", "details"}}`, into our error classes."""

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
    """An error code unknown to this version; `details["code"]` is the API's code."""


class ErrorFields(NamedTuple):
    code: str
    message: str
    details: dict[str, Any]


def error_fields(response: httpx.Response) -> ErrorFields | None:
    """Parses an error body; None if it is not the API's, for example from a proxy."""
    try:
        body = response.json()
    except ValueError:
        return None
    said = body.get("error") if isinstance(body, dict) else None
    if not isinstance(said, dict) or "message" not in said:
        return None
    return ErrorFields(
        str(said.get("code") or ""), str(said["message"]), _details(said.get("details"))
    )


def error_from_response(response: httpx.Response) -> FleetError:
    """Builds the error that the API raised. `details` are the API's own, plus `status`."""
    said = error_fields(response)
    if said is None:
        return UnexpectedAnswer(
            f"{response.url.host} is no control plane: it answered {response.status_code} with "
            f"{response.text[:BEGINNING_CHARACTERS]!r}",
            status=response.status_code,
        )
    details = {**said.details, "status": response.status_code}
    kind = ERROR_CLASSES.get(said.code)
    if kind is InsufficientTokens:
        return _insufficient(said.message, details)
    if kind is None:
        return ApiError(said.message, **{"code": said.code, **details})
    return kind(said.message, **details)


def _insufficient(message: str, details: dict[str, Any]) -> FleetError:
    wanted, balance = details.get("required_tokens"), details.get("balance")
    if isinstance(wanted, int) and isinstance(balance, int):
        return InsufficientTokens(required_tokens=wanted, balance=balance)
    return errors.Refused(message, **details)


def _details(value: object) -> dict[str, Any]:
    # Names that a constructor of ours has for itself can't be given twice.
    named = value if isinstance(value, dict) else {}
    return {str(name): each for name, each in named.items() if name not in ("message", "self")}
