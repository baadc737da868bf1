"""Object storage by key: a local folder with URLs signed by the control plane, or S3 with presigned
URLs. A store is opened by its URL.

Internal: may change without notice."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit
from urllib.request import url2pathname

from comfyfleet.clock import Clock
from comfyfleet.errors import InvalidInput, missing_extra
from comfyfleet.server.storage.local import LocalStore
from comfyfleet.server.storage.model import (
    ListedObject,
    ObjectFacts,
    ObjectStore,
    PresignedUrl,
    checked_key,
)

FORMS = "file:///folder or s3://bucket/prefix?endpoint=…&region=…"
FIELD = "COMFYFLEET_STORAGE_URL"
_OPTIONS = ("endpoint", "public_endpoint", "region")


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A bucket on S3. The public endpoint is the one that clients use, if it differs from
    `endpoint`."""

    name: str
    prefix: str = ""
    endpoint: str | None = None
    public_endpoint: str | None = None
    region: str | None = None

    def key(self, key: str) -> str:
        checked = checked_key(key)
        return checked_key(f"{self.prefix}/{checked}") if self.prefix else checked


def open_store(url: str, *, public_url: str, secret: bytes, clock: Clock) -> ObjectStore:
    """Opens a store by its URL. `public_url` and `secret` are used for a folder, whose URLs the
    control plane serves."""
    match place := parse_store_url(url):
        case Path():
            return LocalStore(place, public_url=public_url, secret=secret, clock=clock)
        case BucketUrl():
            return _open_bucket(place)


def _open_bucket(bucket: BucketUrl) -> ObjectStore:
    try:
        from comfyfleet.server.storage.s3 import S3Store
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise missing_extra(f"s3://{bucket.name}", error.name, "s3") from None
    return S3Store(bucket)


def parse_store_url(url: str) -> Path | BucketUrl:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unknown() from None
    if parts.scheme == "file":
        return _folder(parts)
    if parts.scheme == "s3":
        return _bucket(parts)
    raise _unknown()


def _folder(parts: SplitResult) -> Path:
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/") or parts.query:
        raise InvalidInput(
            "a storage folder must have the form file:///folder, with three slashes", field=FIELD
        )
    return Path(url2pathname(parts.path))


def _bucket(parts: SplitResult) -> BucketUrl:
    # Credentials come from AWS's own variables, because URLs end up in logs.
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidInput(
            "an S3 store must have the form s3://bucket/prefix?endpoint=…&region=…; "
            "its credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            field=FIELD,
        )
    prefix = unquote(parts.path).strip("/")
    options = dict(parse_qsl(parts.query))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise InvalidInput(
            f"{FIELD} has the unknown option {unknown[0]!r}; use one of {', '.join(_OPTIONS)}",
            field=FIELD,
        )
    for name in ("endpoint", "public_endpoint"):
        if name in options and not options[name].startswith(("http://", "https://")):
            raise InvalidInput(f"{name} in {FIELD} must begin with http:// or https://")
    return BucketUrl(parts.netloc, checked_key(prefix) if prefix else "", **options)


def _unknown() -> InvalidInput:
    return InvalidInput(f"{FIELD} must be {FORMS}", field=FIELD)


__all__ = ["ListedObject", "LocalStore", "ObjectFacts", "ObjectStore", "PresignedUrl", "open_store"]
