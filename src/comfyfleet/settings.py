"""Settings of the control plane, read from the environment, each with its default and unit."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache

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
# Variable, default, meaning, and which commands read it: the settings of the original ComfyUI client and worker.
COMFYUI_VARIABLES = (
    (
        "COMFYUI_BASE_URL",
        "–",
        "address of the ComfyUI, where no option names one. Without it, `run` and `up` use the built-in engine, `worker` needs `--backend`, "
        "`convert` of a workflow needs `--server` or `--object-info`, and `inspect` shows only what the file tells",
        "`up`, `worker`, `run`, `convert`, `inspect`",
    ),
    (
        "COMFYUI_TIMEOUT",
        "–",
        "limit in seconds of a whole job, from its submission to ComfyUI; without it only the limit of its workflow counts; in `up` and `serve` also the limit of a job of a pipeline step that has no `timeout` (300)",
        "`up`, `serve`, `worker`",
    ),
    (
        "COMFYUI_MAX_RETRIES",
        "3; `up` and `worker`: 5",
        "retries after connection errors, with back-off",
        "`up`, `worker`, `run`",
    ),
    (
        "COMFYUI_POLL_INTERVAL",
        "5; `up` and `worker`: 2",
        "seconds between looks at a ComfyUI whose websocket is silent; in `up` and `serve` also between checks of ended jobs of pipeline runs (5)",
        "`up`, `serve`, `worker`, `run`",
    ),
    (
        "COMFYUI_SUBMIT_INTERVAL",
        "10",
        "seconds between checks whether pipeline runs can submit jobs; `worker`, which submits each job as soon as it gets it, only checks the value",
        "`up`, `serve`, `worker`",
    ),
    (
        "MAX_CONCURRENCY",
        "1",
        "another name of `COMFYFLEET_MAX_CONCURRENCY`, which counts more",
        "`up`, `worker`",
    ),
    (
        "HEARTBEAT_INTERVAL_SECONDS",
        "30",
        "another name of `COMFYFLEET_HEARTBEAT_SECONDS`, which counts more",
        "`up`, `worker`",
    ),
)
EVERYBODY = "*"
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_HOST_PORT = re.compile(r"(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\]):(?P<port>[0-9]{1,5})")
_USUAL_PORTS = {"http:": ":80", "https": ":443"}  # browsers leave them out of an origin
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """Each field is read from its variable (see `variable_of`); the settings reference is made from the comments."""

    admin_key: str = ""  # the operators' key; default: made at the first start and printed once
    central_database_url: str = ""  # default: central.sqlite3 in the data folder
    central_database_direct_url: str = ""  # PostgreSQL itself, if the one above is a pooler
    tenant_database_urls: str = ""  # name=url,name=url; default: main=tenants.sqlite3 there
    tenant_database_direct_urls: str = ""  # name=url,name=url; the same for pools
    storage_url: str = ""  # file:///dir or s3://bucket/prefix?endpoint=…&region=…
    public_url: str = "http://127.0.0.1:8000"  # as others reach us; default: where we listen
    cors_origins: str = ""  # origins of front ends that may call the customers' API, with commas
    webhook_private_hosts: str = ""  # host:port,… with a private address that webhooks may call
    web: bool = True  # whether the pages for people are served
    public_catalogue: bool = False  # effects are shown without a sign-in; up: on its machine
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
    max_graphs_per_user: int = 10_000  # stored graphs of a user; deleted ones don't count
    max_queued_per_graph_run: int = 5  # queued jobs of one graph run; the others are held
    max_executions_per_graph_run: int = 100_000  # nodes of one run, per item and round
    top_up_url: str = ""  # where customers buy tokens; {tenant_id} and {user_id} are filled in
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
    session_hours: int = 168  # how long a browser stays signed in as a customer
    operator_session_hours: int = 12  # how long a browser stays signed in as an operator
    oidc_issuer: str = ""  # identity provider for sign-ins of browsers; without it none
    oidc_client_id: str = ""  # as the identity provider knows us
    oidc_client_secret: str = ""  # with it we prove that; none for a public client
    oidc_name: str = "single sign-on"  # what the sign-in page calls the identity provider
    oidc_scopes: str = "openid email profile"  # what is asked of the identity provider
    oidc_tenants: str = ""  # claim:value=tenant id,…: whose users they become; *=ID: everybody
    oidc_roles: str = ""  # claim:value=role,…: who becomes an operator, such as groups:ops=viewer
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
    show_backends: bool = False  # customers see names of machines, tracebacks and devices; on in up
    no_backend_seconds: int = 60  # a run's job that no worker can run waits so long
    offline_after_seconds: int = 90  # a worker not seen for so long is offline
    remove_worker_after_seconds: int = 600  # a worker not seen for so long is removed
    outage_seconds: int = 60  # after a longer pause of the sweeps, no lease ends for a while
    sweep_seconds: float = 5.0  # between passes of the sweeps of the queue
    reading_keep_hours: int = 24  # how long machine metrics of workers are kept; 0: for ever
    validate_asg_instance: bool = False  # workers i-… must belong to an auto-scaling group
    metrics_key: str = ""  # bearer key that /metrics requires; without it /metrics is open
    cloudwatch_namespace: str = ""  # CloudWatch namespace for fleet metrics; without it none
    cloudwatch_seconds: int = 60  # between two CloudWatch updates
    scale_target_seconds: int = 300  # within which all queued jobs should start, for WantedWorkers
    comfyui_timeout: float = 300.0  # seconds for a job of a pipeline step without a timeout
    comfyui_submit_interval: float = 10.0  # seconds between checks of pipeline runs
    comfyui_poll_interval: float = 5.0  # seconds between checks of ended jobs of pipeline runs
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
        """How much every lease is extended after a long outage of the control planes."""
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


@cache
def remarks() -> Mapping[str, str]:
    """What each setting is, from the comments above; empty where Python has no sources."""
    try:
        source = inspect.getsource(Settings)
    except OSError:
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE))


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
    parse_origins(str(values.get("cors_origins", "")))
    parse_private_hosts(str(values.get("webhook_private_hosts", "")))
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
    if not 0 < number < float("inf"):
        raise InvalidInput(f"{name} must be above zero, not {text}", field=name)
    return number


def _truth(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise InvalidInput(f"{name} must be true or false, not {text!r}", field=name)


@dataclass(frozen=True, slots=True)
class ClaimRule:
    """Who has this value in this claim of an identity provider gets `target`. Without a claim: everybody."""

    claim: str
    value: str
    target: str


def parse_claim_rules(text: str, name: str) -> tuple[ClaimRule, ...]:
    """`claim:value=target,…`; the claim's own name may hold a colon, the value may not."""
    rules: list[ClaimRule] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        left, equals, target = (each.strip() for each in part.rpartition("="))
        claim, colon, value = left.rpartition(":")
        is_whole = bool(equals and target and (left == EVERYBODY or (colon and claim and value)))
        if not is_whole:
            raise InvalidInput(
                f"{name} has {part!r}; it must be claim:value=…, or {EVERYBODY}=…", field=name
            )
        rules.append(ClaimRule(claim, value, target))
    return tuple(rules)


def parse_origins(text: str) -> tuple[str, ...]:
    """Parses `https://app.example,http://localhost:3000`; raises InvalidInput for anything but origins."""
    name = variable_of("cors_origins")
    origins = tuple(each.strip().lower() for each in text.split(",") if each.strip())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"{name} has {origin!r}; an origin is http:// or https://, a host and perhaps a port, "
                "without a path, such as https://app.example",
                field=name,
            )
    return tuple(origin.removesuffix(_USUAL_PORTS[origin[:5]]) for origin in origins)


def parse_private_hosts(text: str) -> frozenset[tuple[str, int]]:
    """Parses `localhost:3000,[::1]:8080,hooks.internal:443`; raises InvalidInput for anything else."""
    found = set[tuple[str, int]]()
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        match = _HOST_PORT.fullmatch(part)
        if match is None or not 0 < int(match["port"]) < 65536:
            name = variable_of("webhook_private_hosts")
            raise InvalidInput(
                f"{name} has {part!r}; it must be host:port, such as localhost:3000", field=name
            )
        found.add((match["host"].strip("[]"), int(match["port"])))
    return frozenset(found)


POOL_URLS = "COMFYFLEET_TENANT_DATABASE_URLS"
DIRECT_URLS = "COMFYFLEET_TENANT_DATABASE_DIRECT_URLS"


def parse_pools(text: str, variable: str = POOL_URLS) -> dict[str, str]:
    """`name=url,name=url` as a mapping; a URL may hold `=` but no comma."""
    pools: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, url = part.partition("=")
        if not equals or not name.strip() or not url.strip():
            raise InvalidInput(
                f"{variable} has {part!r}; it must be name=url,name=url",
                field=variable,
            )
        if name.strip() in pools:
            raise InvalidInput(
                f"{variable} names the pool {name.strip()!r} twice",
                field=variable,
            )
        pools[name.strip()] = url.strip()
    return pools
