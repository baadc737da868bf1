"""The operators' overview of the last hour, day or week, alerts, search, current settings, and live
changes as server-sent events.

All clients of a process share a single feed, which reads the database every half second while at
least one client is connected. Each client gets the changes since its own last event, so a slow
client gets fewer events and doesn't delay the others.
"""

import asyncio
import json
import logging
import re
from asyncio import get_running_loop
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from string import hexdigits
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from comfyfleet import __version__
from comfyfleet.api.console import (
    Alerts,
    FoundKind,
    FoundThing,
    FoundThings,
    Overview,
    OverviewNow,
    OverviewSeries,
    OverviewTotals,
    SettingAnswer,
    SettingsAnswer,
    WorkflowFigures,
)
from comfyfleet.api.values import is_storable
from comfyfleet.errors import FleetError, TooManyCalls
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Database, Tx, for_each_pool, metrics_queries
from comfyfleet.server.db.metrics_queries import FoundRow, IdSpan
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.gateway.model import job_id_of
from comfyfleet.server.http.admin.auth import OperatorDep, admin_router, authenticate_operator
from comfyfleet.server.http.deps import NowDep, PlaneDep, plane_of
from comfyfleet.server.http.streams import (
    HEADERS,
    MEDIA_TYPE,
    run_shielded,
    until_stop,
    until_unavailable,
)
from comfyfleet.server.jobs.context import in_maintenance
from comfyfleet.server.maintenance.checks import find_alerts
from comfyfleet.server.metrics import (
    RANGES,
    RUN,
    STATES,
    WAIT,
    Rollup,
    RollupPoint,
    SystemFigures,
    percentile_of,
    read_figures,
    read_rollup,
)
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch, DispatchStatus
from comfyfleet.settings import Settings, remarks, variable_of

router = admin_router()
WORKFLOWS_SHOWN_MAX = 20
RangeName = Literal["1h", "24h", "7d"]


@router.get("/overview")
async def overview(
    plane: PlaneDep,
    now: NowDep,
    within: Annotated[RangeName, Query(alias="range", description="1h, 24h or 7d.")] = "1h",
) -> Overview:
    """Returns the current numbers of jobs, statistics for the last hour, day or week, and alerts.

    The last step of the series is incomplete. Finished jobs are included after a minute or two.
    """
    span = RANGES[within]
    async with plane.central.read() as tx:
        figures = await read_figures(
            tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
        )
        rollup = await read_rollup(tx, span, now=now)
        slugs = {
            workflow.id: workflow.slug
            for workflow in await catalog.list_workflows(tx, with_open=True)
        }
        maintenance = await in_maintenance(tx)
    facts = [_facts(point) for point in rollup.points]
    columns = {
        name: [point_facts[name] for point_facts in facts] for name in OverviewTotals.model_fields
    }
    return Overview(
        range=within,
        step_seconds=span.step_seconds,
        now=now_view(figures, maintenance=maintenance),
        series=OverviewSeries(at=[point.at for point in rollup.points], **columns),
        totals=OverviewTotals(**_facts(rollup.total)),
        workflows=_workflows(rollup, figures, slugs),
        alerts=await find_alerts(plane, figures),
    )


@router.get("/alerts")
async def list_alerts(plane: PlaneDep, now: NowDep) -> Alerts:
    """Lists the problems that need an operator's attention, with recommended actions."""
    return Alerts(alerts=await find_alerts(plane, await _figures(plane, now)))


async def _figures(plane: ControlPlane, now: Any) -> SystemFigures:
    async with plane.central.read() as tx:
        return await read_figures(
            tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
        )


def _facts(point: RollupPoint) -> dict[str, Any]:
    return {
        "queued": round(point.mean("queued_seconds"), 2),
        "running": round(point.mean("leased_seconds"), 2),
        "completed": point.count("completed"),
        "failed": point.count("failed"),
        "cancelled": point.count("cancelled"),
        "success_rate": _rounded(point.success_rate, 4),
        "wait_p50_seconds": _rounded(point.percentile(WAIT, 0.5)),
        "wait_p95_seconds": _rounded(point.percentile(WAIT, 0.95)),
        "run_p50_seconds": _rounded(point.percentile(RUN, 0.5)),
        "run_p95_seconds": _rounded(point.percentile(RUN, 0.95)),
        "gpu_percent": _rounded(point.gpu_percent, 1),
        "busy_percent": _rounded(point.busy_percent, 1),
        "stayed": point.stayed,
        "switched": point.switched,
        "tokens": point.count("tokens"),
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def now_view(figures: SystemFigures, *, maintenance: bool) -> OverviewNow:
    workers = {
        state: sum(fleet.workers.get(state, 0) for fleet in figures.fleets) for state in STATES
    }
    return OverviewNow(
        queued=sum(lane.queued for lane in figures.lanes),
        running=sum(lane.running for lane in figures.lanes),
        held=sum(lane.held for lane in figures.lanes),
        oldest_seconds=round(max((lane.oldest_seconds for lane in figures.lanes), default=0.0), 1),
        slots=sum(fleet.slots for fleet in figures.fleets),
        workers=workers,
        maintenance=maintenance,
        waiting={f"{fleet.slug}/{fleet.stage}": fleet.queued for fleet in figures.fleets},
    )


def _workflows(
    rollup: Rollup, figures: SystemFigures, slugs: Mapping[int, str]
) -> list[WorkflowFigures]:
    total, *steps = (
        {slugs.get(workflow_id, "?"): sums for workflow_id, sums in point.workflows().items()}
        for point in (rollup.total, *rollup.points)
    )
    names = dict.fromkeys([*total, *(lane.workflow for lane in figures.lanes)])
    workflows = [
        _workflow(name, total.get(name, {}), [step.get(name, {}) for step in steps], figures)
        for name in names
    ]
    workflows.sort(key=lambda row: (-(row.completed + row.failed), -row.queued, row.workflow))
    return workflows[:WORKFLOWS_SHOWN_MAX]


def _workflow(
    name: str,
    sums: Mapping[str, float],
    steps: Sequence[Mapping[str, float]],
    figures: SystemFigures,
) -> WorkflowFigures:
    lanes = [lane for lane in figures.lanes if lane.workflow == name]
    completed = round(sums.get("completed", 0))
    mean = sums.get("run_seconds", 0.0) / completed if completed else None
    return WorkflowFigures(
        workflow=name,
        completed=completed,
        failed=round(sums.get("failed", 0)),
        cancelled=round(sums.get("cancelled", 0)),
        mean_run_seconds=_rounded(mean),
        wait_p95_seconds=_rounded(percentile_of(sums, WAIT, 0.95)),
        run_p95_seconds=_rounded(percentile_of(sums, RUN, 0.95)),
        ended=[round(step.get("completed", 0) + step.get("failed", 0)) for step in steps],
        queued=sum(lane.queued for lane in lanes),
        running=sum(lane.running for lane in lanes),
        held=sum(lane.held for lane in lanes),
    )


# Maximum number of search results of each kind.
FOUND_PER_KIND_MAX = 8
# A search for a prompt id includes this many of each pool's newest users.
USERS_SEARCHED_MAX = 5_000
ID_DIGITS_MIN, ID_DIGITS_MAX = 4, 32


@router.get("/search")
async def search(
    plane: PlaneDep,
    q: Annotated[
        str,
        Query(min_length=1, max_length=100, description="Part of a name, or the start of an id."),
    ],
) -> FoundThings:
    """Finds workers, tenants, effects and workflows by part of their name, and jobs and tenants by
    the start of their id. Prompts of ComfyUI clients are found by their full id."""
    text = q.strip()
    if not text or not is_storable(text):
        return FoundThings(found=[], pools_left_out=[])
    span, most = _id_span(text), FOUND_PER_KIND_MAX
    async with plane.central.read() as tx:
        rows = {
            FoundKind.WORKFLOW: await metrics_queries.find_workflows(tx, text, limit=most),
            FoundKind.EFFECT: await metrics_queries.find_effects(tx, text, limit=most),
            FoundKind.WORKER: await metrics_queries.find_workers(tx, text, limit=most),
            FoundKind.TENANT: await metrics_queries.find_tenants(tx, text, span, limit=most),
        }
    jobs = {} if span is None else await _jobs(plane, span)
    things = [_thing(FoundKind.JOB, row) for some in jobs.values() for row in some][:most]
    things += [_thing(kind, row) for kind, some in rows.items() for row in some]
    down = [] if span is None else [name for name in plane.pools if name not in jobs]
    return FoundThings(found=things, pools_left_out=down)


def _id_span(text: str) -> IdSpan | None:
    digits = text.replace("-", "").lower()
    is_id = ID_DIGITS_MIN <= len(digits) <= ID_DIGITS_MAX and not set(digits) - set(hexdigits)
    return IdSpan.starting_with(digits) if is_id else None


async def _jobs(plane: ControlPlane, span: IdSpan) -> dict[str, list[FoundRow]]:
    async def read(pool: Database) -> list[FoundRow]:
        async with pool.read() as tx:
            rows = await metrics_queries.find_jobs(tx, span, limit=FOUND_PER_KIND_MAX)
            return rows or await _jobs_of_prompt(tx, span)

    return await for_each_pool(plane.pools, read, "its jobs can't be searched", at_once=True)


async def _jobs_of_prompt(tx: Tx, span: IdSpan) -> list[FoundRow]:
    """Finds jobs by prompt id. A job's id is derived from the ids of its user and prompt, so the
    ids are computed for all recent users."""
    if span.first != span.last:
        return []
    users = await metrics_queries.newest_users(tx, limit=USERS_SEARCHED_MAX)
    ids = [job_id_of(tenant_id, user_id, str(span.first)) for tenant_id, user_id in users]
    return await metrics_queries.find_jobs_among(tx, ids, limit=FOUND_PER_KIND_MAX)


DETAILS = {
    FoundKind.EFFECT: {True: "published", False: "not published"},
    FoundKind.WORKFLOW: {True: "active", False: "not active"},
}


def _thing(kind: FoundKind, row: FoundRow) -> FoundThing:
    detail = DETAILS[kind][bool(row.detail)] if kind in DETAILS else str(row.detail)
    return FoundThing(kind=kind, id=str(row.id), name=row.name, detail=detail)


SECRET_WORDS = ("key", "secret", "password", "token")
MASK = "(set)"
# A password in a URL may contain slashes and commas. In a list of URLs, it ends at the last @
# before the next URL starts.
_PASSWORD = re.compile(r"(://[^:/@\s]*):(?:(?!://)\S)+@")
_SECRET_IN_QUERY = re.compile(
    rf"([?&][^=&,]*(?:{'|'.join(SECRET_WORDS)})[^=&,]*=)(?:(?!,[^,=&]*=\w+:)[^&])+",
    re.IGNORECASE,
)


@router.get("/settings")
async def settings_in_force(plane: PlaneDep, request: Request) -> SettingsAnswer:
    """Returns the current settings of this control plane. Secrets and passwords are masked."""
    answers = [
        SettingAnswer(
            name=setting.name,
            variable=variable_of(setting.name),
            value=masked(setting.name, getattr(plane.settings, setting.name)),
            remark=remarks().get(setting.name, ""),
            is_default=getattr(plane.settings, setting.name) == setting.default,
        )
        for setting in fields(Settings)
    ]
    return SettingsAnswer(
        version=__version__, has_editor=request.app.state.has_editor, settings=answers
    )


def masked(name: str, value: Any) -> str | int | float | bool:
    """Returns a setting's value for display. Secrets, including those inside URLs, are masked."""
    if isinstance(value, int | float):
        return value
    text = str(value)
    if text and any(word in name for word in SECRET_WORDS):
        return MASK
    return _SECRET_IN_QUERY.sub(r"\1(set)", _PASSWORD.sub(r"\1:(set)@", text))


logger = logging.getLogger(__name__)
# Seconds between reads of the feed, and between the slower reads of counts, alerts and slugs.
LOOK_SECONDS = 0.5
COUNT_SECONDS, ALERT_SECONDS, SLUG_SECONDS = 2.0, 10.0, 10.0
# Maximum share of the time that is spent reading counts. After a slow read, the next one is delayed
# accordingly.
SHARE_MAX = 0.1
# Maximum numbers of new jobs, running jobs and workers in the feed.
NEWEST_MAX, LEASED_MAX, WORKERS_MAX = 100, 200, 500
STREAMS_PER_OPERATOR_MAX, STREAMS_MAX = 20, 200
STREAM_SECONDS_MAX = 3600.0
# Seconds between two checks of a stream's key.
KEY_SECONDS = 3.0
# A comment is sent after this many seconds without an event, so that proxies keep the connection
# open.
SAY_SECONDS = 15.0
RETRY_MILLISECONDS = 2000
RETRY_SECONDS = 10


@dataclass(frozen=True)
class ConsoleSnapshot:
    """The state of the feed at one moment. Jobs and workers are mapped by id."""

    counts: Mapping[str, Any] = field(default_factory=dict)
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alerts: tuple[Mapping[str, Any], ...] | None = None
    newest_audit: int | None = None


def events_between(before: ConsoleSnapshot, after: ConsoleSnapshot) -> Iterator[tuple[str, Any]]:
    """Yields the kind and data of each change.

    Jobs that disappear cause no event. They have finished, or the feed has reached its limit.
    """
    if after.counts != before.counts:
        yield "counts", after.counts
    jobs = [job for name, job in after.jobs.items() if before.jobs.get(name) != job]
    if jobs:
        yield "jobs", {"jobs": jobs}
    workers = [
        worker for name, worker in after.workers.items() if before.workers.get(name) != worker
    ]
    removed = [name for name in before.workers if name not in after.workers]
    if workers or removed:
        yield "workers", {"workers": workers, "gone": removed}
    if after.alerts is not None and after.alerts != before.alerts:
        yield "alerts", {"alerts": list(after.alerts)}
    if after.newest_audit is not None and after.newest_audit != before.newest_audit:
        yield "audit", {"newest": after.newest_audit}


class ConsoleFeed:
    """Reads changes while at least one client is connected, and wakes the clients."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._watchers: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Event = asyncio.Event()
        self._leased: frozenset[int] = frozenset()
        self._slugs: Mapping[int, str] = {}
        self._due: dict[str, float] = {}
        self.snapshot = ConsoleSnapshot()

    @contextmanager
    def watching(self, operator: str) -> Iterator[None]:
        self.require_room(operator)
        self._watchers[operator] += 1
        if self._task is None:
            self._task = get_running_loop().create_task(self._run(), name="console feed")
        try:
            yield
        finally:
            self._watchers[operator] -= 1
            self._watchers += Counter()  # removes counts of zero
            if not self._watchers:
                self._stop()

    def require_room(self, operator: str) -> None:
        if (
            self._watchers[operator] >= STREAMS_PER_OPERATOR_MAX
            or self._watchers.total() >= STREAMS_MAX
        ):
            self._watchers += Counter()
            raise TooManyCalls(
                f"too many open event streams: at most {STREAMS_PER_OPERATOR_MAX} per operator",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self._leased, self._slugs, self._due = None, frozenset(), {}, {}
        self.snapshot = ConsoleSnapshot()

    async def changed(self, seconds: float) -> None:
        """Waits until the feed has read the database again, but no longer than the given
        seconds."""
        waiting = self._next
        try:
            async with asyncio.timeout(seconds):
                await waiting.wait()
        except TimeoutError:
            return

    async def _run(self) -> None:
        while True:
            try:
                self.snapshot = await run_shielded(self._look())
                self._next.set()
                self._next = asyncio.Event()
            except Exception as error:  # noqa: BLE001 — the next read may succeed
                log_failure(logger, error, "console clients get no updates")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> ConsoleSnapshot:
        seen = self.snapshot
        if self._is_due("slugs", SLUG_SECONDS):
            async with self._plane.central.read() as tx:
                workflows = await catalog.list_workflows(tx, with_open=True)
            self._slugs = {workflow.id: workflow.slug for workflow in workflows}
        seen = replace(seen, jobs=await self._read_jobs())
        if self._is_due("counts", COUNT_SECONDS):
            seen = await self._counted(seen)
        return seen

    def _is_due(self, name: str, seconds: float) -> bool:
        now = get_running_loop().time()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + seconds
        return True

    async def _counted(self, seen: ConsoleSnapshot) -> ConsoleSnapshot:
        plane, begun = self._plane, get_running_loop().time()
        now, offline_after = plane.clock(), plane.settings.offline_after_seconds
        unseen_max = plane.settings.unseen_seconds_max
        async with plane.central.read() as tx:
            figures = await read_figures(tx, now=now, offline_after_seconds=offline_after)
            maintenance = await in_maintenance(tx)
            workers = await fleets.workers_of(tx, None, limit=WORKERS_MAX)
            leases = await dispatch.count_leases(tx)
            audited = await notifications.find_audit_entries(tx, limit=1)
        alerts = seen.alerts
        if self._is_due("alerts", ALERT_SECONDS):
            alerts_found = await find_alerts(plane, figures)
            alerts = tuple(alert.model_dump(mode="json") for alert in alerts_found)
        took = get_running_loop().time() - begun
        self._due["counts"] = max(self._due.get("counts", 0.0), begun + took / SHARE_MAX)
        shown = {
            worker.worker_id: {
                "worker_id": worker.worker_id,
                "fleet": worker.fleet_name,
                "state": worker.state_at(now, offline_after_seconds=offline_after),
                "current_load": worker.load_with(leases.get(worker.worker_id, 0)),
                "max_concurrency": worker.max_concurrency,
                "models_loaded": list(worker.models_loaded),
                "silent_since": _text_of(worker.silent_since(now, unseen_seconds_max=unseen_max)),
            }
            for worker in workers
        }
        counts = now_view(figures, maintenance=maintenance).model_dump(mode="json")
        newest = audited[0].id if audited else None
        return replace(seen, counts=counts, workers=shown, alerts=alerts, newest_audit=newest)

    async def _read_jobs(self) -> dict[str, Mapping[str, Any]]:
        async with self._plane.central.read() as tx:
            rows = await dispatch.newest(tx, limit=NEWEST_MAX)
            leased = await dispatch.list_dispatches(
                tx, status=DispatchStatus.LEASED, limit=LEASED_MAX
            )
            rows_by_id = {row.id: row for row in (*rows, *leased)}
            # Includes dispatches whose leases have ended since the last read.
            ended = await dispatch.get_many(tx, self._leased - rows_by_id.keys())
        self._leased = frozenset(row.id for row in leased)
        rows_by_id |= {row.id: row for row in ended}
        return {str(row.job_id): self._job(row) for row in rows_by_id.values()}

    def _job(self, row: Dispatch) -> Mapping[str, Any]:
        is_leased = row.status is DispatchStatus.LEASED
        progress = self._plane.context.caches.progress.of(row.lease_token) if is_leased else None
        return {
            "id": str(row.job_id),
            "dispatch_id": row.id,
            "tenant_id": str(row.tenant_id),
            "workflow": self._slugs.get(row.lane.workflow_id, "?"),
            "status": row.status,
            "priority": row.priority,
            "attempt": row.attempts,
            "worker_id": row.worker_id,
            "percent": progress.percent if progress else None,
            "node": progress.node if progress else None,
            "error": row.last_error,
            "created_at": row.created_at.isoformat(),
            "started_at": row.started_at and row.started_at.isoformat(),
            "ended_at": row.ended_at and row.ended_at.isoformat(),
        }


def _text_of(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def feed_of(request: Request, plane: ControlPlane) -> ConsoleFeed:
    state = request.app.state
    if not hasattr(state, "console_feed"):
        state.console_feed = ConsoleFeed(plane)
    feed: ConsoleFeed = state.console_feed
    return feed


class ConsoleStream(StreamingResponse):
    """An event stream for operators, which counts toward the limits until it is closed."""

    def __init__(self, request: Request, feed: ConsoleFeed, operator: str) -> None:
        feed.require_room(operator)
        self._feed, self._operator = feed, operator
        lines = until_stop(until_unavailable(_lines(request, feed)), plane_of(request).stopping)
        super().__init__(lines, media_type=MEDIA_TYPE, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.watching(self._operator):
            await super().__call__(scope, receive, send)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {MEDIA_TYPE: {}},
            "description": "Events named counts, jobs, workers, alerts and audit.",
        }
    },
)
async def watch(request: Request, plane: PlaneDep, operator: OperatorDep) -> StreamingResponse:
    """Streams changes as server-sent events with JSON data.

    The events are `counts`, `jobs`, `workers`, `alerts` and `audit` (the id of the newest audit
    entry). Each is sent at most twice a second. The first events contain the complete state, and
    later ones contain only changes. A slow client gets fewer events, but never outdated ones.
    """
    return ConsoleStream(request, feed_of(request, plane), operator)


async def _lines(request: Request, feed: ConsoleFeed) -> AsyncIterator[str]:
    clock = get_running_loop().time
    started = sent_at = checked_at = clock()
    sent = ConsoleSnapshot()
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    while clock() - started < STREAM_SECONDS_MAX:
        seen = feed.snapshot
        for kind, data in events_between(sent, seen):
            sent_at = clock()
            yield f"event: {kind}\ndata: {json.dumps(data, default=str)}\n\n"
        sent = seen
        if clock() - sent_at >= SAY_SECONDS:
            sent_at = clock()
            yield ": still there\n\n"
        if clock() - checked_at >= KEY_SECONDS:
            checked_at = clock()
            if not await run_shielded(_may_watch(request)):
                return
        await feed.changed(LOOK_SECONDS * 2)


async def _may_watch(request: Request) -> bool:
    """Checks whether the key or session that opened the stream is still valid."""
    try:
        await authenticate_operator(request)
    except FleetError:
        return False
    return True
