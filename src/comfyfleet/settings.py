"""Settings of the control plane, read from the environment, each with its default and unit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from comfyfleet.errors import InvalidInput

PREFIX = "COMFYFLEET_"
# Older names without our prefix keep their spelling.
KNOWN_BEFORE = "comfyui_"
# Read by other parts: workers, customers' commands, the units of deploy/.
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
    """Each field is read from its variable (see `variable_of`); the settings reference is made from the comments."""

    admin_key: str = ""  # the operators' key; default: made at the first start and printed once
    central_database_url: str = ""  # default: central.sqlite3 in the data folder
    tenant_database_urls: str = ""  # name=url,name=url; default: main=tenants.sqlite3 there
    storage_url: str = ""  # file:///dir or s3://bucket/prefix?endpoint=…&region=…
    public_url: str = "http://127.0.0.1:8000"  # as others reach us; default: where we listen
    lease_seconds: int = 900  # how long a lease lasts without a heartbeat
    heartbeat_seconds: int = 30  # between heartbeats of a worker
    max_attempts: int = 3  # runs of one job, not counting attempts that were given back
    max_requeues: int = 20  # a job that is requeued more often is set aside as poisoned
    max_fleet_workers: int = 50  # workers of a fleet without a cap of its own
    max_queued_per_tenant: int = 100_000  # queued jobs of a tenant without a limit of its own
    max_queued_total: int = 2_000_000  # queued jobs of all tenants
    max_active_jobs_per_user: int = 5  # queued and running jobs of a user, of all kinds
    max_active_jobs_per_tenant: int = 1000  # the same for all users of a tenant, approximately
    max_storage_bytes_per_tenant: int = 1024**4  # default quota, announced uploads included
    max_queued_per_graph_run: int = 5  # queued jobs of one graph run; the others are held
    event_keep_days: int = 7  # how long job events are kept, to resume streams from; 0: for ever
    delivery_keep_days: int = 30  # how long the log of webhook deliveries is kept; 0: for ever
    audit_keep_days: int = 365  # how long the audit log is kept; 0: for ever
    dispatch_keep_days: int = 30  # how long dispatches are kept after they ended; 0: for ever
    prompt_keep_days: int = 90  # how long prompts are kept after their job ended; 0: for ever
    retention_days: int = 0  # then media and files are deleted; a tenant may have its own; 0: never
    run_limit_seconds: int = 3600  # longest run of a job; a workflow may have its own limit
    url_seconds: int = 900  # how long a signed URL is valid; a held lease gets new ones
    max_output_bytes: int = 4 * 1024**3  # size of one output file
    max_upload_bytes: int = 2 * 1024**3  # size of one upload; an effect may set less
    max_hashed_bytes: int = 256 * 1024**2  # larger uploads are not deduplicated by content
    max_picture_pixels: int = 64_000_000  # pixels of one picture; also in the engine
    fetch_seconds: int = 120  # timeout for fetching a file from a customer's URL
    calls_per_second: float = 20.0  # API calls of one user over all keys, on average
    calls_at_once: int = 100  # burst of API calls of one user
    tenant_calls_per_second: float = 200.0  # API calls of one tenant over all users, on average
    tenant_calls_at_once: int = 1000  # burst of API calls of one tenant
    gateway_calls_per_second: float = 100.0  # calls of one user by ComfyUI's API, on average
    gateway_calls_at_once: int = 1000  # burst of calls of one user by ComfyUI's API
    gateway_tenant_calls_per_second: float = 1000.0  # the same of one tenant over all users
    gateway_tenant_calls_at_once: int = 5000  # burst of calls of one tenant by ComfyUI's API
    max_sockets_per_user: int = 100  # open websockets of all of one user's ComfyUI clients
    max_streams_per_key: int = 50  # open event streams of one API key
    max_streams_per_user: int = 100  # open event streams of all keys of one user
    max_body_bytes: int = 8 * 1024**2  # size of a customer's request body; files are sent by URL
    max_connections: int = 20_000  # open connections; each worker and each stream holds one
    affinity_max_wait_seconds: int = 60  # longest delay of a job by jobs for loaded models
    prefetch_after_seconds: float = 0.1  # a new job is reserved for idle workers for so long
    avoid_worker_seconds: int = 60  # other workers are preferred after a backend failed a job
    missed_heartbeats_max: int = 3  # then a worker is lost, and its jobs are requeued
    max_lost_leases: int = 5  # a job whose worker is lost so often before its start is poisoned
    no_backend_seconds: int = 60  # a graph's job that no worker can run waits so long
    offline_after_seconds: int = 90  # a worker not seen for so long is offline
    remove_worker_after_seconds: int = 600  # a worker not seen for so long is removed
    outage_seconds: int = 60  # after a longer pause of the sweeps, all leases are extended
    sweep_seconds: float = 5.0  # between passes of the sweeps of the queue
    reading_keep_hours: int = 24  # how long machine metrics of workers are kept; 0: for ever
    validate_asg_instance: bool = False  # workers i-… must belong to an auto-scaling group
    metrics_key: str = ""  # bearer key that /metrics requires; without it /metrics is open
    cloudwatch_namespace: str = ""  # CloudWatch namespace for fleet metrics; without it none
    cloudwatch_seconds: int = 60  # between two CloudWatch updates
    scale_target_seconds: int = 300  # within which all queued jobs should start, for WantedWorkers
    comfyui_submit_interval: float = 10.0  # seconds between checks of graph and pipeline runs
    comfyui_poll_interval: float = 5.0  # seconds between checks of ended jobs of runs
    abandoned_job_hours: int = 24  # a run's job without any report for so long fails
    pipeline_concurrent_jobs: int = 1  # jobs in flight of a run without a limit of its own
    pipeline_max_bytes: int = 50 * 1024**3  # size of all files of a run; then it is paused
    pipeline_alert_failures: int = 5  # so many failed jobs of a run raise an alert
    pipeline_alert_seconds: int = 600  # if they fail within this time
    pipeline_keep_days: int = 90  # how long files of a run are kept after its last activity

    @property
    def lost_after_seconds(self) -> int:
        """A worker not seen for so long loses its leases; another worker may then take its id."""
        return self.missed_heartbeats_max * self.heartbeat_seconds

    @property
    def unseen_seconds_max(self) -> int:
        """A running worker must be seen more often than this, or it counts as offline or lost."""
        return min(self.offline_after_seconds, self.lost_after_seconds)

    @property
    def grace_seconds(self) -> int:
        """How much every lease is extended after an outage of the control planes."""
        return 3 * self.heartbeat_seconds


# For these, zero means for ever.
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
    """Maps unknown variables with our prefix to the setting that was probably meant. Unknown names that
    resemble no setting are ignored: they may belong to other programs."""
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
