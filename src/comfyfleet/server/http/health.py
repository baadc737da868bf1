"""Health checks and Prometheus metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from comfyfleet import __version__
from comfyfleet.errors import (
    LOGGED,
    FleetError,
    StoreFull,
    Unauthenticated,
    Unavailable,
    is_logged,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.counters import SiblingProcesses
from comfyfleet.server.db import Database
from comfyfleet.server.db.outages import OutageLog
from comfyfleet.server.db.schema import History, require_newest_schema
from comfyfleet.server.http.connections import note_valid_key
from comfyfleet.server.http.tallies import METRICS
from comfyfleet.server.maintenance.cloudwatch import scaling_figures, wanted_by
from comfyfleet.server.metrics import (
    GRAPH_RUNS,
    JOB_SECONDS,
    JOBS,
    KINDS,
    PIPELINE_RUNS,
    STATES,
    EndedCounts,
    OutcomeCounters,
    RunFigures,
    SystemFigures,
    read_figures,
    read_run_figures,
)
from comfyfleet.server.queue.switch_costs import Estimate, ModelOfFleet
from comfyfleet.server.secrets import hash_key, is_key_of_hash
from comfyfleet.server.storage import ObjectStore

T = TypeVar("T")
router = APIRouter(tags=["health"])
logger = logging.getLogger(__name__)
# The timeout of a check, and the minimum interval between frequent checks. An outage is visible
# after at most their sum, which is less than two seconds.
CHECK_SECONDS_MAX = 1.4
READY_SECONDS = 0.5
# Maximum number of consecutive calls that each compute a new result.
AT_ONCE = 20
FINE = "ok"
STORE, CENTRAL = NEEDED = ("store", "central")  # the parts that every request needs
NOT_WRITABLE = "store_not_writable"
# Results of the store check that leave downloads and the API working.
_READABLE = (StoreFull.code, NOT_WRITABLE)


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": FINE, "version": __version__}


@router.get("/readyz")
async def ready(request: Request, response: Response) -> dict[str, object]:
    """Checks whether this control plane can serve requests.

    Returns 200 if the central database, its schema and the store are available, and otherwise 503.
    A control plane that is stopping returns 503 as well.

    The status is `degraded`, still with 200, if a pool is down, which affects only the pool's own
    tenants. It is also `degraded` if the store is full (`store_full`) or rejects writes
    (`store_not_writable`). Downloads and the API still work in these cases, and a 503 would make a
    load balancer remove every control plane. Only the log contains the reason, because this route
    is public.
    """
    stop: asyncio.Event | None = getattr(request.app.state, "stop", None)
    if stop is not None and stop.is_set():
        response.status_code = 503
        return {"status": "stopping", "checks": {}}
    plane: ControlPlane = request.app.state.plane
    checks: _RecentResult[dict[str, str]] = request.app.state.ready
    log: _ReadinessLog = request.app.state.ready_log
    codes = await checks.get(lambda: _check_all(plane, log))
    is_ready = codes[CENTRAL] == FINE and codes[STORE] in (FINE, *_READABLE)
    response.status_code = 200 if is_ready else 503
    return {"status": _status(codes, is_ready=is_ready), "checks": codes}


async def _check_all(plane: ControlPlane, log: "_ReadinessLog") -> dict[str, str]:
    parts = _parts(plane)
    results = await asyncio.gather(
        *(_run_check(part.check, part.outages) for part in parts.values())
    )
    for name, result in zip(parts, results, strict=True):
        log.note(name, result)
    return {name: result.code for name, result in zip(parts, results, strict=True)}


class _CheckResult(NamedTuple):
    code: str
    reason: str = ""  # the cause, which is only logged
    is_logged: bool = False  # whether the failure was already logged as an outage


class _ReadinessLog:
    """Logs the start and the end of each failure once, regardless of how often the checks run.

    Outages of a database or of the store are logged elsewhere, so they are logged here at DEBUG.
    """

    def __init__(self) -> None:
        self._levels: dict[str, int] = {}  # log levels of current failures, by check

    def note(self, name: str, result: _CheckResult) -> None:
        if result.code != FINE and name not in self._levels:
            self._levels[name] = level = logging.DEBUG if result.is_logged else logging.WARNING
            state = "not ready" if name in NEEDED and result.code not in _READABLE else "degraded"
            logger.log(level, "%s: %s: %s", state, name, result.reason or result.code)
        elif result.code == FINE and name in self._levels:
            logger.log(self._levels.pop(name), "ready again: %s", name)


class _RecentResult(Generic[T]):
    """Computes a new result for the first few calls in a row, and then only at a limited rate. More
    frequent calls get the last result.

    The route requires no key, so its callers must not be able to use up the CPU.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = float(AT_ONCE)
        self._at = 0.0
        self._last: asyncio.Task[T] | None = None

    async def get(self, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        self._left = min(AT_ONCE, self._left + passed / self._seconds)
        is_running = self._last is not None and not self._last.done()
        if self._last is None or (self._left >= 1 and not is_running):
            self._left -= 1
            self._last = asyncio.create_task(compute())
        return await asyncio.shield(self._last)


def _status(codes: Mapping[str, str], *, is_ready: bool) -> str:
    if not is_ready:
        return "not ready"
    return "ready" if set(codes.values()) == {FINE} else "degraded"


class _Part(NamedTuple):
    """A part of the service to check. `outages` is a database's outage log, or None for other
    parts."""

    check: Awaitable[object]
    outages: OutageLog | None = None


def _parts(plane: ControlPlane) -> Mapping[str, _Part]:
    return {
        STORE: _Part(_check_store(plane.store)),
        CENTRAL: _database_part(plane.central, "central"),
        **{f"pool {name}": _database_part(pool, "tenant") for name, pool in plane.pools.items()},
    }


def _database_part(database: Database, history: History) -> _Part:
    return _Part(require_newest_schema(database, history), database.outages)


class _NotWritable(Unavailable):
    code = NOT_WRITABLE


async def _check_store(store: ObjectStore) -> None:
    """Checks the store, and raises its error if it is unavailable.

    The check doesn't write to the store. If the last regular write failed, the store counts as not
    writable.
    """
    await store.check()
    if store.outage.rejects_writes:
        text = "the last write failed"
        error = StoreFull(text) if store.outage.is_full else _NotWritable(text)
        error.add_note(LOGGED)
        raise error


async def _run_check(check: Awaitable[object], outages: OutageLog | None) -> _CheckResult:
    """Runs a check with a timeout and returns its result.

    A check that times out is canceled but not awaited, because closing a connection to a database
    that hangs can take a long time.
    """
    running = asyncio.ensure_future(check)
    done, _ = await asyncio.wait({running}, timeout=CHECK_SECONDS_MAX)
    if not done:
        running.cancel()
        running.add_done_callback(_ignore_result)
        late = Unavailable(f"no response within {CHECK_SECONDS_MAX:g} s")
        if outages is not None:
            outages.note_loss(late)
        return _CheckResult("timeout", late.message, is_logged(late))
    error = running.exception()
    if error is None:
        return _CheckResult(FINE)
    if isinstance(error, Unavailable):  # the reason is in the outage log
        return _CheckResult(error.code, is_logged=is_logged(error))
    if isinstance(error, FleetError):
        return _CheckResult(error.code, error.message)
    return _CheckResult("error", repr(error))


def _ignore_result(check: asyncio.Future[object]) -> None:
    if not check.cancelled():
        check.exception()


# Seconds for which scrapes reuse the values from the database.
FRESH_SECONDS = 2.0
# Minimum seconds between two renderings of the metrics if scrapes are frequent.
SCRAPE_SECONDS = 2.0
PREFIX = "comfyfleet"
MODELS_SHOWN_MAX = 200
FIRST_SECONDS_MAX = 10.0


metrics_router = APIRouter(tags=["health"])


def install(app: FastAPI, plane: ControlPlane) -> None:
    app.state.reading = _MetricsCache(plane)
    app.state.ready = _RecentResult(READY_SECONDS)
    app.state.ready_log = _ReadinessLog()
    app.state.metrics = _RecentResult(SCRAPE_SECONDS)


@metrics_router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Returns metrics in Prometheus's text format.

    If the database is unavailable, only the counters of the process are included. If
    `COMFYFLEET_METRICS_KEY` is set, the request must have this key.
    """
    plane: ControlPlane = request.app.state.plane
    _require_key(plane.settings.metrics_key, request.headers.get("authorization", ""))
    if plane.settings.metrics_key:
        note_valid_key(request.scope, METRICS)
    scrapes: _RecentResult[bytes] = request.app.state.metrics
    return _metrics_response(await scrapes.get(lambda: _render(plane, request)))


async def _render(plane: ControlPlane, request: Request) -> bytes:
    if plane.siblings and not plane.siblings.is_first:
        return await _metrics_of_first(plane, plane.siblings, request)
    plane.meters.waiting_polls.set(plane.queue.waiting())
    try:
        registry = CollectorRegistry()
        registry.register(await request.app.state.reading.collector())
        plane.meters.readable.set(1)
        figures = generate_latest(registry)
    except FleetError as error:
        logger.warning("can't read metrics from the database: %s", error.message)
        plane.meters.readable.set(0)
        figures = b""
    return _process_metrics(plane) + figures


def _metrics_response(text: bytes) -> Response:
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _process_metrics(plane: ControlPlane) -> bytes:
    """Returns the metrics counted by this process and the other processes of the control plane."""
    if plane.siblings is None:
        return generate_latest(plane.meters.registry) + generate_latest(
            plane.context.run_metrics.registry
        )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(plane.siblings.folder))  # type: ignore[no-untyped-call]
    return generate_latest(registry)


async def _metrics_of_first(
    plane: ControlPlane, siblings: SiblingProcesses, request: Request
) -> bytes:
    """Returns the metrics of the first process.

    Counters that are read from the database start at zero in each process, so all scrapes must be
    answered by the same process.
    """
    import httpx  # imported here because it is slow and large, and most processes don't need it

    transport = httpx.AsyncHTTPTransport(uds=str(siblings.first))
    headers = {"authorization": request.headers.get("authorization", "")}
    try:
        async with httpx.AsyncClient(transport=transport, timeout=FIRST_SECONDS_MAX) as client:
            response = await client.get("http://first/metrics", headers=headers)
        return response.raise_for_status().content
    except httpx.HTTPError as error:
        logger.warning("can't read metrics from the first process: %s", error)
        plane.meters.readable.set(0)
        return _process_metrics(plane)


def _require_key(key: str, authorization: str) -> None:
    if key and not is_key_of_hash(authorization.removeprefix("Bearer "), hash_key(key)):
        raise Unauthenticated(
            "/metrics requires the metrics key", hint="Send Authorization: Bearer KEY."
        )


class _MetricsCache:
    """Caches values from the database for a short time, for concurrent scrapes."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._outcomes = OutcomeCounters(plane.clock())
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[float, _Snapshot] | None = None

    async def collector(self) -> "_Snapshot":
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._last is None or now - self._last[0] > FRESH_SECONDS:
                self._last = (now, await self._read())
            return self._last[1]

    async def _read(self) -> "_Snapshot":
        plane, now = self._plane, self._plane.clock()
        async with plane.central.read() as tx:
            figures = await read_figures(
                tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
            )
            scaling = await scaling_figures(tx, figures, cap=plane.settings.max_fleet_workers)
        seconds = plane.settings.scale_target_seconds
        wanted_workers = [
            ((fleet.slug, fleet.stage), wanted_by(fleet, target_seconds=seconds))
            for fleet in scaling
        ]
        await self._outcomes.look(plane.central, now)
        runs = await read_run_figures(plane.pools)
        return _Snapshot(
            figures,
            wanted_workers,
            dict(self._outcomes.sums),
            runs,
            plane.queue.switch_costs.estimates,
        )


@dataclass(frozen=True, eq=False)
class _Snapshot(Collector):
    figures: SystemFigures
    wanted_workers: Sequence[tuple[tuple[str, str], int]]  # number of workers, by fleet and stage
    ended: dict[tuple[str, str, str], EndedCounts]
    runs: dict[str, RunFigures]
    switch_costs: Mapping[ModelOfFleet, Estimate]

    def collect(self) -> Iterable[Metric]:
        yield from self._lanes()
        yield from self._fleets()
        yield from self._switches()
        yield from self._outcomes()
        yield from self._runs()

    def _lanes(self) -> Iterator[Metric]:
        names = ("workflow", "stage", "provider")
        lanes = [((lane.workflow, lane.stage, lane.provider), lane) for lane in self.figures.lanes]
        for name, text, field in (
            ("queue_depth", "Queued jobs", "queued"),
            ("leases", "Jobs leased to a worker", "leased"),
            ("queue_oldest_seconds", "Age of the oldest queued job", "oldest_seconds"),
        ):
            yield _gauge(name, text, names, [(key, getattr(lane, field)) for key, lane in lanes])

    def _fleets(self) -> Iterator[Metric]:
        names = ("fleet", "stage")
        fleets = [((fleet.slug, fleet.stage), fleet) for fleet in self.figures.fleets]
        for name, text, field in (
            ("fleet_queue_depth", "Queued jobs that the fleet may run", "queued"),
            ("fleet_leases", "Leased jobs of the fleet's workflows", "leased"),
            (
                "fleet_queue_oldest_seconds",
                "Age of the oldest queued job that the fleet may run",
                "oldest_seconds",
            ),
            ("fleet_slots", "Concurrent jobs that the fleet's online workers can run", "slots"),
        ):
            yield _gauge(name, text, names, [(key, getattr(fleet, field)) for key, fleet in fleets])
        states = [
            ((*key, state), fleet.workers.get(state, 0))
            for key, fleet in fleets
            for state in STATES
        ]
        text = "Workers needed to start all queued jobs within COMFYFLEET_SCALE_TARGET_SECONDS"
        yield _gauge("wanted_workers", text, names, self.wanted_workers)
        yield _gauge("workers", "Workers by state", (*names, "state"), states)

    def _switches(self) -> Iterator[Metric]:
        """Yields the switch costs of a limited number of models, because each model adds a label
        value.

        The models with the most certain estimates are included.
        """
        names = {fleet.fleet_id: (fleet.slug, fleet.stage) for fleet in self.figures.fleets}
        best = sorted(self.switch_costs.items(), key=lambda item: item[1].error)
        rows = [
            ((*names[fleet_id], model), estimate)
            for (fleet_id, model), estimate in best[:MODELS_SHOWN_MAX]
            if fleet_id in names
        ]
        labels = ("fleet", "stage", "model")
        for name, text, field in (
            ("model_switch_seconds", "Learned time to switch to the model", "seconds"),
            ("model_run_seconds", "Duration of the model's runs without a switch", "run_seconds"),
        ):
            yield _gauge(name, text, labels, [(key, getattr(cost, field)) for key, cost in rows])

    def _runs(self) -> Iterator[Metric]:
        """Yields the numbers of runs and of their jobs. Tenants and runs aren't labels, because
        their number is unlimited."""
        labels = ("pool", "state")
        for name, text, field, states in (
            ("graph_runs", "Active graph runs", "graph_runs", GRAPH_RUNS),
            ("pipeline_runs", "Pipeline runs", "pipeline_runs", PIPELINE_RUNS),
        ):
            values = [
                ((pool, state), getattr(run, field).get(state, 0))
                for pool, run in self.runs.items()
                for state in states
            ]
            yield _gauge(name, text, labels, values)
        jobs = [
            ((pool, kind, state), run.jobs.get((kind, state), 0))
            for pool, run in self.runs.items()
            for kind in KINDS
            for state in JOBS
        ]
        yield _gauge(
            "run_jobs",
            "Unfinished jobs of graph and pipeline runs",
            ("pool", "kind", "state"),
            jobs,
        )

    def _outcomes(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            f"{PREFIX}_jobs_ended",
            "Jobs that finished since this process started",
            labels=("workflow", "stage", "outcome"),
        )
        durations = HistogramMetricFamily(
            f"{PREFIX}_job_seconds",
            "Run time of the prompts of finished jobs",
            labels=("workflow", "stage", "outcome"),
        )
        for key, sums in self.ended.items():
            ended.add_metric(key, sums.jobs)
            limits = [str(float(most)) for most in JOB_SECONDS]
            buckets = [*zip(limits, map(float, sums.at_most), strict=True), ("+Inf", sums.timed)]
            durations.add_metric(key, buckets, sum_value=sums.seconds)
        yield ended
        yield durations


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
