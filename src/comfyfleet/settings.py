"""What the control plane reads from its environment, each with its default and its unit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from comfyfleet.errors import InvalidInput

PREFIX = "COMFYFLEET_"
# Names that were there before us are read as they are.
KNOWN_BEFORE = "comfyui_"
# By other parts of ours: workers, customers' commands, the units of deploy/.
READ_ELSEWHERE = (
    "COMFYFLEET_COMFYUI_FOLDER",
    "COMFYFLEET_CONTROL",
    "COMFYFLEET_ENGINE_MEMORY_BYTES",
    "COMFYFLEET_FLEET",
    "COMFYFLEET_FLEET_SECRET",
    "COMFYFLEET_KEY",
    "COMFYFLEET_MACHINE",
    "COMFYFLEET_MAX_CONCURRENCY",
    "COMFYFLEET_MAX_PICTURE_PIXELS",
    "COMFYFLEET_STAGE",
    "COMFYFLEET_TEST_EXAMPLES",
    "COMFYFLEET_URL",
    "COMFYFLEET_WORKER_ID",
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """Each field is read from its variable (see `variable_of`); the comments are its reference."""

    admin_key: str = ""  # of operators; else made at the first start and printed once
    central_database_url: str = ""  # else central.sqlite3 in the data folder
    tenant_database_urls: str = ""  # name=url,name=url; else main=tenants.sqlite3 there
    storage_url: str = ""  # file:///dir or s3://bucket/prefix?endpoint=…&region=…
    public_url: str = "http://127.0.0.1:8000"  # as others reach us; else where we listen
    lease_seconds: int = 900  # how long a worker holds a job without a heartbeat
    heartbeat_seconds: int = 30  # how often workers are asked to say that they live
    max_attempts: int = 3  # runs of one job, those given back not counted
    max_requeues: int = 20  # a job that comes back more often is set aside as poisoned
    max_fleet_workers: int = 50  # of a fleet without a cap of its own
    max_queued_per_tenant: int = 100_000  # of a tenant without a limit of its own
    max_queued_total: int = 2_000_000  # jobs that may wait in all
    max_active_jobs_per_user: int = 5  # queued and running, by whatever way they came
    max_active_jobs_per_tenant: int = 1000  # of all its users, about
    max_storage_bytes_per_tenant: int = 1024**4  # announced uploads too; without its own
    max_queued_per_graph_run: int = 5  # jobs of one graph run; the rest is held
    event_keep_days: int = 7  # events of jobs, from which readers go on; 0: for ever
    delivery_keep_days: int = 30  # the log of deliveries to webhooks; 0: for ever
    audit_keep_days: int = 365  # who did what; 0: for ever
    dispatch_keep_days: int = 30  # dispatches of jobs, after they ended; 0: for ever
    prompt_keep_days: int = 90  # prompts of jobs, after they ended; the jobs stay; 0: for ever
    retention_days: int = 0  # then media and files go; of a tenant without its own; 0: never
    run_limit_seconds: int = 3600  # of a job, from its start; a workflow may have its own
    url_seconds: int = 900  # the life of a URL to a file; a held lease gets new ones
    max_output_bytes: int = 4 * 1024**3  # of one output file
    max_upload_bytes: int = 2 * 1024**3  # of one file of a customer; an effect may take less
    max_hashed_bytes: int = 256 * 1024**2  # larger uploads are not compared with those there are
    max_picture_pixels: int = 64_000_000  # of one picture, by its header; the engine reads it, too
    fetch_seconds: int = 120  # within which a file at a customer's URL must have arrived
    calls_per_second: float = 20.0  # of one user with all keys, on average
    calls_at_once: int = 100  # of one user, after a pause
    tenant_calls_per_second: float = 200.0  # of one tenant with all users, on average
    tenant_calls_at_once: int = 1000  # of one tenant, after a pause
    max_streams_per_key: int = 50  # server-sent events that one API key follows at once
    max_streams_per_user: int = 100  # and all keys of one user
    max_body_bytes: int = 8 * 1024**2  # of a customer's request; files go by URL
    max_connections: int = 20_000  # open at once; each worker and each stream holds one
    affinity_max_wait_seconds: int = 60  # then no loaded model lets others pass a job
    prefetch_after_seconds: float = 0.1  # so long a new job is left to idle workers
    avoid_worker_seconds: int = 60  # others are preferred after a backend failed a job
    missed_heartbeats_max: int = 3  # then a worker is lost, and its jobs go to others
    max_lost_leases: int = 5  # a job lost with its worker, unstarted, so often is poisoned
    no_backend_seconds: int = 60  # a graph's job that nobody can run waits so long
    offline_after_seconds: int = 90  # a worker unseen for so long is offline
    remove_worker_after_seconds: int = 600  # and for so long, removed
    outage_seconds: int = 60  # after a longer pause of the sweeps, all leases are extended
    sweep_seconds: float = 5.0  # between passes of the sweeps that keep the queue true
    reading_keep_hours: int = 24  # how long readings of machines are kept; 0: for ever
    validate_asg_instance: bool = False  # workers i-… must be of an auto-scaling group
    metrics_key: str = ""  # a bearer key that /metrics then needs; none: anybody may read it
    cloudwatch_namespace: str = ""  # where figures of fleets go; none: nowhere
    cloudwatch_seconds: int = 60  # between two of them
    scale_target_seconds: int = 300  # within which all that waits shall have started
    comfyui_submit_interval: float = 10.0  # seconds; runs are looked at so often at least
    comfyui_poll_interval: float = 5.0  # seconds; ended jobs of runs are, too
    abandoned_job_hours: int = 24  # a run's job without any word for so long is failed
    pipeline_concurrent_jobs: int = 1  # in flight, of a run without a limit of its own
    pipeline_max_bytes: int = 50 * 1024**3  # of a run's files; then it is paused
    pipeline_alert_failures: int = 5  # failed jobs of a run that raise an alert
    pipeline_alert_seconds: int = 600  # if they fail within so long
    pipeline_keep_days: int = 90  # files of a run are kept, after the last act in it

    @property
    def lost_after_seconds(self) -> int:
        """A worker unseen for so long loses its leases, and its id to one that has lost its state."""
        return self.missed_heartbeats_max * self.heartbeat_seconds

    @property
    def unseen_seconds_max(self) -> int:
        """A worker that lives is seen more often than that: then it is neither offline nor lost."""
        return min(self.offline_after_seconds, self.lost_after_seconds)

    @property
    def grace_seconds(self) -> int:
        """What every lease gets after an outage of ours."""
        return 3 * self.heartbeat_seconds


# Of these, zero means for ever.
_FOR_EVER = (
    "event_keep_days",
    "delivery_keep_days",
    "audit_keep_days",
    "dispatch_keep_days",
    "prompt_keep_days",
    "reading_keep_hours",
    "retention_days",
)
MAY_BE_ZERO = frozenset(PREFIX + name.upper() for name in _FOR_EVER)


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return name.upper() if name.startswith(KNOWN_BEFORE) else PREFIX + name.upper()


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Names that nobody reads, by the one that was probably meant. Others may have names of their
    own that begin like ours: what resembles none of them is let be."""
    known = {variable_of(each.name) for each in fields(Settings)} | set(READ_ELSEWHERE)
    names = [each.removeprefix(PREFIX) for each in known if each.startswith(PREFIX)]
    found: dict[str, str] = {}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            close = get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.8)
            if close:
                found[name] = PREFIX + close[0]
    return found


def read_settings(environ: Mapping[str, str]) -> Settings:
    values = {
        each.name: _parsed(variable_of(each.name), environ[variable_of(each.name)], each.type)
        for each in fields(Settings)
        if variable_of(each.name) in environ
    }
    return Settings(**values)  # type: ignore[arg-type]


def _parsed(name: str, text: str, kind: object) -> str | int | float | bool:
    if kind is bool or kind == "bool":
        return _truth(name, text)
    if kind is str or kind == "str":
        return text
    try:
        number = int(text) if kind in (int, "int") else float(text)
    except ValueError:
        raise InvalidInput(f"{name} must be a number, not {text!r}", field=name) from None
    if number == 0 and name in MAY_BE_ZERO:
        return number
    if not number > 0:
        raise InvalidInput(f"{name} must be above zero, not {text}", field=name)
    return number


def _truth(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise InvalidInput(f"{name} must be true or false, not {text!r}", field=name)


def parse_pools(text: str) -> dict[str, str]:
    """`name=url,name=url` as a mapping; a URL may hold `=` but no comma."""
    pools: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, url = part.partition("=")
        if not equals or not name.strip() or not url.strip():
            raise InvalidInput(
                f"COMFYFLEET_TENANT_DATABASE_URLS has {part!r}; it must be name=url,name=url",
                field="COMFYFLEET_TENANT_DATABASE_URLS",
            )
        if name.strip() in pools:
            raise InvalidInput(
                f"COMFYFLEET_TENANT_DATABASE_URLS names the pool {name.strip()!r} twice",
                field="COMFYFLEET_TENANT_DATABASE_URLS",
            )
        pools[name.strip()] = url.strip()
    return pools
