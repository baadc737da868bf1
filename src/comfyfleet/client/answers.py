"""Answers that are none of success, as the error that the control plane raised, here again."""

from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from comfyfleet.kernel import errors
from comfyfleet.kernel.errors import FleetError, InsufficientTokens, UnexpectedAnswer
from comfyfleet.wire.files import Message

Answer = TypeVar("Answer", bound=Message)
BEGINNING_CHARACTERS = 200
KINDS: dict[str, type[FleetError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FleetError)
}


class ApiError(FleetError):
    """An error that this version has no name for; `details["code"]` is what the API calls it."""


def error_of(response: httpx.Response) -> FleetError:
    """`details` are the API's own, and `status`."""
    said = _said(response)
    if said is None:
        return UnexpectedAnswer(
            f"{response.url.host} is no control plane: it answered {response.status_code} with "
            f"{response.text[:BEGINNING_CHARACTERS]!r}",
            status=response.status_code,
        )
    code, message = str(said.get("code") or ""), str(said["message"])
    details = {**_mapping(said.get("details")), "status": response.status_code}
    kind = KINDS.get(code)
    if kind is InsufficientTokens:
        return _insufficient(message, details)
    return kind(message, **details) if kind else ApiError(message, **{"code": code, **details})


def _insufficient(message: str, details: dict[str, Any]) -> FleetError:
    wanted, balance = details.get("required_tokens"), details.get("balance")
    if isinstance(wanted, int) and isinstance(balance, int):
        return InsufficientTokens(required_tokens=wanted, balance=balance)
    return errors.Refused(message, **details)


def _said(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
    except ValueError:
        return None
    said = body.get("error") if isinstance(body, dict) else None
    return said if isinstance(said, dict) and "message" in said else None


def _mapping(value: object) -> dict[str, Any]:
    # Names that a constructor of ours has for itself can't be given twice.
    named = value if isinstance(value, dict) else {}
    return {str(name): each for name, each in named.items() if name not in ("message", "self")}


def parsed(kind: type[Answer], response: httpx.Response) -> Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise UnexpectedAnswer(
            f"{response.url.path} was answered in a shape that this client doesn't know: {error}",
            received=response.text[:BEGINNING_CHARACTERS],
        ) from error
