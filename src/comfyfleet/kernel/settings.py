"""What the control plane reads from its environment, each with its default and its unit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from comfyfleet.kernel.errors import InvalidInput

PREFIX = "COMFYFLEET_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """Each field is read from `COMFYFLEET_` + its name in capitals."""

    admin_key: str = ""
    central_database_url: str = ""  # default: central.sqlite3 in the data folder
    tenant_database_urls: str = ""  # name=url,name=url; default: main=tenants.sqlite3 there
    storage_url: str = ""  # file:///dir or s3://bucket/prefix?endpoint=…&region=…
    public_url: str = "http://127.0.0.1:8000"
    lease_seconds: int = 900
    heartbeat_seconds: int = 30
    max_attempts: int = 3
    max_requeues: int = 20
    max_fleet_workers: int = 50
    max_queued_per_tenant: int = 100_000
    max_queued_total: int = 2_000_000
    max_active_jobs_per_user: int = 5
    run_limit_seconds: int = 3600
    url_seconds: int = 900
    max_output_bytes: int = 4 * 1024**3
    affinity_max_wait_seconds: int = 60
    avoid_worker_seconds: int = 60
    offline_after_seconds: int = 90
    remove_worker_after_seconds: int = 600
    outage_seconds: int = 60
    sweep_seconds: float = 5.0
    reading_keep_hours: int = 24
    validate_asg_instance: bool = False
    cloudwatch_namespace: str = ""  # none: nothing is published
    cloudwatch_seconds: int = 60
    scale_target_seconds: int = 300  # within which all that waits shall have started

    @property
    def grace_seconds(self) -> int:
        """What every lease gets after an outage of ours."""
        return 3 * self.heartbeat_seconds


def read_settings(environ: Mapping[str, str]) -> Settings:
    values = {
        each.name: _parsed(
            PREFIX + each.name.upper(), environ[PREFIX + each.name.upper()], each.type
        )
        for each in fields(Settings)
        if PREFIX + each.name.upper() in environ
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
