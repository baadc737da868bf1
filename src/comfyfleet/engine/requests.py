"""Reading requests, within limits."""

import contextlib
import json
from collections.abc import AsyncIterator

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message, Receive

from comfyfleet.engine.trouble import MalformedBody, Trouble
from comfyfleet.kernel.errors import LimitExceeded

BODY_BYTES_MAX = 100 * 1024 * 1024
FIELD_BYTES_MAX = 1024 * 1024
PARTS_MAX = 100


class BodyTooLarge(LimitExceeded):
    code = "body_too_large"


def limited(receive: Receive, bytes_max: int = BODY_BYTES_MAX) -> Receive:
    """The same body, refused once it is too long; a length that is declared may be a lie."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bytes_max:
            raise BodyTooLarge(f"the body has more than {bytes_max} bytes")
        return message

    return receive_limited


async def read_json(request: Request) -> object:
    """The body as JSON, whatever its content type says."""
    body = await request.body()
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error


@contextlib.asynccontextmanager
async def open_form(request: Request) -> AsyncIterator[FormData]:
    """The form; its files are there until the end of the block."""
    try:
        form = await request.form(
            max_files=PARTS_MAX, max_fields=PARTS_MAX, max_part_size=FIELD_BYTES_MAX
        )
    except MultiPartException as error:
        raise Trouble(f"the form can't be read: {error.message}") from error
    try:
        yield form
    finally:
        await form.close()
