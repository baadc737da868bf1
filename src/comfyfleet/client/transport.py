"""Calls of the API: retried with back-off, errors raised as the control plane raised them, lists page by page,
event streams resumed. The key goes to the control plane only.

A call that may have been heard is made again only if hearing it twice does no harm."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError

from comfyfleet.api.values import Message, Page
from comfyfleet.errors import FleetError, LimitExceeded, UnexpectedAnswer
from comfyfleet.transport.error_decoder import BEGINNING_CHARACTERS, error_from_response
from comfyfleet.transport.http import RETRYABLE_STATUSES, Call, HttpClient, open_client
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.transport.sse import EventParser, ServerEvent

Answer = TypeVar("Answer", bound=Message)
Pages = TypeVar("Pages", bound=Page)


def parse_answer(kind: type[Answer], response: httpx.Response) -> Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise UnexpectedAnswer(
            f"{response.url.path} was answered in a shape that this client doesn't know: {error}",
            received=response.text[:BEGINNING_CHARACTERS],
        ) from error


class ApiCalls(HttpClient):
    """Calls of the API. The key goes with them, and with no file."""

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        retry: RetryPolicy,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        client = open_client(base_url, transport=transport)
        # Under `comfyfleet up`, its own user needs no key.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(client, retry=retry, headers=headers)

    async def ask(self, call: Call) -> httpx.Response:
        """An answer of success. Raises our errors, ServerUnavailable and OutcomeUnknown."""
        response = await self.send(call, may_repeat=call.may_repeat)
        if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
            return response
        raise refusal(response)

    async def ask_json(self, call: Call) -> dict[str, Any]:
        """The JSON object of an answer as it came, with fields that no model knows; {} for no content."""
        response = await self.ask(call)
        if response.status_code == httpx.codes.NO_CONTENT:
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise refusal(response)
        return answer

    async def lines(self, call: Call) -> AsyncGenerator[str, None]:
        """A long answer, line by line; lines end with a newline and nothing else."""
        rest = b""
        async with aclosing(self.pieces(call)) as pieces:
            async for piece in pieces:
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line.decode()
        if rest:
            yield rest.decode()

    async def pieces(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The body of an answer of success as it comes. Raises httpx.TransportError where it breaks off."""
        async with self.stream(call) as response:
            if not response.is_success:
                await response.aread()
                raise refusal(response)
            async for piece in response.aiter_bytes():
                yield piece


def refusal(response: httpx.Response) -> FleetError:
    """The error that the API raised. Its cause has the response, for those who tell people what to do next."""
    error = error_from_response(response)
    # Without the query: of a file's URL that is the right to it.
    said = f"{response.request.method} {response.url.path} was answered {response.status_code}"
    error.__cause__ = httpx.HTTPStatusError(said, request=response.request, response=response)
    return error


PAGE = 100


async def fetch_pages(
    calls: ApiCalls,
    path: str,
    kind: type[Pages],
    query: Mapping[str, Any],
    *,
    by: str = "before",
) -> AsyncIterator[Pages]:
    """Each names where the next one begins; the last names nothing."""
    begin = None
    while True:
        page = parse_answer(kind, await calls.ask(Call("GET", path, params={**query, by: begin})))
        yield page
        begin = page.next
        if begin is None:
            return


# A stream says something, if only that it lives, more often than this.
SILENCE_SECONDS_MAX = 45.0
# Streams in a row that told nothing; then something else is tried.
EMPTY_STREAMS_MAX = 3
NO_STREAM = frozenset({404, 405, 406, 501})
Told = TypeVar("Told")


class ResumableStream(Generic[Told]):
    """`last_id` is where it stands: a later reader may begin there."""

    def __init__(
        self,
        calls: ApiCalls,
        path: str,
        parse: Callable[[ServerEvent], Told | None],
        *,
        last_id: str = "",
    ) -> None:
        self._calls = calls
        self._path = path
        self._parse = parse
        self.last_id = last_id
        self.is_over = False  # nothing more will come
        self.may_stream = True

    async def heard(self) -> AsyncGenerator[Told, None]:
        """The events of one stream, until it is cut or the server ends it."""
        headers = {"Accept": "text/event-stream"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        call = Call("GET", self._path, headers=headers, read_seconds=SILENCE_SECONDS_MAX)
        parser = EventParser(self.last_id)
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return
                async for piece in response.aiter_bytes():
                    for found in parser.feed(piece):
                        event = self._parse(found)
                        if event is not None:
                            # Only what was told counts as heard: an id whose event was cut off is asked for again.
                            self.last_id = found.id
                            yield event
                    if self.is_over and parser.comments:
                        return  # the server keeps the stream open, and has nothing more to tell
                    parser.comments = 0
        except (httpx.TransportError, LimitExceeded):
            return

    async def _is_stream(self, response: httpx.Response) -> bool:
        if response.status_code == httpx.codes.NO_CONTENT:
            self.is_over = True  # all has been told
            return False
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return True
        self.may_stream = response.status_code in RETRYABLE_STATUSES
        if response.is_success or response.status_code in RETRYABLE_STATUSES | NO_STREAM:
            return False
        await response.aread()
        raise refusal(response)

    async def all_events(self) -> AsyncGenerator[Told, None]:
        """Stream after stream, until it is over or they are given up."""
        fruitless = 0
        while not self.is_over and self.may_stream and fruitless < EMPTY_STREAMS_MAX:
            fruitless += 1
            async with aclosing(self.heard()) as heard:
                async for event in heard:
                    fruitless = 0
                    yield event
            if fruitless and self.may_stream and not self.is_over:
                await self._calls.retry.back_off(fruitless)
