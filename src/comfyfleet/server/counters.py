"""Prometheus counters of this process: requests, prompts, graph runs, pipeline jobs and alerts.

Values that the database already holds are read on demand instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    multiprocess,
    values,
)

# By default, each counter has a second series that only contains its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]
CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported


@dataclass(frozen=True)
class SiblingProcesses:
    """The processes that serve one port with this one."""

    folder: Path
    is_first: bool

    @property
    def first(self) -> Path:
        """The socket on which the first process answers the others."""
        return self.folder / "first.sock"


def shared_environ(folder: Path) -> dict[str, str]:
    """Returns the environment variables that make a process store its counters in this folder."""
    return {SHARED_FOLDER: str(folder)}


def use_process_number(number: int) -> None:
    """Sets the number under which this process stores its counters.

    Must be called before any counter is created. The number of a process that has ended can be
    reused; its counters then continue from their last values.
    """
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, number: int) -> None:
    """Deletes the gauges of a process that has ended. Its counters remain."""
    multiprocess.mark_process_dead(number, str(folder))  # type: ignore[no-untyped-call]


STALL_SECONDS = (0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProcessMetrics:
    """Metrics in a separate registry, so that two control planes in one test process don't mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "comfyfleet_api_calls",
            "Calls of the API",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.call_seconds = Histogram(
            "comfyfleet_api_call_seconds",
            "How long calls took, long polls included",
            ("method", "route"),
            buckets=CALL_SECONDS,
            registry=self.registry,
        )
        self.errors = Counter(
            "comfyfleet_api_errors", "Error responses", ("code",), registry=self.registry
        )
        self.requeues = Counter(
            "comfyfleet_requeues",
            "Jobs that workers handed back",
            ("fleet", "reason"),
            registry=self.registry,
        )
        self.model_runs = Counter(
            "comfyfleet_model_runs",
            "Finished runs by how their heavy model came to be loaded: same, switched, first",
            ("fleet", "change"),
            registry=self.registry,
        )
        self.unexpected = Counter(
            "comfyfleet_unexpected_answers",
            "Answers of backends in a shape that we don't know, as workers reported them",
            ("fleet",),
            registry=self.registry,
        )
        self.loop_stall_seconds = Histogram(
            "comfyfleet_loop_stall_seconds",
            "Times longer than 0.1 s during which the event loop answered nobody",
            buckets=STALL_SECONDS,
            registry=self.registry,
        )
        self._make_those_of_sweeps()
        self._make_those_of_gateway()
        self._make_those_of_store()

    def _make_those_of_gateway(self) -> None:
        self.prompts = Counter(
            "comfyfleet_prompts",
            "Prompts of ComfyUI's clients: accepted, repeated, or why they were refused",
            ("outcome",),
            registry=self.registry,
        )
        self.gateway_events = Counter(
            "comfyfleet_gateway_events",
            "Messages sent to sockets of ComfyUI's clients",
            registry=self.registry,
        )
        self.gateway_sockets = Gauge(
            "comfyfleet_gateway_sockets",
            "Open sockets of ComfyUI's clients",
            multiprocess_mode="livesum",
            registry=self.registry,
        )

    def _make_those_of_store(self) -> None:
        self.store_full = Gauge(
            "comfyfleet_store_full",
            "1 while the object store has no room for uploads",
            multiprocess_mode="livemax",
            registry=self.registry,
        )
        self.store_not_writable = Gauge(
            "comfyfleet_store_not_writable",
            "1 while writes to the object store fail, also because it is full",
            multiprocess_mode="livemax",
            registry=self.registry,
        )

    def _make_those_of_sweeps(self) -> None:
        self.passes = Counter(
            "comfyfleet_sweep_passes",
            "Passes of the sweeps: done, failed, or left to another control plane",
            ("sweep", "outcome"),
            registry=self.registry,
        )
        self.last_pass = Gauge(
            "comfyfleet_sweep_last_pass_timestamp_seconds",
            "When a sweep last finished without error",
            ("sweep",),
            multiprocess_mode="max",
            registry=self.registry,
        )
        self.drifts = Gauge(
            "comfyfleet_ledger_drifts",
            "Ledger faults found by the last verification",
            multiprocess_mode="mostrecent",
            registry=self.registry,
        )
        self.deliveries = Counter(
            "comfyfleet_webhook_deliveries",
            "Webhook delivery attempts: taken, refused, unanswered",
            ("outcome",),
            registry=self.registry,
        )
        self.removed = Counter(
            "comfyfleet_objects_removed",
            "Objects that were removed by sweeps",
            ("reason",),
            registry=self.registry,
        )
        self.readable = Gauge(
            "comfyfleet_figures_readable",
            "Whether the database metrics could be read for this response",
            multiprocess_mode="mostrecent",
            registry=self.registry,
        )
        self.waiting_polls = Gauge(
            "comfyfleet_waiting_polls",
            "Waiting long polls of workers",
            multiprocess_mode="livesum",
            registry=self.registry,
        )


RUN_OUTCOMES = ("completed", "failed", "cancelled")
PIPELINE_JOB_OUTCOMES = ("done", "failed", "cancelled")
PIPELINE_ALERTS = ("pipeline.alert", "pipeline.paused")


class RunMetrics:
    """Counts runs, jobs and alerts by outcome only.

    A tenant label would have unbounded cardinality; the databases have those details.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.graph_runs = self._counter(
            "graph_runs_ended", "Graph runs that ended", "outcome", RUN_OUTCOMES
        )
        self.pipeline_jobs = self._counter(
            "pipeline_jobs_ended",
            "Jobs of pipeline runs that ended",
            "outcome",
            PIPELINE_JOB_OUTCOMES,
        )
        self.pipeline_alerts = self._counter(
            "pipeline_alerts", "Alerts sent to owners of pipeline runs", "event", PIPELINE_ALERTS
        )

    def _counter(self, name: str, text: str, label: str, usual: Iterable[str]) -> Counter:
        """Creates a counter. Usual label values start at 0, because rates need a first value."""
        counter = Counter(f"comfyfleet_{name}", text, (label,), registry=self.registry)
        for value in usual:
            counter.labels(value)
        return counter
