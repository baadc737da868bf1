"""Calls the API: retries with back-off, raises the control plane's errors, reads lists page by
page, and resumes event streams. The key is sent only to the control plane.

A call that the server may have received is repeated only if that is harmless."""

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
            f"the response of {response.url.path} has an unknown format: {error}",
            received=response.text[:BEGINNING_CHARACTERS],
        ) from error


class ApiCalls(HttpClient):
    """Calls the API with the key. The key is never sent with file transfers."""

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        retry: RetryPolicy,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        client = open_client(base_url, transport=transport)
        # The default user of `comfyfleet up` needs no key.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(client, retry=retry, headers=headers)

    async def ask(self, call: Call) -> httpx.Response:
        """Returns a successful response. Raises the API's errors, ServerUnavailable or
        OutcomeUnknown."""
        response = await self.send(call, may_repeat=call.may_repeat)
        if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
            return response
        raise refusal(response)

    async def ask_json(self, call: Call) -> dict[str, Any]:
        """Returns the unmodified JSON object of a response, including unknown fields. Returns {}
        for an empty response."""
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
        """Yields the lines of a long response. Only a newline ends a line."""
        rest = b""
        async with aclosing(self.pieces(call)) as pieces:
            async for piece in pieces:
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line.decode()
        if rest:
            yield rest.decode()

    async def pieces(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yields the body of a successful response as it arrives. Raises httpx.TransportError if it
        is interrupted."""
        async with self.stream(call) as response:
            if not response.is_success:
                await response.aread()
                raise refusal(response)
            async for piece in response.aiter_bytes():
                yield piece


def refusal(response: httpx.Response) -> FleetError:
    """Returns the error that the API raised. Its cause contains the response, for code that
    suggests what to do next."""
    error = error_from_response(response)
    # Leave out the query, because a file URL's query grants access to the file.
    message = f"{response.request.method} {response.url.path} was answered {response.status_code}"
    error.__cause__ = httpx.HTTPStatusError(message, request=response.request, response=response)
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
    """Yields all pages of a list. Each page contains the position of the next one, or None if it is
    the last."""
    begin = None
    while True:
        page = parse_answer(kind, await calls.ask(Call("GET", path, params={**query, by: begin})))
        yield page
        begin = page.next
        if begin is None:
            return


# Maximum seconds between messages of a stream. Servers send keep-alive messages more often.
SILENCE_SECONDS_MAX = 45.0
# After this many consecutive streams without an event, the client stops using streams.
EMPTY_STREAMS_MAX = 3
NO_STREAM = frozenset({404, 405, 406, 501})
ParsedEvent = TypeVar("ParsedEvent")


class ResumableStream(Generic[ParsedEvent]):
    """Reads an event stream and resumes it. `last_id` is the position from which a later reader can
    resume."""

    def __init__(
        self,
        calls: ApiCalls,
        path: str,
        parse: Callable[[ServerEvent], ParsedEvent | None],
        *,
        last_id: str = "",
    ) -> None:
        self._calls = calls
        self._path = path
        self._parse = parse
        self.last_id = last_id
        self.is_over = False  # no more events will come
        self.may_stream = True

    async def stream_events(self) -> AsyncGenerator[ParsedEvent, None]:
        """Yields the events of a single stream, until it is interrupted or the server ends it."""
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
                    for server_event in parser.feed(piece):
                        event = self._parse(server_event)
                        if event is not None:
                            # Store the id only after the whole event has arrived. An event that was
                            # cut off is requested again.
                            self.last_id = server_event.id
                            yield event
                    if self.is_over and parser.comments:
                        return  # the server keeps the stream open, but has no more events
                    parser.comments = 0
        except (httpx.TransportError, LimitExceeded):
            return

    async def _is_stream(self, response: httpx.Response) -> bool:
        if response.status_code == httpx.codes.NO_CONTENT:
            self.is_over = True  # there are no more events
            return False
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return True
        self.may_stream = response.status_code in RETRYABLE_STATUSES
        if response.is_success or response.status_code in RETRYABLE_STATUSES | NO_STREAM:
            return False
        await response.aread()
        raise refusal(response)

    async def all_events(self) -> AsyncGenerator[ParsedEvent, None]:
        """Yields events from one stream after another, until there are no more events or streams
        turn out to be unusable."""
        fruitless = 0
        while not self.is_over and self.may_stream and fruitless < EMPTY_STREAMS_MAX:
            fruitless += 1
            async with aclosing(self.stream_events()) as stream:
                async for event in stream:
                    fruitless = 0
                    yield event
            if fruitless and self.may_stream and not self.is_over:
                await self._calls.retry.back_off(fruitless)
