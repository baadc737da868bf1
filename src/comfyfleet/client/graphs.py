"""Graphs of a tenant (store, validate, quote, run), and graph runs (follow, answer, wait,
download)."""

import asyncio
import csv
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote
from uuid import UUID, uuid4

from pydantic import ValidationError

from comfyfleet.api.expressions import MISSING
from comfyfleet.api.graph_model import ANY, MEDIA, SCALAR_TYPES, PortType, holds
from comfyfleet.api.graph_reports import RunComparison, RunTimeline
from comfyfleet.api.graphs import (
    Choice,
    GraphEvent,
    GraphPage,
    GraphRunSummaries,
    GraphRunSummary,
    GraphSummary,
    Verdict,
    WorkflowOffer,
    WorkflowOffers,
)
from comfyfleet.client.files import download_file
from comfyfleet.client.jobs import free_path
from comfyfleet.client.model import (
    Graph,
    GraphRun,
    Media,
    Quote,
)
from comfyfleet.client.transport import (
    PAGE,
    ApiCalls,
    ResumableStream,
    fetch_pages,
    parse_answer,
)
from comfyfleet.errors import InvalidInput, RunFailed, RunTimedOut
from comfyfleet.transport.files import Transferred
from comfyfleet.transport.http import Call
from comfyfleet.transport.sse import ServerEvent

POLL_SECONDS = 0.5
POLL_SECONDS_MAX = 5.0


class GraphRunHandle:
    """Follows a graph run: waits, streams events, answers questions and downloads results. `run` is
    its state as of the last call.

    `idempotency_key` is the key it was submitted with, if this client submitted it."""

    def __init__(
        self, calls: ApiCalls, run: GraphRun, *, idempotency_key: str | None = None
    ) -> None:
        self._calls = calls
        self.run = run
        self.idempotency_key = idempotency_key

    @property
    def id(self) -> UUID:
        return self.run.id

    @property
    def _path(self) -> str:
        return f"/api/graph-runs/{self.id}"

    def __repr__(self) -> str:
        return f"GraphRunHandle({self.id}, {self.run.status})"

    async def refresh(self, *, executions: int | None = None) -> GraphRun:
        """Reads the run with at most this many executions. None means the API's default number."""
        call = Call("GET", self._path, params={"executions": executions})
        return self._heard(parse_answer(GraphRun, await self._calls.ask(call)))

    def _heard(self, run: GraphRun) -> GraphRun:
        self.run = run
        return run

    async def events(self) -> AsyncGenerator[GraphEvent, None]:
        """Yields the run's state whenever it changes, until the run ends. Polls if streams aren't
        available."""
        listening = ResumableStream(self._calls, f"{self._path}/events", _parse_event)
        async with aclosing(listening.all_events()) as stream:
            async for event in stream:
                listening.is_over |= event.ends_run
                if not event.ends_run or event.kind == "end":
                    yield event  # the last progress event is repeated as the end event
        if not listening.is_over:
            async with aclosing(self._polled()) as polled:
                async for event in polled:
                    yield event

    async def _polled(self) -> AsyncGenerator[GraphEvent, None]:
        last_event: GraphEvent | None = None
        seconds = POLL_SECONDS
        while True:
            event = _as_event(await self.refresh())
            if event != last_event:
                last_event, seconds = event, POLL_SECONDS
                yield event
            if event.ends_run:
                return
            await self._calls.retry.sleep(seconds)
            seconds = min(seconds * 1.5, POLL_SECONDS_MAX)

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        check: bool = True,
        until_asked: bool = False,
        on_event: Callable[[GraphEvent], None] | None = None,
    ) -> GraphRun:
        """Waits until the run ends, or with `until_asked` until it needs an answer. Returns the
        run.

        Raises RunFailed if the run did not succeed, unless `check` is off. Raises RunTimedOut after
        the timeout. The run then continues, and you can wait for it again."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(until_asked, on_event)
        except TimeoutError as error:
            raise RunTimedOut(
                f"graph run {self.id} has not ended within {timeout_seconds} s; it is still running",
                run_id=str(self.id),
            ) from error
        if check and self.run.status in ("failed", "cancelled"):
            error_ = self.run.error
            raise RunFailed(
                error_.message if error_ else f"graph run {self.id} was {self.run.status}",
                run_id=str(self.id),
                status=self.run.status,
                node=error_.node if error_ else None,
            )
        return self.run

    async def _ended(
        self, until_asked: bool, on_event: Callable[[GraphEvent], None] | None
    ) -> None:
        await self.refresh()
        while not self._is_reached(until_asked):
            async with aclosing(self.events()) as events:
                async for event in events:
                    if on_event:
                        on_event(event)
                    if until_asked and event.status == "waiting_for_user":
                        break
            await self.refresh()

    def _is_reached(self, until_asked: bool) -> bool:
        return self.run.has_ended or (until_asked and self.run.status == "waiting_for_user")

    async def timeline(self) -> RunTimeline:
        """Returns when each node waited, ran and ended, and the critical path."""
        call = Call("GET", f"{self._path}/timeline")
        return parse_answer(RunTimeline, await self._calls.ask(call))

    async def cancel(self) -> GraphRun:
        """Cancels the run and stops its jobs, including running jobs on backends. Has no effect on
        a run that has ended."""
        return await self._act("cancel", {}, is_repeatable=True)

    async def pause(self) -> GraphRun:
        """Pauses the run. It starts no more jobs, but submitted jobs continue."""
        return await self._act("pause", {}, is_repeatable=True)

    async def resume(self) -> GraphRun:
        """Continues a paused run."""
        return await self._act("resume", {}, is_repeatable=True)

    async def retry(self, *, backend: str | None = None, max_tokens: int | None = None) -> GraphRun:
        """Retries the run from where it failed, on the backend `worker:ID` if given. Existing
        results are reused.

        `max_tokens` raises the spending limit of the whole run, if it is higher than before."""
        return await self._act("retry", {"backend": backend, "max_tokens": max_tokens})

    async def rerun(
        self,
        start: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        version: int | None = None,
        max_tokens: int | None = None,
        idempotency_key: str | None = None,
    ) -> "GraphRunHandle":
        """Starts a new run that keeps the results before the node `start`. Without `start`, it
        keeps all results that are still valid.

        `inputs` contains only changed inputs. `changes` are properties to set, named
        `node.property`."""
        key = idempotency_key or str(uuid4())
        body = {
            "from": start,
            "inputs": _plain(inputs or {}),
            "set": _plain(changes or {}),
            "version": version,
            "max_tokens": max_tokens,
            "idempotency_key": key,
        }
        call = Call("POST", f"{self._path}/rerun", body, is_repeatable=True)
        run = parse_answer(GraphRun, await self._calls.ask(call))
        return GraphRunHandle(self._calls, run, idempotency_key=key)

    async def answer(
        self,
        choice: Choice | str,
        *,
        node: str | None = None,
        index: Sequence[int] = (),
        backend: str | None = None,
        picked: Sequence[int] | None = None,
        for_all: bool = False,
    ) -> GraphRun:
        """Answers a node's question. The node may be omitted if there is only one question.
        `for_all` answers for all its items."""
        fields: dict[str, Any] = {"choice": choice, "node": node, "index": list(index)}
        fields |= {
            "backend": backend,
            "picked": None if picked is None else list(picked),
            "for_all": for_all,
        }
        return await self._act("answer", fields)

    async def _act(
        self, act: str, body: dict[str, Any], *, is_repeatable: bool = False
    ) -> GraphRun:
        call = Call("POST", f"{self._path}/{act}", body, is_repeatable=is_repeatable)
        return self._heard(parse_answer(GraphRun, await self._calls.ask(call)))

    async def download(self, folder: Path, *, progress: Transferred | None = None) -> list[Path]:
        """Saves all files among the run's outputs. Existing files are not overwritten.

        If there are several, their names start with a number, such as `01_`, to keep their order in
        the folder."""
        return [path async for path in self.saved_files(folder, progress=progress)]

    async def saved_files(
        self, folder: Path, *, progress: Transferred | None = None
    ) -> AsyncGenerator[Path, None]:
        """Saves files like `download`, and yields each path once its file is saved."""
        run = await self.refresh(executions=0)  # returns fresh URLs
        width = len(str(len(run.files)))
        for number, file in enumerate(run.files, start=1):
            front = f"{number:0{width}}_" if len(run.files) > 1 else ""
            path = free_path(folder, front + file.filename)
            yield await download_file(self._calls, file.url, path, progress)


def _parse_event(event: ServerEvent) -> GraphEvent | None:
    """Parses an event of a run. Returns None for others, such as keep-alive events."""
    try:
        data = json.loads(event.data)
        return GraphEvent.model_validate({**data, "kind": event.name})
    except (ValueError, TypeError, ValidationError):
        return None


def _as_event(run: GraphRun) -> GraphEvent:
    return GraphEvent(
        kind="end" if run.has_ended else "progress",
        run_id=run.id,
        status=run.status,
        nodes=run.nodes,
        questions=run.questions,
        error=run.error.message if run.error else None,
        paused_at=run.paused_at,
        **dict(run.progress),
    )


class GraphsApi:
    """Graphs. A document is a mapping, or text in JSON or YAML. A graph can be given as an object,
    an id or a name."""

    def __init__(self, calls: ApiCalls) -> None:
        self._calls = calls

    async def create(self, document: Mapping[str, Any] | str) -> Graph:
        """Stores a graph. A graph with the same name and content is stored only once.

        Raises InvalidInput with all problems in `details["problems"]`."""
        body = {"document": _document(document)}
        return parse_answer(Graph, await self._calls.ask(Call("POST", "/api/graphs", body)))

    async def delete(self, graph: Graph | UUID | str) -> None:
        """Deletes a graph. Only its creator can do this. Its runs remain."""
        await self._calls.ask(Call("DELETE", _path(graph)))

    async def offered(self) -> list[WorkflowOffer]:
        """Returns everything that a node can use: published effects and offered workflows, with
        their properties."""
        return list(
            parse_answer(
                WorkflowOffers, await self._calls.ask(Call("GET", "/api/workflows"))
            ).workflows
        )

    async def new_version(
        self, graph: Graph | UUID | str, document: Mapping[str, Any] | str
    ) -> Graph:
        """Stores a new version of a graph. Active runs keep the version they were started with."""
        call = Call("POST", f"{_path(graph)}/versions", {"document": _document(document)})
        return parse_answer(Graph, await self._calls.ask(call))

    async def validate(self, document: Mapping[str, Any] | str) -> Verdict:
        """Validates a graph without storing it."""
        body = {"document": _document(document)}
        call = Call("POST", "/api/graphs/validate", body, is_repeatable=True)
        return parse_answer(Verdict, await self._calls.ask(call))

    async def validate_stored(self, graph: Graph | UUID | str) -> Verdict:
        """Checks whether a stored graph could run now, because workflows and workers may have
        changed."""
        call = Call("POST", f"{_path(graph)}/validate", is_repeatable=True)
        return parse_answer(Verdict, await self._calls.ask(call))

    async def get(self, graph: Graph | UUID | str, *, version: int | None = None) -> Graph:
        call = Call("GET", _path(graph), params={"version": version})
        return parse_answer(Graph, await self._calls.ask(call))

    async def all(self, *, page_size: int = PAGE) -> AsyncIterator[GraphSummary]:
        """Yields the tenant's graphs, newest first."""
        async for page in fetch_pages(self._calls, "/api/graphs", GraphPage, {"limit": page_size}):
            for graph in page.graphs:
                yield graph

    async def quote(
        self,
        graph: Graph | UUID | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> Quote:
        """Estimates the price and duration of a run. Without inputs, assumes the maximum length for
        each list."""
        body = {"inputs": _plain(inputs or {}), "version": version}
        call = Call("POST", f"{_path(graph)}/quote", body, is_repeatable=True)
        return parse_answer(Quote, await self._calls.ask(call))

    async def run(
        self,
        graph: Graph | UUID | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        max_tokens: int | None = None,
        idempotency_key: str | None = None,
    ) -> GraphRunHandle:
        """Starts a run, exactly once. Retries use the same key, which is generated if none is
        given.

        Inputs are named after their nodes. A file is given as the media item that `upload`
        returned."""
        key = idempotency_key or str(uuid4())
        body = {
            "inputs": _plain(inputs or {}),
            "version": version,
            "max_tokens": max_tokens,
            "idempotency_key": key,
        }
        call = Call("POST", f"{_path(graph)}/runs", body, is_repeatable=True)
        run = parse_answer(GraphRun, await self._calls.ask(call))
        return GraphRunHandle(self._calls, run, idempotency_key=key)

    async def run_document(
        self,
        document: Mapping[str, Any] | str,
        inputs: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        idempotency_key: str | None = None,
    ) -> GraphRunHandle:
        """Starts a run like `run`. Also stores the graph, unless the run is refused."""
        key = idempotency_key or str(uuid4())
        body = {
            "document": _document(document),
            "inputs": _plain(inputs or {}),
            "max_tokens": max_tokens,
            "idempotency_key": key,
        }
        call = Call("POST", "/api/graph-runs", body, is_repeatable=True)
        run = parse_answer(GraphRun, await self._calls.ask(call))
        return GraphRunHandle(self._calls, run, idempotency_key=key)

    async def get_run(self, run_id: UUID | str) -> GraphRunHandle:
        answer = await self._calls.ask(Call("GET", f"/api/graph-runs/{run_id}"))
        return GraphRunHandle(self._calls, parse_answer(GraphRun, answer))

    async def compare(
        self, a: UUID | str, b: UUID | str, *, with_same: bool = False
    ) -> RunComparison:
        """Compares two runs. Returns their differences or, with `with_same`, all values."""
        params = {"a": str(a), "b": str(b), "all": with_same or None}
        call = Call("GET", "/api/graph-runs/compare", params=params)
        return parse_answer(RunComparison, await self._calls.ask(call))

    async def runs(
        self,
        *,
        graph: Graph | UUID | str | None = None,
        status: str | None = None,
        rerun_of: UUID | str | None = None,
        page_size: int = PAGE,
    ) -> AsyncIterator[GraphRunSummary]:
        """Yields the user's runs, newest first. With `rerun_of`, yields only reruns of that run."""
        graph_id = None if graph is None else _id(graph)
        query = {"graph_id": graph_id, "status": status, "limit": page_size}
        query["rerun_of"] = None if rerun_of is None else str(rerun_of)
        async for page in fetch_pages(self._calls, "/api/graph-runs", GraphRunSummaries, query):
            for run in page.runs:
                yield run


ROWS_MAX = 10_000
TABLE_BYTES_MAX = 32 * 1024**2
CELLS_TOLD_MAX = 20
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_TRUTHS = {"true": True, "false": False}


def rows_from(path: Path | str, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Reads a table from a .csv or .jsonl file, as a list of objects for an input of a graph.

    `columns` are the column types of the graph's input. Without them, all values of a CSV file are
    text. Media cells are file paths relative to the table's folder, to be uploaded. Empty cells in
    non-text columns are left out. Raises InvalidInput with the row and column of each invalid
    cell."""
    path = Path(path)
    kinds = {name: SCALAR_TYPES.get(kind, ANY) for name, kind in (columns or {}).items()}
    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    for number, cells in enumerate(_read_rows(path, kinds), start=1):
        if number > ROWS_MAX:
            raise InvalidInput(f"{path} has more than {ROWS_MAX:,} rows")
        row: dict[str, Any] = {}
        for name, cell in cells.items():
            value = _cell(cell, kinds.get(name, ANY), path.parent)
            if value is MISSING:
                message = f"row {number}, column {name}: takes {kinds[name]}, not {cell!r:.60}"
                problems.append(message)
            elif value is not None:
                row[name] = value
        rows.append(row)
    if problems:
        more = len(problems) - CELLS_TOLD_MAX
        shown = [*problems[:CELLS_TOLD_MAX], *([f"and {more} more"] if more > 0 else [])]
        lines = "\n".join(f"  {problem}" for problem in shown)
        raise InvalidInput(
            f"{path} has invalid cells:\n{lines}", problems=problems[:CELLS_TOLD_MAX]
        )
    return rows


def _read_rows(path: Path, kinds: Mapping[str, PortType]) -> Iterator[dict[str, Any]]:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl", ".ndjson"):
        raise InvalidInput(f"{path} isn't a table; use a .csv or .jsonl file")
    try:
        if path.stat().st_size > TABLE_BYTES_MAX:
            raise InvalidInput(f"{path} is larger than {TABLE_BYTES_MAX:,} bytes")
        with path.open(encoding="utf-8-sig", newline="" if suffix == ".csv" else None) as file:
            yield from _csv_rows(path, file, kinds) if suffix == ".csv" else _json_rows(path, file)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} isn't valid UTF-8") from None


def _csv_rows(path: Path, file: TextIO, kinds: Mapping[str, PortType]) -> Iterator[dict[str, Any]]:
    lines = csv.reader(file, strict=True)
    try:
        header = next(lines, [])
        if not header or len(set(header)) < len(header) or not all(header):
            raise InvalidInput(f"{path}: the first line must have a unique name for each column")
        lacking = [name for name in kinds if name not in header]
        if lacking:
            raise InvalidInput(
                f"{path} has no column {', '.join(lacking)}; it has {', '.join(header)}"
            )
        for cells in lines:
            if len(cells) > len(header):
                place = f"{path}, line {lines.line_num}"
                raise InvalidInput(
                    f"{place}: there are {len(cells)} cells, but only {len(header)} columns"
                )
            if cells:
                yield dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {lines.line_num}: {error}") from None


def _json_rows(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}, line {number} isn't valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInput(f"{path}, line {number} must be an object")
        yield row


def _cell(cell: Any, kind: PortType, folder: Path) -> Any:
    """Returns the value of a cell. Returns None for an empty cell, and MISSING if the value has
    another type."""
    if cell is None or (cell == "" and kind.name not in ("any", "text", "choice")):
        return None
    if kind.name in MEDIA and isinstance(cell, str):
        return folder / cell if (folder / cell).is_file() else MISSING
    value = _typed(cell, kind.name) if isinstance(cell, str) else cell
    return value if holds(kind, value) else MISSING


def _typed(text: str, kind: str) -> Any:
    if kind == "boolean":
        return _TRUTHS.get(text.strip().lower(), text)
    if kind in ("integer", "seed", "number") and _WHOLE.fullmatch(text.strip()):
        return int(text)
    if kind == "number":
        try:
            number = float(text)
        except ValueError:
            return text
        return number if math.isfinite(number) else text
    return text


def _id(graph: Graph | UUID | str) -> str:
    return str(graph.id if isinstance(graph, Graph) else graph)


def _path(graph: Graph | UUID | str) -> str:
    return f"/api/graphs/{quote(_id(graph), safe='')}"


def _document(document: Mapping[str, Any] | str) -> Any:
    return document if isinstance(document, str) else dict(document)


def _plain(value: Any) -> Any:
    """Returns a JSON-compatible copy, with media and UUIDs as id strings."""
    if isinstance(value, Media):
        return str(value.id)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
