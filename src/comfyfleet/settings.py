"""Settings of the control plane, which are read from the environment. Each has a default and a
unit."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache

from comfyfleet.errors import InvalidInput

PREFIX = "COMFYFLEET_"
# The prefix of settings that are older than our own prefix and have kept their names.
KNOWN_BEFORE = "comfyui_"
# Variables that are read elsewhere: by workers, customers' commands and the units in deploy/.
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
# The settings of the original ComfyUI client and worker: the variable, its default, its meaning,
# and the commands that read it.
COMFYUI_VARIABLES = (
    (
        "COMFYUI_BASE_URL",
        "–",
        "URL of the ComfyUI, unless an option specifies one. Without it, `run` and `up` use the built-in engine, `worker` requires `--backend`, "
        "`convert` of a workflow requires `--server` or `--object-info`, and `inspect` only shows information from the file",
        "`up`, `worker`, `run`, `convert`, `inspect`",
    ),
    (
        "COMFYUI_TIMEOUT",
        "–",
        "time limit for a whole job in seconds, from its submission to ComfyUI; without it, only the workflow's limit applies. In `up` and `serve`, also the time limit for a job of a pipeline step without a `timeout` (300)",
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
        "seconds between polls of a ComfyUI whose websocket sends nothing. In `up` and `serve`, also the seconds between checks of ended jobs of pipeline runs (5)",
        "`up`, `serve`, `worker`, `run`",
    ),
    (
        "COMFYUI_SUBMIT_INTERVAL",
        "10",
        "seconds between checks whether pipeline runs can submit jobs. `worker` only validates the value, because it submits each job immediately",
        "`up`, `serve`, `worker`",
    ),
    (
        "MAX_CONCURRENCY",
        "1",
        "alternative name of `COMFYFLEET_MAX_CONCURRENCY`, which takes precedence",
        "`up`, `worker`",
    ),
    (
        "HEARTBEAT_INTERVAL_SECONDS",
        "30",
        "alternative name of `COMFYFLEET_HEARTBEAT_SECONDS`, which takes precedence",
        "`up`, `worker`",
    ),
)
# Variables that other commands read: the variable, its default, its meaning, and its readers.
OTHER_VARIABLES = (
    (
        "COMFYFLEET_URL",
        "http://127.0.0.1:8000",
        "address of the control plane",
        "`admin`, `effects`, `jobs`, `graph`, `pipeline` and other commands that call a control plane",
    ),
    (
        "COMFYFLEET_KEY",
        "–",
        "your API key (`cf_…`), or an operator's key for `admin`. Other commands need no key on the machine of `up`, on Linux",
        "the same commands",
    ),
    ("COMFYFLEET_FLEET_SECRET", "–", "the fleet's secret, with which a worker joins", "`worker`"),
    ("COMFYFLEET_WORKER_ID", "host name and port", "the worker's name in its fleet", "`worker`"),
    (
        "COMFYFLEET_MAX_CONCURRENCY",
        "1",
        "number of concurrent prompts of a worker. A ComfyUI runs one prompt at a time; Comfy Cloud may run more",
        "`up`, `worker`",
    ),
    (
        "COMFYFLEET_COMFYUI_FOLDER",
        "–",
        "ComfyUI's folder on this machine. With it, a job's files are deleted after delivery, and uploads benefit from the node cache",
        "`up`, `worker`",
    ),
    ("COMFY_CLOUD_API_KEY", "–", "key for Comfy Cloud", "`run --cloud`, `worker --cloud`"),
    (
        "COMFY_CLOUD_BASE_URL",
        "https://cloud.comfy.org",
        "address of Comfy Cloud",
        "`run --cloud`, `worker --cloud`",
    ),
    (
        "COMFYFLEET_ENGINE_MEMORY_BYTES",
        "half of the machine's memory, at most 8 GiB",
        "memory that the built-in engine may use for a prompt (Linux only)",
        "`engine`, `up`, `run`",
    ),
    (
        "FORWARDED_ALLOW_IPS",
        "127.0.0.1",
        "addresses or networks of trusted proxies, comma-separated. `X-Forwarded-For` counts only if it comes from them",
        "`up`, `serve`",
    ),
    (
        "COMFYFLEET_CONTROL",
        "–",
        "address of the control plane in `deploy/systemd`; `COMFYFLEET_FLEET`, `COMFYFLEET_STAGE` and `COMFYFLEET_MACHINE` are the worker's fleet, stage and machine name there",
        "the units in `deploy/systemd`",
    ),
)
EVERYBODY = "*"
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_HOST_PORT = re.compile(r"(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\]):(?P<port>[0-9]{1,5})")
_USUAL_PORTS = {"http:": ":80", "https": ":443"}  # browsers omit them from an origin
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """The settings. Each field is read from its variable (see `variable_of`). The settings
    reference is generated from the comments."""

    admin_key: str = ""  # the first owner's key; default: generated and printed at the first start
    central_database_url: str = ""  # default: central.sqlite3 in the data folder
    central_database_direct_url: str = ""  # PostgreSQL's own address, if the URL above is a pooler
    tenant_database_urls: str = ""  # name=url,name=url; default: main=tenants.sqlite3
    tenant_database_direct_urls: str = ""  # name=url,…; PostgreSQL's own addresses, as above
    storage_url: str = ""  # file:///dir or s3://bucket/prefix?region=…; default: the data folder
    public_url: str = "http://127.0.0.1:8000"  # URL for clients; default: the listening address
    cors_origins: str = ""  # origins of front ends that may call the API, comma-separated
    webhook_private_hosts: str = ""  # private host:port,… that webhooks may call
    web: bool = True  # whether the web pages are served
    public_catalogue: bool = False  # show effects without a sign-in; up: only on its own machine
    lease_seconds: int = 900  # how long a lease lasts without a heartbeat
    heartbeat_seconds: int = 30  # seconds between heartbeats of a worker
    max_attempts: int = 3  # maximum attempts of a job; returned attempts don't count
    max_requeues: int = 20  # a job that is requeued more often is set aside as poisoned
    max_fleet_workers: int = 50  # maximum workers of a fleet without its own limit
    max_queued_per_tenant: int = 100_000  # maximum queued jobs of a tenant without its own limit
    max_queued_total: int = 2_000_000  # maximum queued jobs of all tenants
    max_active_jobs_per_user: int = 5  # maximum queued and running jobs of a user, of all kinds
    max_active_jobs_per_tenant: int = 1000  # approximate maximum for all users of a tenant
    max_storage_bytes_per_tenant: int = 1024**4  # default quota, including announced uploads
    max_graphs_per_user: int = 10_000  # maximum stored graphs of a user, without deleted ones
    max_queued_per_graph_run: int = 5  # maximum queued jobs of a graph run; further jobs are held
    max_executions_per_graph_run: int = 100_000  # maximum executions of a run
    top_up_url: str = ""  # where customers buy tokens; {tenant_id} and {user_id} are filled in
    event_keep_days: int = 7  # retention of job events, to resume streams; 0 means forever
    delivery_keep_days: int = 30  # retention of webhook deliveries; 0 means forever
    audit_keep_days: int = 365  # retention of the audit log; 0 means forever
    dispatch_keep_days: int = 30  # retention of dispatches after they ended; 0 means forever
    prompt_keep_days: int = 90  # retention of prompts after their job ended; 0 means forever
    retention_days: int = 0  # retention of media and files, unless set per tenant; 0 means forever
    run_limit_seconds: int = 3600  # maximum duration of a run; a workflow may have its own limit
    url_seconds: int = 900  # validity of a signed URL; a held lease gets new ones
    max_output_bytes: int = 4 * 1024**3  # maximum size of an output file
    max_upload_bytes: int = 2 * 1024**3  # maximum size of an upload; effects may have lower limits
    max_hashed_bytes: int = 256 * 1024**2  # larger uploads are not deduplicated by content
    max_picture_pixels: int = 64_000_000  # maximum pixels of a picture, in the engine as well
    fetch_seconds: int = 120  # timeout for fetching a file from a customer's URL
    calls_per_second: float = 20.0  # average API calls of a user, over all keys
    calls_at_once: int = 100  # maximum burst of API calls of a user
    tenant_calls_per_second: float = 200.0  # average API calls of a tenant, over all users
    tenant_calls_at_once: int = 1000  # maximum burst of API calls of a tenant
    gateway_calls_per_second: float = 100.0  # average calls of a user to ComfyUI's API
    gateway_calls_at_once: int = 1000  # maximum burst of a user's calls to ComfyUI's API
    gateway_tenant_calls_per_second: float = 1000.0  # average calls of a tenant to ComfyUI's API
    gateway_tenant_calls_at_once: int = 5000  # maximum burst of a tenant's ComfyUI API calls
    session_hours: int = 168  # how long a browser stays signed in as a customer
    operator_session_hours: int = 12  # how long a browser stays signed in as an operator
    oidc_issuer: str = ""  # identity provider for browser sign-ins, if any
    oidc_client_id: str = ""  # comfyfleet's client id at the identity provider
    oidc_client_secret: str = ""  # comfyfleet's client secret; empty for a public client
    oidc_name: str = "single sign-on"  # name of the identity provider on the sign-in page
    oidc_scopes: str = "openid email profile"  # scopes requested from the identity provider
    oidc_tenants: str = ""  # claim:value=tenant id,… for users, or *=ID for all
    oidc_roles: str = ""  # claim:value=role,… for operators, such as groups:ops=viewer
    max_sockets_per_user: int = 100  # maximum open WebSockets of a user's ComfyUI clients
    max_streams_per_key: int = 50  # maximum open event streams of an API key
    max_streams_per_user: int = 100  # maximum open event streams of a user, over all keys
    max_body_bytes: int = 8 * 1024**2  # maximum size of a customer's request body without files
    max_connections: int = 20_000  # maximum open connections; each worker and each stream uses one
    affinity_max_wait_seconds: int = 60  # how long jobs for loaded models may delay other jobs
    prefetch_after_seconds: float = 0.1  # how long a new job is reserved for idle workers
    avoid_worker_seconds: int = 60  # how long a job avoids a worker whose backend failed it
    missed_heartbeats_max: int = 3  # missed heartbeats until a worker's jobs are requeued
    max_lost_leases: int = 5  # a job that loses its worker this often before it starts is poisoned
    show_backends: bool = False  # customers see machine names, tracebacks and devices; on in up
    no_backend_seconds: int = 60  # how long a run's job waits if no worker can run it
    offline_after_seconds: int = 90  # time without contact until a worker is offline
    remove_worker_after_seconds: int = 600  # time without contact until a worker is removed
    outage_seconds: int = 60  # if the sweeps pause for longer, all leases are extended first
    sweep_seconds: float = 5.0  # seconds between passes of the queue sweeps
    reading_keep_hours: int = 24  # retention of machine metrics of workers; 0 means forever
    validate_asg_instance: bool = False  # workers named i-… must belong to an auto-scaling group
    metrics_key: str = ""  # bearer key for /metrics; if empty, /metrics is open
    cloudwatch_namespace: str = ""  # CloudWatch namespace for fleet metrics, if any
    cloudwatch_seconds: int = 60  # seconds between CloudWatch updates
    scale_target_seconds: int = 300  # target time to start all queued jobs, for WantedWorkers
    comfyui_timeout: float = 300.0  # seconds for a job of a pipeline step without a timeout
    comfyui_submit_interval: float = 10.0  # seconds between checks of pipeline runs
    comfyui_poll_interval: float = 5.0  # seconds between checks of ended jobs of pipeline runs
    abandoned_job_hours: int = 24  # a run's job fails after this time without a report
    pipeline_concurrent_jobs: int = 1  # maximum jobs in flight of a run without its own limit
    pipeline_max_bytes: int = 50 * 1024**3  # total size of files at which a run is paused
    pipeline_alert_failures: int = 5  # number of failed jobs of a run that raises an alert
    pipeline_alert_seconds: int = 600  # period in which these failures are counted
    pipeline_keep_days: int = 90  # retention of a run's files after its last activity

    @property
    def lost_after_seconds(self) -> int:
        """Returns the number of seconds without contact after which a worker loses its leases.
        Another worker may then take its id."""
        return self.missed_heartbeats_max * self.heartbeat_seconds

    @property
    def unseen_seconds_max(self) -> int:
        """Returns the maximum time in seconds between two polls or heartbeats of a running worker.

        After this time, it counts as offline or lost.
        """
        return min(self.offline_after_seconds, self.lost_after_seconds)

    @property
    def grace_seconds(self) -> int:
        """Returns how many seconds to extend every lease by after a long outage of the control
        planes.
        """
        return 3 * self.heartbeat_seconds


# For these settings, zero means forever.
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
    """Returns the environment variable of a setting."""
    return name.upper() if name.startswith(KNOWN_BEFORE) else PREFIX + name.upper()


@cache
def remarks() -> Mapping[str, str]:
    """Returns the description of each setting, taken from the comments above. The result is empty
    if the source code isn't available.
    """
    try:
        source = inspect.getsource(Settings)
    except OSError:
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE))


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Maps unknown variables with our prefix to the setting that was probably meant. Unknown names
    that aren't similar to any setting are ignored, because they may belong to other programs."""
    known = {variable_of(field.name) for field in fields(Settings)} | set(READ_ELSEWHERE)
    names = [variable.removeprefix(PREFIX) for variable in known if variable.startswith(PREFIX)]
    suggestions: dict[str, str] = {}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            close = get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.8)
            if close:
                suggestions[name] = PREFIX + close[0]
    return suggestions


def read_settings(environ: Mapping[str, str]) -> Settings:
    values = {
        field.name: _parsed(variable_of(field.name), environ[variable_of(field.name)], field.type)
        for field in fields(Settings)
        if variable_of(field.name) in environ
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
    """A rule for users of an identity provider. Users with this value in this claim get `target`. A
    rule without a claim applies to everyone."""

    claim: str
    value: str
    target: str


def parse_claim_rules(text: str, name: str) -> tuple[ClaimRule, ...]:
    """Parses `claim:value=target,…`. The claim's name may contain a colon, but the value may
    not."""
    rules: list[ClaimRule] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        source, equals, target = (item.strip() for item in part.rpartition("="))
        claim, colon, value = source.rpartition(":")
        is_whole = bool(equals and target and (source == EVERYBODY or (colon and claim and value)))
        if not is_whole:
            raise InvalidInput(
                f"{name} has {part!r}; it must be claim:value=…, or {EVERYBODY}=…", field=name
            )
        rules.append(ClaimRule(claim, value, target))
    return tuple(rules)


def parse_origins(text: str) -> tuple[str, ...]:
    """Parses `https://app.example,http://localhost:3000`. Raises InvalidInput if a value isn't an
    origin."""
    name = variable_of("cors_origins")
    origins = tuple(item.strip().lower() for item in text.split(",") if item.strip())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"{name} has {origin!r}; an origin is http:// or https://, a host and perhaps a port, "
                "without a path, such as https://app.example",
                field=name,
            )
    return tuple(origin.removesuffix(_USUAL_PORTS[origin[:5]]) for origin in origins)


def parse_private_hosts(text: str) -> frozenset[tuple[str, int]]:
    """Parses `localhost:3000,[::1]:8080,hooks.internal:443`. Raises InvalidInput for anything
    else."""
    hosts = set[tuple[str, int]]()
    for part in filter(None, (item.strip().lower() for item in text.split(","))):
        match = _HOST_PORT.fullmatch(part)
        if match is None or not 0 < int(match["port"]) < 65536:
            name = variable_of("webhook_private_hosts")
            raise InvalidInput(
                f"{name} has {part!r}; it must be host:port, such as localhost:3000", field=name
            )
        hosts.add((match["host"].strip("[]"), int(match["port"])))
    return frozenset(hosts)


POOL_URLS = "COMFYFLEET_TENANT_DATABASE_URLS"
DIRECT_URLS = "COMFYFLEET_TENANT_DATABASE_DIRECT_URLS"


def parse_pools(text: str, variable: str = POOL_URLS) -> dict[str, str]:
    """Parses `name=url,name=url`. A URL may contain `=`, but no comma."""
    pools: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, url = part.partition("=")
        if not equals or not name.strip() or not url.strip():
            raise InvalidInput(
                f"{variable} has {part!r}; it must be name=url,name=url",
                field=variable,
            )
        if name.strip() in pools:
            raise InvalidInput(
                f"{variable} contains the pool {name.strip()!r} twice",
                field=variable,
            )
        pools[name.strip()] = url.strip()
    return pools
