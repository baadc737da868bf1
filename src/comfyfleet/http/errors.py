"""Our errors as HTTP answers: a status, and `{"error": {"code", "message", "details"}}`."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from comfyfleet.db.outages import level_of
from comfyfleet.http.validation import problem_of
from comfyfleet.kernel import errors
from comfyfleet.plane import Meters

logger = logging.getLogger(__name__)
OPERATORS = "/api/admin/"
UNAVAILABLE_RETRY_SECONDS = 5
QUEUE_FULL_RETRY_SECONDS = 30
PROBLEMS_SHOWN_MAX = 20
# What a raiser of QueueFull or Unavailable puts into details to say when to come again.
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
    # A server behind us is at fault, and nothing that the caller said.
    errors.ServerUnavailable: 502,
    errors.AccessDenied: 502,
    errors.UnexpectedAnswer: 502,
}
# What the framework is told to leave to us.
ANSWERED = (errors.FleetError, RequestValidationError, HTTPException)
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


def install(app: FastAPI, meters: Meters) -> None:
    async def told(request: Request, error: Exception) -> Response:
        return answer_to_any(error, request.scope["path"], meters)

    for kind in ANSWERED:
        app.exception_handler(kind)(told)


def answer_to_any(error: Exception, path: str, meters: Meters) -> Response:
    """To one of `ANSWERED`."""
    if isinstance(error, errors.FleetError):
        meters.errors.labels(error.code).inc()
        return answer_to(error, path)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_routing(error)
    raise error


def status_of(error: errors.FleetError) -> int:
    """That of the nearest class above that has one."""
    return next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)


def answer(
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


def answer_to(error: errors.FleetError, path: str) -> Response:
    """All of it for operators; others are not told what ails our machines: the log is."""
    headers = _headers_of(error)
    said = errors.said_to_customers(error)
    if path.startswith(OPERATORS) or said == error.message:
        return answer(status_of(error), error.code, error.message, error.details, headers=headers)
    level, extra = level_of(error), {"details": dict(error.details)}
    logger.log(level, "%s: %s", error.code, error.message, extra=extra)
    return answer(status_of(error), error.code, said, headers=headers)


def _headers_of(error: errors.FleetError) -> dict[str, str]:
    if isinstance(error, errors.Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.QueueFull):
        return _retry_after(error, QUEUE_FULL_RETRY_SECONDS)
    if isinstance(error, errors.Unavailable):
        return _retry_after(error, UNAVAILABLE_RETRY_SECONDS)
    return {}


def _retry_after(error: errors.FleetError, usually: int) -> dict[str, str]:
    seconds = error.details.get(RETRY_AFTER, usually)
    return {"Retry-After": str(max(1, round(float(seconds))))}


def _of_validation(error: RequestValidationError) -> Response:
    """Names the fields, and never repeats what was sent: it may have been a key."""
    problems = [problem_of(each) for each in error.errors()[:PROBLEMS_SHOWN_MAX]]
    message = "; ".join(
        f"{each['field']}: {each['message']}" if each["field"] else each["message"]
        for each in problems
    )
    return answer(422, errors.InvalidInput.code, message, {"fields": problems})


def _of_routing(error: HTTPException) -> Response:
    """What the framework itself refuses: no such route, no such method."""
    code = _CODES.get(error.status_code, "error")
    return answer(error.status_code, code, str(error.detail), headers=error.headers)
