"""EC2 services for a worker: its instance metadata, spot and rebalance notices, and scale-in
protection in an auto-scaling group.

Only a service that responds to the PUT for a session key counts as EC2. Other clouds and captive
portals also listen on the link-local address and must not be able to stop a worker.

Workers on the same machine coordinate through lock files in the folder `shared`. The last one to
become idle removes the protection.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx

from comfyfleet.errors import install_line

ENDPOINT = "http://169.254.169.254"
ENDPOINT_V6 = "http://[fd00:ec2::254]"
KEY_SECONDS = 21_600  # the longest lifetime of a session key that the service allows
RENEW_BEFORE_SECONDS = 300
METADATA_CONNECT_SECONDS_MAX = 1.0
METADATA_ANSWER_SECONDS_MAX = 3.0
ANSWER_BYTES_MAX = 65_536


class MetadataUnavailable(Exception):
    """The metadata service is absent or returns an invalid response."""


def metadata_endpoint(environ: Mapping[str, str]) -> str | None:
    """Returns the service's URL from the variables that AWS's own clients read, or None if they
    disable it."""
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    if endpoint := environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip():
        return endpoint.rstrip("/")
    is_v6 = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    return ENDPOINT_V6 if is_v6 else ENDPOINT


class InstanceMetadata:
    """Reads single values from the metadata service. Requests a session key if it has none or its
    key has expired."""

    def __init__(
        self,
        endpoint: str,
        *,
        key_seconds: int = KEY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        # Proxies are disabled, because the address is local to this machine.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(
                METADATA_ANSWER_SECONDS_MAX, connect=METADATA_CONNECT_SECONDS_MAX
            ),
        )
        self._base = f"{endpoint}/latest"
        self._key_seconds = key_seconds
        self._monotonic = monotonic
        self._key = ""
        self._renew_at = float("-inf")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> str | None:
        """Returns the value under `meta-data/`, or None if it doesn't exist. Raises
        MetadataUnavailable."""
        status, text = await self._read(path)
        if status == 401:
            # The key is no longer valid, because the service was restarted or this machine's clock
            # is slow. Request a new one.
            self._renew_at = float("-inf")
            status, text = await self._read(path)
        if status == 404:
            return None
        if status != 200:
            raise MetadataUnavailable(f"reading {path} failed with status {status}")
        return text

    async def _read(self, path: str) -> tuple[int, str]:
        headers = {"X-aws-ec2-metadata-token": await self._current_key()}
        return await self._ask("GET", f"{self._base}/meta-data/{path}", headers)

    async def _current_key(self) -> str:
        now = self._monotonic()
        if now < self._renew_at:
            return self._key
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._key_seconds)}
        status, text = await self._ask("PUT", f"{self._base}/api/token", headers)
        if status != 200 or not _is_header_value(text):
            raise MetadataUnavailable(f"no session key was issued (status {status})")
        self._key = text
        self._renew_at = now + self._key_seconds - min(RENEW_BEFORE_SECONDS, self._key_seconds / 2)
        return self._key

    async def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        try:
            async with self._client.stream(method, url, headers=headers) as answer:
                received = b""
                async for part in answer.aiter_bytes():
                    received += part
                    if len(received) > ANSWER_BYTES_MAX:
                        raise MetadataUnavailable(
                            f"the response is longer than {ANSWER_BYTES_MAX} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise MetadataUnavailable(f"{type(error).__name__}: {error}") from error
        return answer.status_code, received.decode(errors="replace")


def _is_header_value(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
# Seconds between polls while the machine doesn't appear to be on EC2. Polling continues because the
# metadata service may start later than the worker.
ABSENT_POLL_SECONDS = 60.0
ACTION, REBALANCE = "spot/instance-action", "events/recommendations/rebalance"
NoticeKind: TypeAlias = Literal["spot", "rebalance"]
MetadataContact: TypeAlias = Literal["unknown", "absent", "there", "lost"]


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """A notice about the machine. `at` is when the machine stops, or None if the notice doesn't
    contain a time. Rebalance recommendations never contain one."""

    kind: NoticeKind
    at: datetime | None = None


class SpotWatch:
    """Polls the metadata service for notices. Unavailable metadata and invalid notices are logged
    and never raised."""

    def __init__(
        self,
        metadata: InstanceMetadata,
        *,
        poll_seconds: float = POLL_SECONDS,
        absent_poll_seconds: float = ABSENT_POLL_SECONDS,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._metadata = metadata
        self._poll_seconds = poll_seconds
        self._absent_poll_seconds = absent_poll_seconds
        self._pause = pause
        self._contact: MetadataContact = "unknown"
        self._unread: set[str] = set()

    async def notices(self) -> AsyncIterator[SpotNotice]:
        """Yields each notice once, and a spot notice again if its time has changed."""
        seen: set[SpotNotice] = set()
        while True:
            for notice in await self._poll():
                if notice not in seen:
                    seen.add(notice)
                    yield notice
            is_ec2 = self._contact in ("there", "lost")
            await self._pause(self._poll_seconds if is_ec2 else self._absent_poll_seconds)

    async def _poll(self) -> tuple[SpotNotice, ...]:
        try:
            notices = (
                self._read(ACTION, await self._metadata.get(ACTION), parse_action),
                self._read(REBALANCE, await self._metadata.get(REBALANCE), parse_rebalance),
            )
        except MetadataUnavailable as error:
            self._note_absent(error)
            return ()
        self._note_present()
        return tuple(notice for notice in notices if notice)

    def _read(
        self, path: str, text: str | None, parse: Callable[[str], SpotNotice | None]
    ) -> SpotNotice | None:
        if text is None:
            self._unread.discard(path)
            return None
        notice = parse(text)
        if notice is None and path not in self._unread:
            self._unread.add(path)
            logger.warning("EC2 metadata: %s has an unknown format: %.200r", path, text)
        return notice

    def _note_absent(self, error: MetadataUnavailable) -> None:
        if self._contact == "there":
            logger.warning("EC2 metadata is no longer available; still polling: %s", error)
            self._contact = "lost"
        elif self._contact == "unknown":
            logger.info("no EC2 metadata available, so there are no spot notices: %s", error)
            self._contact = "absent"

    def _note_present(self) -> None:
        if self._contact != "there":
            logger.info("watching EC2 metadata for spot notices")
            self._contact = "there"


def parse_action(text: str) -> SpotNotice | None:
    """Parses `{"action": "terminate", "time": "…Z"}`. Every action means that the machine stops."""
    fields = _mapping(text)
    action = fields.get("action")
    if not isinstance(action, str) or action in ("", "none"):
        return None
    return SpotNotice("spot", _moment(fields.get("time")))


def parse_rebalance(text: str) -> SpotNotice | None:
    """Parses `{"noticeTime": "…Z"}`. This is when the advice was issued, not a deadline."""
    return SpotNotice("rebalance") if _moment(_mapping(text).get("noticeTime")) else None


def _mapping(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
        return moment and _in_utc(moment)
    except (ValueError, OverflowError):
        return None


def _in_utc(moment: datetime) -> datetime:
    """Returns the time in UTC. A time without a zone is assumed to be UTC, because the metadata
    service uses UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


TURN_SECONDS_MAX = 15.0
TURN_POLL_SECONDS = 0.05
BUSY_SUFFIX = ".busy"


class HostLocks:
    """Lock files in a shared folder, one for each busy worker.

    The operating system releases a lock when its process ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = folder / f"{os.getpid()}-{id(self)}{BUSY_SUFFIX}"
        self._held: int | None = None

    def mark_busy(self) -> None:
        if self._held is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = _locked(self._own)

    def unmark(self) -> None:
        if self._held is not None:
            self._own.unlink(missing_ok=True)
            os.close(self._held)
            self._held = None

    def others_are_busy(self) -> bool:
        return any(
            _is_locked(path) for path in self._folder.glob(f"*{BUSY_SUFFIX}") if path != self._own
        )

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Lets only one worker at a time check the other workers' locks and call AWS, so that the
        last call accounts for all workers.

        After a timeout, the worker continues without the lock, because a hung worker must not block
        the others.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock: int | None = None
        for _ in range(int(TURN_SECONDS_MAX / TURN_POLL_SECONDS)):
            if (lock := _locked(self._folder / "turn")) is not None:
                break
            await asyncio.sleep(TURN_POLL_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Returns a descriptor that holds the file's lock, or None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _lock(descriptor):
            return True
        path.unlink(missing_ok=True)  # A killed worker left this file behind.
        return False
    finally:
        os.close(descriptor)


if sys.platform == "win32":

    def _lock(descriptor: int) -> bool:
        """Reports every lock as acquired. Without file locks, each worker acts independently."""
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


# Seconds that a worker must be idle before AWS is called, so that short pauses between jobs cause
# no calls.
IDLE_SECONDS = 30.0
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 5.0, 300.0
CLOSE_SECONDS_MAX = 5.0
CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX = 3, 10


class AwsCallFailed(Exception):
    """Raised when a call to AWS failed. The caller retries it."""


@dataclass(frozen=True, slots=True)
class ScalingGroupMember:
    """This instance as a member of its auto-scaling group. `client` is boto3's autoscaling
    client."""

    client: Any
    instance_id: str
    group: str

    async def protect(self, protected: bool) -> None:
        await _call_aws(
            self.client.set_instance_protection,
            InstanceIds=[self.instance_id],
            AutoScalingGroupName=self.group,
            ProtectedFromScaleIn=protected,
        )


async def find_group_member(
    metadata: InstanceMetadata, environ: Mapping[str, str]
) -> ScalingGroupMember | None:
    """Finds the auto-scaling group of this instance. Returns None if the machine isn't on EC2,
    boto3 is missing, or the instance isn't in a group. Raises AwsCallFailed."""
    try:
        instance_id = await metadata.get("instance-id")
        if not instance_id:
            return None
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        region = region or await metadata.get("placement/region")
    except MetadataUnavailable:
        return None
    client = await _open_client(region)
    if client is None:
        return None
    answer = await _call_aws(client.describe_auto_scaling_instances, InstanceIds=[instance_id])
    for instance in answer["AutoScalingInstances"]:
        logger.info(
            "using scale-in protection in the auto-scaling group %s",
            instance["AutoScalingGroupName"],
        )
        return ScalingGroupMember(client, instance_id, instance["AutoScalingGroupName"])
    logger.info(
        "%s isn't in an auto-scaling group, so it needs no scale-in protection", instance_id
    )
    return None


async def _open_client(region: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        logger.info("scale-in protection isn't available: %s", install_line("aws"))
        return None
    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=ANSWER_SECONDS_MAX,
        retries={"total_max_attempts": 1},  # `run` retries with the latest state
    )
    return await _call_aws(boto3.client, "autoscaling", region_name=region, config=config)


async def _call_aws(call: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """Calls AWS in a thread, because boto3 blocks."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return await asyncio.to_thread(call, *arguments, **named)
    except (BotoCoreError, ClientError) as error:
        raise AwsCallFailed(str(error)) from error


class ScaleInProtection:
    """Scale-in protection of this instance. `busy` and `idle` may be called at any time, and `run`
    updates the protection in AWS."""

    def __init__(
        self,
        metadata: InstanceMetadata,
        environ: Mapping[str, str],
        *,
        idle_seconds: float = IDLE_SECONDS,
        retry_seconds: float = RETRY_SECONDS_MIN,
        shared: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = partial(find_group_member, metadata, environ)
        self._shared = shared or Path(tempfile.gettempdir())
        self._idle_seconds = idle_seconds
        self._retry_seconds = retry_seconds
        self._monotonic = monotonic
        self._member: ScalingGroupMember | None = None
        self._host_locks: HostLocks | None = None
        self._is_busy = False
        self._idle_since = monotonic()
        self._aws_protected: bool | None = None  # the state last set in AWS, or None if unknown
        self._changed = asyncio.Event()

    def busy(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._changed.set()

    def idle(self) -> None:
        if self._is_busy:
            self._is_busy = False
            self._idle_since = self._monotonic()
            self._changed.set()

    async def run(self) -> None:
        """Updates the protection until cancelled. Returns immediately if the instance isn't in an
        auto-scaling group."""
        retries = _back_off(self._retry_seconds)
        while True:
            try:
                if self._member is None and not await self._is_found():
                    return
                await self._step()
            except (AwsCallFailed, OSError) as error:
                logger.warning("scale-in protection could not be set; retrying: %s", error)
                await asyncio.sleep(next(retries))
            else:
                retries = _back_off(self._retry_seconds)

    async def close(self) -> None:
        """Removes the protection when the worker stops. Must be called after `run` has ended."""
        self._is_busy = False
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._set_protection(protected=False)
        except (AwsCallFailed, OSError) as error:  # includes TimeoutError
            logger.warning("scale-in protection could not be removed: %s", error)

    async def _is_found(self) -> bool:
        self._member = await self._find()
        if self._member is None:
            return False
        self._host_locks = HostLocks(self._shared / f"comfyfleet-{self._member.instance_id}")
        return True

    async def _step(self) -> None:
        """Calls AWS if a call is due. Otherwise, waits for a change or for the next call."""
        self._changed.clear()
        wait_seconds = self._seconds_until_due()
        if wait_seconds == 0:
            await self._set_protection(protected=self._is_busy)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await self._changed.wait()

    def _seconds_until_due(self) -> float | None:
        """Returns the seconds until AWS must be called, or None if AWS is up to date."""
        if self._aws_protected is self._is_busy:
            return None
        if self._is_busy:
            return 0
        return max(0.0, self._idle_since + self._idle_seconds - self._monotonic())

    async def _set_protection(self, *, protected: bool) -> None:
        if self._member is None or self._host_locks is None or self._aws_protected is protected:
            return
        self._aws_protected = None
        if protected:
            self._host_locks.mark_busy()
        async with self._host_locks.turn():
            if protected or not self._host_locks.others_are_busy():
                await self._member.protect(protected)
            if not protected:
                self._host_locks.unmark()
        self._aws_protected = protected


def _back_off(seconds: float) -> Iterator[float]:
    while True:
        yield seconds
        seconds = min(2 * seconds, RETRY_SECONDS_MAX)
