"""Formats errors as in Comfy API v2, which has its own error codes."""

from starlette.responses import Response

from comfyfleet.errors import (
    FleetError,
    Forbidden,
    InsufficientTokens,
    InvalidInput,
    LimitExceeded,
    QueueFull,
    TooManyCalls,
    Unauthenticated,
    said_to_customers,
)
from comfyfleet.protocol.payloads import RefusedPrompt, UnforeseenInput
from comfyfleet.server.http.errors import error_response, headers_of, status_of

# Error codes by the error's class. The first match wins.
CODES: tuple[tuple[type[FleetError], str], ...] = (
    (Unauthenticated, "unauthorized"),
    (Forbidden, "forbidden"),
    (InsufficientTokens, "insufficient_credits"),
    (TooManyCalls, "rate_limited"),
    (QueueFull, "queue_full"),
    (LimitExceeded, "payload_too_large"),
)
PAYMENT_REQUIRED = 402


class InvalidRequest(InvalidInput):
    code = "invalid_request"


class TooManyStreams(TooManyCalls):
    code = "too_many_streams"


def error_reply(error: FleetError) -> Response:
    """Formats an error for Comfy API v2. Internal details aren't included."""
    status, code = status_of(error), error.code
    if isinstance(error, UnforeseenInput | RefusedPrompt):
        status, code = 400, InvalidRequest.code
    elif isinstance(error, InsufficientTokens) or code == "insufficient_tokens":
        status, code = PAYMENT_REQUIRED, "insufficient_credits"
    elif not isinstance(error, TooManyStreams):
        code = next((name for kind, name in CODES if isinstance(error, kind)), code)
    code = InvalidRequest.code if code == InvalidInput.code else code
    message = said_to_customers(error)
    details = error.details if message == error.message else {}
    return error_response(status, code, message, details, headers=headers_of(error))
