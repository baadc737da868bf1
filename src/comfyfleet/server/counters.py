"""The Prometheus metrics that this process counts itself, such as requests and prompts.

Metrics that can be computed from the database are read on demand instead.
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

# Disables the additional series that contains the creation time of each counter.
disable_created_metrics()  # type: ignore[no-untyped-call]
# Upper bounds of the histogram buckets for request durations, in seconds.
CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# The environment variable that prometheus_client reads when it is imported.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class SiblingProcesses:
    """The other processes that share a port with this one."""

    folder: Path
    is_first: bool

    @property
    def first(self) -> Path:
        """The path of the socket on which the first process answers the others."""
        return self.folder / "first.sock"


def shared_environ(folder: Path) -> dict[str, str]:
    """Returns the environment variables that make a process store its metrics in this folder."""
    return {SHARED_FOLDER: str(folder)}


def use_process_number(number: int) -> None:
    """Sets the number under which this process stores its metrics.

    Must be called before any metric is created. The number of a process that has exited can be
    reused. Its counters then continue from their last values.
    """
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, number: int) -> None:
    """Deletes the gauges of a process that has exited. Its counters aren't deleted."""
    multiprocess.mark_process_dead(number, str(folder))  # type: ignore[no-untyped-call]


# Upper bounds of the histogram buckets for stalls of the event loop, in seconds.
STALL_SECONDS = (0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProcessMetrics:
    """The metrics of a control plane, in their own registry.

    Otherwise, several control planes in one test process would share their metrics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "comfyfleet_api_calls",
            "API requests",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.call_seconds = Histogram(
            "comfyfleet_api_call_seconds",
            "Duration of API requests, including long polls",
            ("method", "route"),
            buckets=CALL_SECONDS,
            registry=self.registry,
        )
        self.errors = Counter(
            "comfyfleet_api_errors", "Error responses", ("code",), registry=self.registry
        )
        self.requeues = Counter(
            "comfyfleet_requeues",
            "Jobs that workers returned to the queue",
            ("fleet", "reason"),
            registry=self.registry,
        )
        self.model_runs = Counter(
            "comfyfleet_model_runs",
            "Finished runs, by whether their model was already loaded (same, switched or first)",
            ("fleet", "change"),
            registry=self.registry,
        )
        self.unexpected = Counter(
            "comfyfleet_unexpected_answers",
            "Backend responses in an unknown format, as reported by workers",
            ("fleet",),
            registry=self.registry,
        )
        self.loop_stall_seconds = Histogram(
            "comfyfleet_loop_stall_seconds",
            "Periods longer than 0.1 s in which the event loop was blocked",
            buckets=STALL_SECONDS,
            registry=self.registry,
        )
        self._create_sweep_metrics()
        self._create_gateway_metrics()
        self._create_store_metrics()

    def _create_gateway_metrics(self) -> None:
        self.prompts = Counter(
            "comfyfleet_prompts",
            "Prompts from ComfyUI clients, by accepted, repeated or the reason of the refusal",
            ("outcome",),
            registry=self.registry,
        )
        self.gateway_events = Counter(
            "comfyfleet_gateway_events",
            "Messages sent to the sockets of ComfyUI clients",
            registry=self.registry,
        )
        self.gateway_sockets = Gauge(
            "comfyfleet_gateway_sockets",
            "Open sockets of ComfyUI clients",
            multiprocess_mode="livesum",
            registry=self.registry,
        )

    def _create_store_metrics(self) -> None:
        self.store_full = Gauge(
            "comfyfleet_store_full",
            "1 if the object store has no space for uploads",
            multiprocess_mode="livemax",
            registry=self.registry,
        )
        self.store_not_writable = Gauge(
            "comfyfleet_store_not_writable",
            "1 if writes to the object store fail, for example because it is full",
            multiprocess_mode="livemax",
            registry=self.registry,
        )

    def _create_sweep_metrics(self) -> None:
        self.passes = Counter(
            "comfyfleet_sweep_passes",
            "Passes of the sweeps, by done, failed or left to another control plane",
            ("sweep", "outcome"),
            registry=self.registry,
        )
        self.last_pass = Gauge(
            "comfyfleet_sweep_last_pass_timestamp_seconds",
            "Time at which a sweep last finished without an error",
            ("sweep",),
            multiprocess_mode="max",
            registry=self.registry,
        )
        self.drifts = Gauge(
            "comfyfleet_ledger_drifts",
            "Ledger errors found by the last verification",
            multiprocess_mode="mostrecent",
            registry=self.registry,
        )
        self.deliveries = Counter(
            "comfyfleet_webhook_deliveries",
            "Webhook delivery attempts, by taken, refused or unanswered",
            ("outcome",),
            registry=self.registry,
        )
        self.removed = Counter(
            "comfyfleet_objects_removed",
            "Objects removed by sweeps",
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
            "Long polls of workers that are waiting",
            multiprocess_mode="livesum",
            registry=self.registry,
        )


RUN_OUTCOMES = ("completed", "failed", "cancelled")
PIPELINE_JOB_OUTCOMES = ("done", "failed", "cancelled")
PIPELINE_ALERTS = ("pipeline.alert", "pipeline.paused")


class RunMetrics:
    """Counts runs, jobs and alerts by outcome.

    There is no tenant label, because its cardinality would be unbounded.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.graph_runs = self._counter(
            "graph_runs_ended", "Finished graph runs", "outcome", RUN_OUTCOMES
        )
        self.pipeline_jobs = self._counter(
            "pipeline_jobs_ended",
            "Finished jobs of pipeline runs",
            "outcome",
            PIPELINE_JOB_OUTCOMES,
        )
        self.pipeline_alerts = self._counter(
            "pipeline_alerts",
            "Alerts sent to the owners of pipeline runs",
            "event",
            PIPELINE_ALERTS,
        )

    def _counter(self, name: str, text: str, label: str, usual: Iterable[str]) -> Counter:
        """Creates a counter and sets it to 0 for the usual label values, because rates need a first
        value."""
        counter = Counter(f"comfyfleet_{name}", text, (label,), registry=self.registry)
        for value in usual:
            counter.labels(value)
        return counter
