"""Converts errors to HTTP responses of the form `{"error": {"code", "message", "details"}}`.

The details of a validation error list the invalid fields.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from comfyfleet import errors
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.http.route_hints import KnownRoute, hint_for

_LIST, _OBJECT = "must be a list", "must be an object"
_WHOLE, _NUMBER = "must be a whole number", "must be a number"
_TRUTH, _ID = "must be true or false", "must be an id (a UUID)"
_TIME = "must be a time, such as 2026-01-31T12:00:00Z"
# Messages by the validator's error type. Names in braces refer to fields of the error's context.
_MESSAGES: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
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
    "string_type": "must be a string",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "is too large",
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
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "json_invalid": "must be valid JSON: {error}",
}
_VALUE_ERROR_PREFIX = "Value error, "


def describe_validation_error(error: Mapping[str, Any]) -> dict[str, str]:
    """Returns the invalid field and a message, but never the value, because it may be a key."""
    # For invalid JSON, the location is an offset in the body and not a field.
    field = "body" if error["type"] == "json_invalid" else _field(error["loc"])
    return {"field": field, "message": _message(error)}


def _message(error: Mapping[str, Any]) -> str:
    # If one of our own validators ran first, pydantic reports the same error type for the length of
    # a string as for the length of a list.
    is_text = isinstance(error.get("input"), str) and error["type"] in ("too_long", "too_short")
    words = _MESSAGES.get(f"string_{error['type']}" if is_text else error["type"])
    if words is None:
        message = str(error["msg"]).removeprefix(_VALUE_ERROR_PREFIX)
        return message.replace("Input should be", "must be")
    message = words.format_map(error.get("ctx") or {})
    return message.replace(" 1 characters", " 1 character").replace(" 1 entries", " 1 entry")


def _field(place: tuple[Any, ...]) -> str:
    """Joins a location into a field name, such as `properties.0.name` for
    `("body", "properties", 0, "name")`."""
    where, *inside = place
    is_named = inside and where in ("body", "path", "query")
    return ".".join(map(str, inside if is_named else place))


logger = logging.getLogger(__name__)
ADMIN_PREFIX = "/api/admin/"
# Default values of the Retry-After header, in seconds, for an outage, a full queue and a full
# store.
UNAVAILABLE_RETRY_SECONDS = 5
QUEUE_FULL_RETRY_SECONDS = 30
FULL_RETRY_SECONDS = 60
PROBLEMS_SHOWN_MAX = 20
# The key in the details of QueueFull and Unavailable that holds the seconds until a retry.
RETRY_AFTER = "retry_after_seconds"

STATUS_OF: Mapping[type[errors.FleetError], int] = {
    errors.InvalidInput: 422,
    errors.UnknownNodeTypes: 422,
    errors.PromptRefused: 422,
    errors.Refused: 422,
    errors.LimitExceeded: 413,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.FileGone: 404,
    errors.Conflict: 409,
    errors.QueueFull: 429,
    errors.Unavailable: 503,
    errors.StoreFull: 507,
    # The error was caused by an upstream server and not by the request.
    errors.ServerUnavailable: 502,
    errors.AccessDenied: 502,
    errors.UnexpectedAnswer: 502,
    errors.OutcomeUnknown: 504,
}
# The types of errors that our exception handlers convert to responses.
HANDLED_ERRORS = (errors.FleetError, RequestValidationError, HTTPException)
_CODES = {
    400: "invalid_input",
    401: errors.Unauthenticated.code,
    403: errors.Forbidden.code,
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "limit_exceeded",
    422: "invalid_input",
    429: errors.TooManyCalls.code,
    503: errors.Unavailable.code,
}


def install(app: FastAPI, meters: ProcessMetrics, routes: Sequence[KnownRoute] = ()) -> None:
    """Installs the error handlers. If a client calls a route that doesn't exist, the response
    suggests one of `routes`."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            hint = hint_for(request.method, request.scope["path"], routes)
            return _http_exception_response(error, {"hint": hint} if hint else None)
        return response_to_any_error(error, request.scope["path"], meters)

    for kind in HANDLED_ERRORS:
        app.exception_handler(kind)(handle)


def response_to_any_error(error: Exception, path: str, meters: ProcessMetrics) -> Response:
    """Converts one of `HANDLED_ERRORS` to a response, and raises any other error again."""
    if isinstance(error, errors.FleetError):
        meters.errors.labels(error.code).inc()
        return response_to_error(error, path)
    if isinstance(error, RequestValidationError):
        return _validation_response(error)
    if isinstance(error, HTTPException):
        return _http_exception_response(error)
    raise error


def status_of(error: errors.FleetError) -> int:
    """Returns the status code of the error's class, or of its nearest base class that has one."""
    return next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)


def error_response(
    status: int,
    code: str,
    message: str,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = {"error": {"code": code, "message": message, "details": dict(details or {})}}
    return Response(
        json.dumps(body, default=str),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def response_to_error(error: errors.FleetError, path: str) -> Response:
    """Converts an error to a response.

    Operators get all details. Other callers get no details of internal errors, which are logged
    instead.
    """
    headers = headers_of(error)
    public_message = errors.said_to_customers(error)
    if path.startswith(ADMIN_PREFIX) or public_message == error.message:
        message = said_to_operators(error)
        return error_response(status_of(error), error.code, message, error.details, headers=headers)
    level, extra = log_level_of(error), {"details": dict(error.details)}
    logger.log(level, "%s: %s", error.code, error.message, extra=extra)
    return error_response(status_of(error), error.code, public_message, headers=headers)


def said_to_operators(error: errors.FleetError) -> str:
    """Returns the error's message. If part of the service is unavailable, its name comes first."""
    part = error.part if isinstance(error, errors.Unavailable) else ""
    return f"{part}: {error.message}" if part else error.message


def headers_of(error: errors.FleetError) -> dict[str, str]:
    """Returns the headers for an error: the authentication scheme, or the seconds until a retry."""
    if isinstance(error, errors.Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.QueueFull):
        return _retry_after(error, QUEUE_FULL_RETRY_SECONDS)
    if isinstance(error, errors.Unavailable):
        is_full = isinstance(error, errors.StoreFull)
        return _retry_after(error, FULL_RETRY_SECONDS if is_full else UNAVAILABLE_RETRY_SECONDS)
    return {}


def _retry_after(error: errors.FleetError, usually: int) -> dict[str, str]:
    seconds = error.details.get(RETRY_AFTER, usually)
    return {"Retry-After": str(max(1, round(float(seconds))))}


def _validation_response(error: RequestValidationError) -> Response:
    """Returns a response that lists the invalid fields, but never their values, because they may be
    keys."""
    problems = [
        describe_validation_error(error_item) for error_item in error.errors()[:PROBLEMS_SHOWN_MAX]
    ]
    message = "; ".join(
        f"{problem['field']}: {problem['message']}" if problem["field"] else problem["message"]
        for problem in problems
    )
    return error_response(422, errors.InvalidInput.code, message, {"fields": problems})


def _http_exception_response(
    error: HTTPException, details: Mapping[str, Any] | None = None
) -> Response:
    """Converts an error of the framework, such as an unknown route, to a response."""
    code = _CODES.get(error.status_code, "error")
    status, message = error.status_code, str(error.detail)
    return error_response(status, code, message, details, headers=error.headers)
