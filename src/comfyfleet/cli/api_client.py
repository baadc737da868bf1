"""The CLI's HTTP client for the control plane, with errors that say what to do next; and waiting for jobs, with a
display that changes in place on a terminal and is written once elsewhere."""

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import quote, urlsplit

import httpx
from cyclopts import Group, Parameter
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from comfyfleet.api.jobs import ENDED
from comfyfleet.cli.context import CliContext, base_url, printable, url_without_password
from comfyfleet.errors import (
    AccessDenied,
    FleetError,
    InsufficientTokens,
    NotFound,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.error_decoder import error_fields, error_from_response
from comfyfleet.transport.sse import EventParser, ServerEvent

URL, KEY = "COMFYFLEET_URL", "COMFYFLEET_KEY"
URL_DEFAULT = "http://127.0.0.1:8000"
CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 60.0
TRANSFER_SECONDS_MAX = 600.0
BEGINNING_CHARACTERS = 80
CHUNK_BYTES = 1024 * 1024
PAGE_ENTRIES_MAX = 100
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
ADMIN_BASE, PUBLIC_BASE = "api/admin", "api"
ADMIN_KEY_HINT = (
    "It was printed when the control plane first started, or is the value of "
    f"COMFYFLEET_ADMIN_KEY there: export {KEY}=… If it is lost, `comfyfleet db new-admin-key` there "
    "makes another."
)
PUBLIC_KEY_HINT = f"It is an API key of yours, not an operator's: export {KEY}=cf_…"
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
def control(
    options: ApiOptions, context: CliContext, *, base: str = ADMIN_BASE
) -> Iterator["ApiClient"]:
    """The key comes from the environment only: arguments of a process can be seen by others."""
    url = base_url(options.url or context.environ.get(URL) or URL_DEFAULT)
    key = context.environ.get(KEY, "")
    if not key:
        raise AccessDenied(f"{KEY} is not set", hint=_key_hint(base))
    host = urlsplit(url).hostname or ""
    if url.startswith("http://") and host not in THIS_MACHINE:
        context.warn(f"the key goes to {host} unencrypted: use https:// outside a private network")
    timeout = httpx.Timeout(ANSWER_SECONDS_MAX, connect=CONNECT_SECONDS_MAX)
    with httpx.Client(timeout=timeout) as client:
        yield ApiClient(client, url, key, base)


class ApiClient:
    """One control plane. Answers are JSON objects; anything else is an error."""

    def __init__(self, client: httpx.Client, url: str, key: str, base: str = ADMIN_BASE) -> None:
        self._client = client
        self._url = url
        self._base = base
        self._headers = {"Authorization": f"Bearer {key}"}

    def get(self, *path: object, **query: Any) -> dict[str, Any]:
        given = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, params=given)

    def post(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._call("POST", path, json=body)

    def put(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._call("PUT", path, json=body)

    def patch(self, *path: object, **body: Any) -> dict[str, Any]:
        return self._call("PATCH", path, json=body)

    def delete(self, *path: object) -> None:
        self._call("DELETE", path)

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

    def events(self, *path: object, **query: Any) -> Iterator[ServerEvent]:
        """Server-sent events, until the server ends them or they break off."""
        parser = EventParser()
        for piece in self._pieces(path, query):
            yield from parser.feed(piece)

    def lines(self, *path: object, **query: Any) -> Iterator[str]:
        """A long answer, line by line; lines end with a newline and nothing else."""
        rest = b""
        for piece in self._pieces(path, query):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode() for line in whole)
        if rest:
            yield rest.decode()

    def _pieces(self, path: tuple[object, ...], query: Mapping[str, Any]) -> Iterator[bytes]:
        given = {name: value for name, value in query.items() if value is not None}
        with (
            self._explained(),
            self._client.stream(
                "GET", self._address(path), params=given, headers=self._headers
            ) as response,
        ):
            if response.status_code >= 400:
                response.read()
                raise _refusal(response, url_without_password(self._url))
            yield from response.iter_bytes()

    def upload(self, slot: Mapping[str, Any], path: Path) -> None:
        """To where a slot says, which may be another server: without the key."""
        # An explicit length: a store refuses uploads whose end it can't foresee.
        headers = {**slot.get("headers", {}), "Content-Length": str(path.stat().st_size)}
        with self._explained(), path.open("rb") as file:
            response = self._client.request(
                slot["method"],
                slot["url"],
                headers=headers,
                content=iter(lambda: file.read(CHUNK_BYTES), b""),
                timeout=TRANSFER_SECONDS_MAX,
            )
        if response.status_code >= 400:
            raise _refusal(response, url_without_password(slot["url"].partition("?")[0]))

    def download(self, url: str, path: Path) -> None:
        with (
            self._explained(),
            self._client.stream("GET", url, timeout=TRANSFER_SECONDS_MAX) as response,
            path.open("wb") as file,
        ):
            if response.status_code >= 400:
                response.read()
                raise _refusal(response, url_without_password(url.partition("?")[0]))
            for chunk in response.iter_bytes(CHUNK_BYTES):
                file.write(chunk)

    def _call(self, method: str, path: tuple[object, ...], **options: Any) -> dict[str, Any]:
        with self._explained():
            response = self._client.request(
                method, self._address(path), headers=self._headers, **options
            )
        if response.status_code >= 400:
            raise self._with_closest(_refusal(response, url_without_password(self._url)), path)
        if response.status_code == httpx.codes.NO_CONTENT:
            return {}
        answer = _json(response)
        if not isinstance(answer, dict):
            raise _no_control_plane(url_without_password(self._url), response)
        return answer

    def _with_closest(self, error: FleetError, path: tuple[object, ...]) -> FleetError:
        """What there is in place of what is not there: `workflows/negativ` is close to `negative`."""
        kind, name = (str(part) for part in (*path, "", "")[:2])
        is_no_id = error.message == "tenant_id: must be an id (a UUID)"
        if kind not in NAME_FIELDS or not name or not (isinstance(error, NotFound) or is_no_id):
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
            answer = _json(self._client.get(self._address((kind,)), headers=self._headers))
            found = answer[kind]
        except (httpx.HTTPError, KeyError, TypeError):
            return {}
        field = NAME_FIELDS[kind]
        if kind != "tenants":
            return {str(each[field]): str(each[field]) for each in found}
        return {str(each[field]): f"{each['id']} ({each[field]})" for each in found}

    def _address(self, path: tuple[object, ...]) -> str:
        return "/".join(
            (f"{self._url}/{self._base}", *(quote(str(part), safe="") for part in path))
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise ServerUnavailable(
                f"{url_without_password(self._url)} did not answer in time"
            ) from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"no control plane answers at {url_without_password(self._url)}: {error}",
                hint=f"Is it running? comfyfleet up starts one; {URL} says where it is.",
            ) from error


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None


def _refusal(response: httpx.Response, where: str) -> FleetError:
    if error_fields(response) is None:
        return _no_control_plane(where, response)
    error = error_from_response(response)
    hint = error.details.get("hint") or _hint(response)
    if isinstance(error, InsufficientTokens):
        wanted, balance = error.details["required_tokens"], error.details["balance"]
        hint = f"It takes {wanted} tokens, and the balance is {balance}."
    if hint:
        error.details = {**error.details, "hint": hint}
    return error


def _key_hint(base: str) -> str:
    return PUBLIC_KEY_HINT if base == PUBLIC_BASE else ADMIN_KEY_HINT


def _hint(response: httpx.Response) -> str | None:
    is_admins = f"/{ADMIN_BASE}/" in response.url.path
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


def _no_control_plane(where: str, response: httpx.Response) -> UnexpectedAnswer:
    beginning = response.text[:BEGINNING_CHARACTERS]
    return UnexpectedAnswer(
        f"{where} is no control plane: it answered {response.status_code} with {beginning!r}",
        hint=f"{URL} must be the address that comfyfleet serve or up has printed.",
    )


REFRESHES_PER_SECOND = 4


class UpdatableDisplay(Protocol):
    def update(self, renderable: RenderableType) -> None: ...


class _FinalDisplay:
    """Keeps what was shown last."""

    def __init__(self, shown: RenderableType | None) -> None:
        self.shown = shown

    def update(self, renderable: RenderableType) -> None:
        self.shown = renderable


@contextmanager
def live_display(
    console: Console, first: RenderableType | None = None
) -> Iterator[UpdatableDisplay]:
    if console.is_terminal:
        with Live(first, console=console, refresh_per_second=REFRESHES_PER_SECOND) as live:
            yield live
        return
    last = _FinalDisplay(first)
    try:
        yield last
    finally:
        if last.shown is not None:
            console.print(last.shown, soft_wrap=True)


PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 5.0
# So that thousands of jobs are not all asked for at each look: the oldest end first.
POLLED_JOBS_MAX = 20
AWAY_SECONDS_MAX = 300.0  # that a control plane, or its database, may be gone while one waits


def retry_while_away(
    look: Callable[[], dict[str, Any]],
    context: CliContext,
    what: str,
    sleep: Callable[[float], None],
) -> dict[str, Any]:
    """The answer, even if nobody can give it for a while: what is waited for doesn't end by that."""
    deadline = context.clock() + AWAY_SECONDS_MAX
    was_told = False
    while True:
        try:
            return look()
        except (ServerUnavailable, Unavailable) as error:
            if context.clock() > deadline:
                raise
            if not was_told:
                context.warn(f"{error.message}; {what}, trying again")
                was_told = True
            sleep(PAUSE_SECONDS)


@dataclass
class JobWaiter:
    """Looks at the jobs until each has ended."""

    plane: ApiClient
    context: CliContext
    tenant: str | None = None
    sleep: Callable[[float], None] = time.sleep
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wait(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.context.err,
            transient=True,
            disable=not self.context.err.is_terminal,
        ) as bar:
            line = bar.add_task("", total=len(ids) * 100, now="")
            pause = PAUSE_SECONDS
            while len(self.ended) < len(ids):
                before = len(self.ended)
                done, now = self._look(ids)
                bar.update(
                    line,
                    completed=done,
                    description=f"{len(self.ended)} of {len(ids)}",
                    now=printable(now),
                )
                # Nothing moved: the next look can wait a little longer.
                moved = len(self.ended) > before
                pause = PAUSE_SECONDS if moved else min(pause * 1.2, PAUSE_SECONDS_MAX)
                if len(self.ended) < len(ids):
                    self.sleep(pause)
        return [self.ended[each] for each in ids]

    def _look(self, ids: Sequence[str]) -> tuple[float, str]:
        """Percents done in all, and what the first that is not done does."""
        open_ = [each for each in ids if each not in self.ended][:POLLED_JOBS_MAX]
        percents, now = 0.0, ""
        for job_id in open_:
            get = partial(self.plane.get, "jobs", job_id, tenant_id=self.tenant)
            job = retry_while_away(get, self.context, "jobs go on", self.sleep)
            if job["status"] in ENDED:
                self.ended[job_id] = job
                continue
            percents += (job.get("progress") or {}).get("percent") or 0.0
            now = now or str(job.get("why") or job["status"])
        return len(self.ended) * 100 + percents, now
