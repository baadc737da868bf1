"""A control plane as commands call it: the SDK's client driven from synchronous code, without retries, and with errors
that say what to do next."""

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
    )  # with all models of the API, and --help needs none of them

URL, KEY = "COMFYFLEET_URL", "COMFYFLEET_KEY"
URL_DEFAULT = "http://127.0.0.1:8000"
BEGINNING_CHARACTERS = 80
PAGE_ENTRIES_MAX = 100
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
ADMIN_BASE, PUBLIC_BASE = "api/admin", "api"
ADMIN_KEY_HINT = (
    "It was printed when the control plane first started, or is the value of "
    f"COMFYFLEET_ADMIN_KEY there: export {KEY}=… If it is lost, `comfyfleet db new-admin-key` there "
    "makes another."
)
PUBLIC_KEY_HINT = f"It is an API key of yours, not an operator's: export {KEY}=cf_…"
LOCAL_HINT = (
    f"Set {KEY} to an API key of yours (cf_…). Only the user who started `comfyfleet up` on this machine needs none; "
    f"on macOS and Windows, {URL} must then be the address with /k/ that it prints."
)
OUTPUT = Group("Output", sort_key=9)
# Which lists there are, and by which field people name what is in them.
NAME_FIELDS = {
    "workflows": "slug",
    "effects": "slug",
    "fleets": "slug",
    "workers": "worker_id",
    "tenants": "name",
}
NAMES_SHOWN_MAX = 5
_NAMED = re.compile(rf"/{ADMIN_BASE}/([^/]+)/([^/]+)")
# In the address that `comfyfleet up` prints where programs can't do without a key.
KEY_PATH = "/k/"
_KEY_IN_PATH = re.compile(rf"{KEY_PATH}[^/]+")
T = TypeVar("T")


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ApiOptions:
    """How every command of `admin` asks, and how it tells."""

    url: Annotated[
        str | None,
        Parameter(metavar="URL", help=f"The control plane; default: {URL}, or {URL_DEFAULT}."),
    ] = None
    as_json: Annotated[bool, Parameter(name="--json", help="Print the API's response as JSON.")] = (
        False
    )


API_DEFAULTS = ApiOptions()


@contextmanager
def connect(
    options: ApiOptions, context: CliContext, *, base: str = ADMIN_BASE
) -> Iterator["ApiSession"]:
    """The key comes from the environment only: arguments of a process can be seen by others."""
    from comfyfleet.client import Client, Patience

    url = base_url(options.url or context.environ.get(URL) or URL_DEFAULT)
    key = context.environ.get(KEY, "")
    host = urlsplit(url).hostname or ""
    if not key and not (base == PUBLIC_BASE and (host in THIS_MACHINE or KEY_PATH in url)):
        hint = PUBLIC_KEY_HINT if base == PUBLIC_BASE else ADMIN_KEY_HINT
        raise AccessDenied(f"{KEY} is not set", hint=hint)
    if url.startswith("http://") and host not in THIS_MACHINE:
        context.warn(f"the key goes to {host} unencrypted: use https:// outside a private network")
    with asyncio.Runner() as runner:
        # Somebody sits there and waits: they try again, or a command that waits does.
        client = Client(url, key, patience=Patience(attempts_max=1))
        try:
            yield ApiSession(runner, client, base, options, context)
        finally:
            runner.run(client.aclose())


class ApiSession:
    """One control plane. `run` awaits a call of `client`; the others give JSON objects as they came."""

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
        """What it returns. Raises its errors with hints for people."""
        try:
            return self._runner.run(call)
        except (FleetError, httpx.TransportError) as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def iterate(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        """Each as it comes. `source` is closed at the end, or when nobody reads on."""
        done = object()

        async def following() -> Any:
            return await anext(source, done)

        try:
            while (each := self.run(following())) is not done:
                yield each
        finally:
            self._runner.run(source.aclose())

    def tell(
        self,
        answer: Mapping[str, Any],
        *said: str,
        line: str | None = None,
        then: str | None = None,
    ) -> None:
        """What was done, and a `line` that is the result; with --json the answer."""
        if self.options.as_json:
            print_json(answer, self.context)
            return
        for text in said:
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
        """The entries under `name` as a table, and by which option there are more; with --json the answer."""
        if self.options.as_json:
            print_json(answer, self.context)
            return
        print_rows(answer[name], columns, self.context, none=none)
        if older and answer.get("next"):
            self.context.say(f"older ones: {older} {answer['next']}")

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
        """The first `limit` entries of a list that the API gives page by page, under `name`."""
        found: list[dict[str, Any]] = []
        before = None
        while len(found) < limit:
            most = min(limit - len(found), PAGE_ENTRIES_MAX)
            page = self.get(*path, **query, before=before, limit=most)
            found += page[name]
            before = page.get("next")
            if before is None:
                break
        return found

    def lines(self, *path: object, **query: Any) -> Iterator[str]:
        return self.iterate(self.client.calls.lines(Call("GET", self.route(path), params=query)))

    def _ask(self, method: str, path: tuple[object, ...], **fields: Any) -> dict[str, Any]:
        return self.run(self.client.calls.ask_json(Call(method, self.route(path), **fields)))

    def route(self, path: tuple[object, ...]) -> str:
        return "/".join(("", self._base, *(quote(str(part), safe="") for part in path)))

    def public_address(self, path: str) -> str:
        """Returns the address of a path for programs elsewhere, without a key or password."""
        url = url_without_password(str(self.client.calls.client.base_url).rstrip("/"))
        return _KEY_IN_PATH.sub("", url) + path

    @property
    def _url(self) -> str:
        url = url_without_password(str(self.client.calls.client.base_url).rstrip("/"))
        return _KEY_IN_PATH.sub(KEY_PATH + "…", url)

    def _explained(self, error: Exception) -> Exception:
        """By what the SDK's error came of: no answer, or an answer that refuses."""
        cause = error if isinstance(error, httpx.TransportError) else error.__cause__
        if isinstance(cause, httpx.TimeoutException):
            return ServerUnavailable(f"{self._url} did not answer in time")
        if isinstance(cause, httpx.TransportError):
            return ServerUnavailable(
                f"no control plane answers at {self._url}: {describe_network_error(cause)}",
                hint=f"Is it running? comfyfleet up starts one; {URL} says where it is.",
            )
        if isinstance(cause, httpx.HTTPStatusError) and isinstance(error, FleetError):
            return self._with_closest(explain_refusal(error, cause.response), cause.request)
        return error

    def _with_closest(self, error: FleetError, request: httpx.Request) -> FleetError:
        """What there is in place of what is not there: `workflows/negativ` is close to `negative`."""
        if "hint" in error.details:
            return error
        named = _NAMED.search(request.url.raw_path.decode().partition("?")[0])
        kind, name = map(unquote, named.groups()) if named else ("", "")
        is_no_id = error.message == "tenant_id: must be an id (a UUID)"
        # What is missing may be something else than what the address names.
        is_missing = isinstance(error, NotFound) and kind.removesuffix("s") in error.message
        if kind not in NAME_FIELDS or not (is_missing or is_no_id):
            return error
        message = f"there is no tenant {name}: it is named by its id" if is_no_id else error.message
        names = self._names_of(kind)
        close = difflib.get_close_matches(name, names, n=NAMES_SHOWN_MAX)
        shown_names = ", ".join(names[each] for each in close or list(names)[:NAMES_SHOWN_MAX])
        if not shown_names:
            return NotFound(message, **error.details)
        hint = f"Did you mean: {shown_names}?" if close else f"There are: {shown_names}"
        return NotFound(message, **{**error.details, "hint": hint})

    def _names_of(self, kind: str) -> dict[str, str]:
        """What people may have meant, and how it is written."""
        try:
            found = self.get(kind)[kind]
        except (FleetError, KeyError):
            return {}
        field = NAME_FIELDS[kind]
        if kind != "tenants":
            return {str(each[field]): str(each[field]) for each in found}
        return {str(each[field]): f"{each['id']} ({each[field]})" for each in found}


def explain_refusal(error: FleetError, response: httpx.Response) -> FleetError:
    """The same error with a hint what to do, if there is one."""
    if error_fields(response) is None:
        return _no_control_plane(response)
    hint = error.details.get("hint") or _hint(response)
    if isinstance(error, InsufficientTokens):
        wanted, balance = error.details["required_tokens"], error.details["balance"]
        hint = f"It takes {wanted} tokens, and the balance is {balance}."
    if hint:
        error.details = {**error.details, "hint": hint}
    return error


def _hint(response: httpx.Response) -> str | None:
    is_admins = f"/{ADMIN_BASE}/" in response.url.path
    if response.status_code == httpx.codes.UNAUTHORIZED and not is_admins:
        has_key = "authorization" in response.request.headers
        return f"{KEY} must be an API key of yours: cf_…" if has_key else LOCAL_HINT
    if response.status_code == httpx.codes.UNAUTHORIZED:
        what = "an operator's, or the one that the control plane printed at its first start"
        return f"{KEY} must be {what if is_admins else 'an API key of yours: cf_…'}"
    if response.status_code == httpx.codes.FORBIDDEN and not is_admins:
        key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
        return None if key.startswith("cf_") else f"{KEY} must be an API key of yours: cf_…"
    if after := response.headers.get("retry-after"):
        return f"Try again in {after} s."
    if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
        return "The control plane's log has the cause under that id."
    return None


def _no_control_plane(response: httpx.Response) -> UnexpectedAnswer:
    where = url_without_password(str(response.url).partition("?")[0].partition("/api/")[0])
    where = _KEY_IN_PATH.sub(KEY_PATH + "…", where)
    beginning = response.text[:BEGINNING_CHARACTERS]
    return UnexpectedAnswer(
        f"{where} is no control plane: it answered {response.status_code} with {beginning!r}",
        hint=f"{URL} must be the address that comfyfleet serve or up has printed.",
    )
