"""Request bodies of the gateway: limits of size and time, and JSON as ComfyUI reads it, but for what can't be kept."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Message, Receive

from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.protocol.http import BodyTooLarge
from comfyfleet.protocol.payloads import MalformedBody, RefusedPrompt
from comfyfleet.protocol.validation import fault
from comfyfleet.server.http.request_body import parse_leniently, parsed

# A file may take long, but some bytes of it come all the time.
SILENCE_SECONDS_MAX = 60.0
JSON_SECONDS_MAX = 60.0


class BodyTimeout(InvalidInput):
    """The client stopped sending."""

    code = "timeout"


def limited(receive: Receive, *, declared: int, bytes_max: int, is_file: bool) -> Receive:
    """Limits the size and the time of one body while it is received.

    A file has a limit of silence, any other body one for all of it. `declared`: its size as the client
    told it, which may be a lie.
    """
    clock: Callable[[], float] = asyncio.get_running_loop().time
    size, is_complete, deadline = 0, False, clock() + JSON_SECONDS_MAX

    async def receive_limited() -> Message:
        nonlocal size, is_complete
        if is_complete:
            return await receive()
        if declared > bytes_max:
            raise _too_large(bytes_max)
        until = clock() + SILENCE_SECONDS_MAX if is_file else deadline
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout("the body did not arrive in time") from None
        size += len(message.get("body", b""))
        if size > bytes_max:
            raise _too_large(bytes_max)
        is_complete = not message.get("more_body", False)
        return message

    return receive_limited


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {bytes_max} bytes", bytes_max=bytes_max)


async def read_json(request: Request) -> object:
    """The body as JSON, whatever its content type says. Raises MalformedBody, RefusedPrompt."""
    body = await request.body()
    try:
        return await parsed(body, parse_leniently)
    except LimitExceeded as error:
        raise _refused(error.message) from None
    except InvalidInput as error:
        raise _refused(error.message) from None
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error


def _refused(message: str) -> RefusedPrompt:
    """ComfyUI would take it, and fail later or never end."""
    return RefusedPrompt(fault("invalid_body", "The body can't be taken", message))
