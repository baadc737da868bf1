"""Access to a control plane for commands: drives the SDK's client from synchronous code, without
retries, and adds hints to errors."""

import asyncio
import difflib
import re
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import httpx
from cyclopts import Group, Parameter

from comfyfleet.cli.context import CliContext, base_url, url_without_password
from comfyfleet.cli.tables import print_json, print_rows
from comfyfleet.errors import (
    AccessDenied,
    FleetError,
    InsufficientTokens,
    NotFound,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.error_decoder import error_fields
from comfyfleet.transport.http import Call, describe_network_error

if TYPE_CHECKING:
    from comfyfleet.client import (
        Client,
    )  # slow: imports all models of the API, which --help doesn't need

URL, KEY = "COMFYFLEET_URL", "COMFYFLEET_KEY"
URL_DEFAULT = "http://127.0.0.1:8000"
BEGINNING_CHARACTERS = 80
PAGE_ENTRIES_MAX = 100
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
ADMIN_BASE, PUBLIC_BASE = "api/admin", "api"
ADMIN_KEY_HINT = (
    "It was printed when the control plane first started, or is the value of "
    f"COMFYFLEET_ADMIN_KEY there: export {KEY}=… If it is lost, `comfyfleet db new-admin-key` there "
    "creates a new one."
)
PUBLIC_KEY_HINT = f"Use your API key, not an operator's: export {KEY}=cf_…"
LOCAL_HINT = (
    f"Set {KEY} to your API key (cf_…). Only the user who started `comfyfleet up` on this machine doesn't need one; "
    f"on macOS and Windows, {URL} must then be the address with /k/ that it prints."
)
OUTPUT = Group("Output", sort_key=9)
# The lists whose entries have names, with the field that contains the name.
NAME_FIELDS = {
    "workflows": "slug",
    "effects": "slug",
    "fleets": "slug",
    "workers": "worker_id",
    "tenants": "name",
}
NAMES_SHOWN_MAX = 5
_NAMED = re.compile(rf"/{ADMIN_BASE}/([^/]+)/([^/]+)")
# Part of the address that `comfyfleet up` prints on systems where programs need a key.
KEY_PATH = "/k/"
_KEY_IN_PATH = re.compile(rf"{KEY_PATH}[^/]+")
T = TypeVar("T")


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ApiOptions:
    """Connection and output options shared by all `admin` commands."""

    url: Annotated[
        str | None,
        Parameter(metavar="URL", help=f"The control plane. Default: {URL}, or {URL_DEFAULT}."),
    ] = None
    as_json: Annotated[bool, Parameter(name="--json", help="Print the API's response as JSON.")] = (
        False
    )


API_DEFAULTS = ApiOptions()


@contextmanager
def connect(
    options: ApiOptions, context: CliContext, *, base: str = ADMIN_BASE
) -> Iterator["ApiSession"]:
    """Opens a session. The key is read only from the environment, because other users can see a
    process's arguments."""
    from comfyfleet.client import Client, Patience

    url = base_url(options.url or context.environ.get(URL) or URL_DEFAULT)
    key = context.environ.get(KEY, "")
    host = urlsplit(url).hostname or ""
    if not key and not (base == PUBLIC_BASE and (host in THIS_MACHINE or KEY_PATH in url)):
        hint = PUBLIC_KEY_HINT if base == PUBLIC_BASE else ADMIN_KEY_HINT
        raise AccessDenied(f"{KEY} is not set", hint=hint)
    if url.startswith("http://") and host not in THIS_MACHINE:
        context.warn(
            f"the key is sent to {host} unencrypted; use https:// outside a private network"
        )
    with asyncio.Runner() as runner:
        # Don't retry here, because the user is waiting. Commands that wait for jobs do their own
        # retries.
        client = Client(url, key, patience=Patience(attempts_max=1))
        try:
            yield ApiSession(runner, client, base, options, context)
        finally:
            runner.run(client.aclose())


class ApiSession:
    """A session with a control plane. `run` awaits a call of `client`. The other methods return
    unmodified JSON objects."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: "Client",
        base: str,
        options: ApiOptions,
        context: CliContext,
    ) -> None:
        self.client = client
        self.options = options
        self.context = context
        self._runner = runner
        self._base = base

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a call. Adds hints to its errors."""
        try:
            return self._runner.run(call)
        except (FleetError, httpx.TransportError) as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def iterate(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields items as they arrive. `source` is closed at the end, or when the caller stops
        reading."""
        done = object()

        async def following() -> Any:
            return await anext(source, done)

        try:
            while (item := self.run(following())) is not done:
                yield item
        finally:
            self._runner.run(source.aclose())

    def tell(
        self,
        answer: Mapping[str, Any],
        *messages: str,
        line: str | None = None,
        then: str | None = None,
    ) -> None:
        """Prints messages, and `line` as the result. With --json, prints the answer instead."""
        if self.options.as_json:
            print_json(answer, self.context)
            return
        for text in messages:
            self.context.say(text)
        if line is not None:
            self.context.print_line(line)
        if then is not None:
            self.context.say(then)

    def tell_rows(
        self,
        answer: Mapping[str, Any],
        name: str,
        columns: Sequence[str],
        *,
        none: str,
        older: str | None = None,
    ) -> None:
        """Prints the entries under `name` as a table, and the option that shows the next page. With
        --json, prints the answer instead."""
        if self.options.as_json:
            print_json(answer, self.context)
            return
        print_rows(answer[name], columns, self.context, none=none)
        if older and answer.get("next"):
            self.context.say(f"next page: {older} {answer['next']}")

    def get(self, *path: object, **query: Any) -> dict[str, Any]:
        return self._ask("GET", path, params=query)

    def post(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._ask("POST", path, json=body)

    def put(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._ask("PUT", path, json=body)

    def patch(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._ask("PATCH", path, json=body)

    def delete(self, *path: object) -> None:
        self._ask("DELETE", path)

    def pages(self, name: str, *path: object, limit: int, **query: Any) -> list[dict[str, Any]]:
        """Returns the first `limit` entries of a paginated list under `name`."""
        entries: list[dict[str, Any]] = []
        before = None
        while len(entries) < limit:
            most = min(limit - len(entries), PAGE_ENTRIES_MAX)
            page = self.get(*path, **query, before=before, limit=most)
            entries += page[name]
            before = page.get("next")
            if before is None:
                break
        return entries

    def lines(self, *path: object, **query: Any) -> Iterator[str]:
        return self.iterate(self.client.calls.lines(Call("GET", self.route(path), params=query)))

    def _ask(self, method: str, path: tuple[object, ...], **fields: Any) -> dict[str, Any]:
        return self.run(self.client.calls.ask_json(Call(method, self.route(path), **fields)))

    def route(self, path: tuple[object, ...]) -> str:
        return "/".join(("", self._base, *(quote(str(part), safe="") for part in path)))

    def public_address(self, path: str) -> str:
        """Returns the full address of a path for use by other programs, without a key or
        password."""
        url = url_without_password(str(self.client.calls.client.base_url).rstrip("/"))
        return _KEY_IN_PATH.sub("", url) + path

    @property
    def _url(self) -> str:
        url = url_without_password(str(self.client.calls.client.base_url).rstrip("/"))
        return _KEY_IN_PATH.sub(KEY_PATH + "…", url)

    def _explained(self, error: Exception) -> Exception:
        """Converts an SDK error to an error with a hint, depending on whether the server was
        unreachable or rejected the request."""
        cause = error if isinstance(error, httpx.TransportError) else error.__cause__
        if isinstance(cause, httpx.TimeoutException):
            return ServerUnavailable(f"{self._url} did not answer in time")
        if isinstance(cause, httpx.TransportError):
            return ServerUnavailable(
                f"no control plane responds at {self._url}: {describe_network_error(cause)}",
                hint=f"Is it running? Start one with comfyfleet up, or set {URL} to its address.",
            )
        if isinstance(cause, httpx.HTTPStatusError) and isinstance(error, FleetError):
            return self._with_closest(explain_refusal(error, cause.response), cause.request)
        return error

    def _with_closest(self, error: FleetError, request: httpx.Request) -> FleetError:
        """Adds the closest existing names to a "not found" error: `workflows/negativ` is close to
        `negative`."""
        if "hint" in error.details:
            return error
        named = _NAMED.search(request.url.raw_path.decode().partition("?")[0])
        kind, name = map(unquote, named.groups()) if named else ("", "")
        is_no_id = error.message == "tenant_id: must be an id (a UUID)"
        # The error may be about an item other than the one in the address.
        is_missing = isinstance(error, NotFound) and kind.removesuffix("s") in error.message
        if kind not in NAME_FIELDS or not (is_missing or is_no_id):
            return error
        message = f"tenant {name} was not found; use the tenant's id" if is_no_id else error.message
        names = self._names_of(kind)
        close = difflib.get_close_matches(name, names, n=NAMES_SHOWN_MAX)
        shown_names = ", ".join(
            names[name_found] for name_found in close or list(names)[:NAMES_SHOWN_MAX]
        )
        if not shown_names:
            return NotFound(message, **error.details)
        hint = f"Did you mean: {shown_names}?" if close else f"Available: {shown_names}"
        return NotFound(message, **{**error.details, "hint": hint})

    def _names_of(self, kind: str) -> dict[str, str]:
        """Returns the names that a user may have meant. The values are the displayed names."""
        try:
            entries = self.get(kind)[kind]
        except (FleetError, KeyError):
            return {}
        field = NAME_FIELDS[kind]
        if kind != "tenants":
            return {str(entry[field]): str(entry[field]) for entry in entries}
        return {str(entry[field]): f"{entry['id']} ({entry[field]})" for entry in entries}


def explain_refusal(error: FleetError, response: httpx.Response) -> FleetError:
    """Returns the error, with a hint if one is known for it."""
    if error_fields(response) is None:
        return _no_control_plane(response)
    hint = error.details.get("hint") or _hint(response)
    if isinstance(error, InsufficientTokens):
        required, balance = error.details["required_tokens"], error.details["balance"]
        hint = f"This requires {required} tokens, and your balance is {balance}."
    if hint:
        error.details = {**error.details, "hint": hint}
    return error


def _hint(response: httpx.Response) -> str | None:
    is_admins = f"/{ADMIN_BASE}/" in response.url.path
    if response.status_code == httpx.codes.UNAUTHORIZED and not is_admins:
        has_key = "authorization" in response.request.headers
        return f"{KEY} must be your API key (cf_…)" if has_key else LOCAL_HINT
    if response.status_code == httpx.codes.UNAUTHORIZED:
        what = "an operator's key, or the key that the control plane printed when it first started"
        return f"{KEY} must be {what if is_admins else 'your API key (cf_…)'}"
    if response.status_code == httpx.codes.FORBIDDEN and not is_admins:
        key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
        return None if key.startswith("cf_") else f"{KEY} must be your API key (cf_…)"
    if after := response.headers.get("retry-after"):
        return f"Try again in {after} s."
    if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
        return "The cause is in the control plane's log under that id."
    return None


def _no_control_plane(response: httpx.Response) -> UnexpectedAnswer:
    where = url_without_password(str(response.url).partition("?")[0].partition("/api/")[0])
    where = _KEY_IN_PATH.sub(KEY_PATH + "…", where)
    beginning = response.text[:BEGINNING_CHARACTERS]
    return UnexpectedAnswer(
        f"{where} isn't a control plane: it responded with {response.status_code} and {beginning!r}",
        hint=f"{URL} must be the address that comfyfleet serve or up has printed.",
    )
